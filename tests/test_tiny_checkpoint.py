"""The checkpoint maker repeats itself byte for byte and leaves out nothing an export reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support_images import grid_of, make_image, make_patches, random_features
from tiny_checkpoint import SPARE_COLUMNS, SPECIALS, make_draft, make_target
from tokenizers import Tokenizer

TARGET_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
GOLDEN = Path(__file__).parent / "golden" / "golden.json"
DFLASH2 = {
    "conv_kernel_size": 3,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 6,
}
TABLE = "model.language_model.embed_tokens.weight"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "target"
    make_target(folder)
    return folder


def test_same_arguments_give_the_same_bytes(target: Path, tmp_path: Path) -> None:
    make_target(tmp_path / "again")
    make_target(tmp_path / "other", seed=5)
    assert contents(tmp_path / "again") == contents(target)
    assert contents(tmp_path / "other") != contents(target)
    for name in ("first", "second"):
        make_draft(tmp_path / name, target)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_golden_files_belong_to_these_checkpoints(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    make_target(tmp_path / "target", **golden["target"]["options"])
    drafts = golden["drafts"] | golden["drafts2"]
    for name, draft in drafts.items():
        make_draft(tmp_path / name, tmp_path / "target", **draft["options"])
    for name, entry in {"target": golden["target"], **drafts}.items():
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        assert hashlib.sha256(weights).hexdigest() == entry["sha256"], name


def test_target_has_every_file_and_tensor(target: Path, tmp_path: Path) -> None:
    assert set(contents(target)) == TARGET_FILES
    tensors = load_file(target / "model.safetensors")
    assert len(tensors) == 2 + 4 * 11 + 3 + 3 * 12 + 3 * 6
    assert tensors[TABLE].shape == (512, 64)
    assert tensors["model.visual.deepstack_merger_list.1.norm.weight"].shape == (128,)
    assert "lm_head.weight" not in tensors
    make_target(tmp_path, tied=False)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape == (512, 64)


def test_tokenizer_leaves_spare_head_columns(target: Path) -> None:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    config = config_of(target)
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"] - SPARE_COLUMNS
    assert config["image_token_id"] == tokenizer.token_to_id("<|image_pad|>")
    text = "".join(SPECIALS) + "Größe 42,\n\n  日本"
    ids = tokenizer.encode(text).ids
    assert ids[: len(SPECIALS)] == [tokenizer.token_to_id(token) for token in SPECIALS]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shards_and_dtype_keep_the_weights(target: Path, tmp_path: Path, dtype: str) -> None:
    make_target(tmp_path, dtype=dtype, shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    merged = {k: v for file in files for k, v in load_file(tmp_path / file).items()}
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for name, value in load_file(target / "model.safetensors").items():
        assert merged.pop(name).tobytes() == value.astype(kind).tobytes()
    assert not merged


def test_close_logits_pairs_head_rows(tmp_path: Path) -> None:
    make_target(tmp_path, close_logits=True)
    table = load_file(tmp_path / "model.safetensors")[TABLE]
    gap = np.abs(table[1::2] - table[::2]).max()
    assert 0 < gap < 1e-4


def test_zlab_draft(target: Path, tmp_path: Path) -> None:
    make_draft(tmp_path, target, prefix="model.", sliding_window=16, is_causal=False, causal=False)
    config, tensors = config_of(tmp_path), load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 2 * 11 + 3 and all(name.startswith("model.") for name in tensors)
    assert tensors["model.fc.weight"].shape == (64, 128)
    assert config["dflash_config"] == {
        "causal": False,
        "mask_token_id": 503,
        "target_layer_ids": [1, 2],
    }
    assert config["layer_types"] == ["sliding_attention"] * 2 and config["use_sliding_window"]


def test_speculators_draft_has_the_same_body(target: Path, tmp_path: Path) -> None:
    make_draft(tmp_path / "zlab", target)
    options = {"layout": "speculators", "draft_vocab": 100, "training_keys": True}
    make_draft(tmp_path / "spec", target, **options)
    config, tensors = config_of(tmp_path / "spec"), load_file(tmp_path / "spec/model.safetensors")
    assert config["aux_hidden_state_layer_ids"] == [2, 3] and config["draft_vocab_size"] == 100
    for name, value in load_file(tmp_path / "zlab/model.safetensors").items():
        assert np.array_equal(tensors.pop(name), value)
    ids = np.arange(100) + tensors["d2t"]
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert np.array_equal(np.flatnonzero(tensors["t2d"]), ids) and tensors["t2d"].shape == (512,)
    assert tensors["lm_head.weight"].shape == (100, 64)
    assert {"verifier_lm_head.weight", "verifier_norm.weight"} <= set(tensors)


def test_dflash2_draft_adds_to_a_plain_one(target: Path, tmp_path: Path) -> None:
    """The body is the v1 drafter's of the same seed; kernels lie around one at their first tap."""
    make_draft(tmp_path / "plain", target, seed=4)
    make_draft(tmp_path / "second", target, seed=4, **DFLASH2)
    tensors = load_file(tmp_path / "second/model.safetensors")
    for name, value in load_file(tmp_path / "plain/model.safetensors").items():
        assert np.array_equal(tensors.pop(name), value)
    shapes = {name: value.shape for name, value in tensors.items()}
    convs = [f"layers.{i}.{part}_conv" for i in (0, 1) for part in ("attention", "mlp")]
    expected = {f"{conv}.base_kernel": (2, 3, 64) for conv in convs}
    expected |= {f"{conv}.kernel_projection.weight": (2 * 3 * 4, 64) for conv in convs}
    expected["candidate_selector.hidden_projection.weight"] = (12, 64)
    for kind in ("predecessor", "successor"):
        expected[f"candidate_selector.{kind}_codebook"] = (512, 12)
    assert shapes == expected
    kernel = tensors["layers.1.mlp_conv.base_kernel"]
    assert np.allclose(kernel.mean(axis=2), [[1, 0, 0]] * 2, atol=0.2)


def test_dflash2_config_of_each_layout(target: Path, tmp_path: Path) -> None:
    """Nested for z-lab, at the top for speculators; what is not given stays out."""
    options = {**DFLASH2, "sliding_window": 16, "is_causal": False, "output_multiplier": 0.5}
    make_draft(tmp_path / "zlab", target, **options)
    make_draft(tmp_path / "spec", target, layout="speculators", **options)
    zlab, spec = config_of(tmp_path / "zlab"), config_of(tmp_path / "spec")
    assert zlab["architectures"] == spec["architectures"] == ["DFlash2DraftModel"]
    fields = {**DFLASH2, "output_multiplier": 0.5}
    assert fields.items() <= zlab["dflash_config"].items() and not fields.keys() & zlab.keys()
    assert fields.items() <= spec.items() and spec["speculators_model_type"] == "dflash2"
    assert spec["sliding_window_non_causal"] is True and zlab["is_causal"] is False
    assert "final_logit_softcapping" not in zlab["dflash_config"]


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "gguf"},
        {"draft_vocab": 100},
        {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8},
        {"layout": "speculators", "causal": True},
        {"layer_types": ("sliding_attention", "full_attention")},
    ],
)
def test_draft_refuses_what_a_layout_cannot_say(
    target: Path, tmp_path: Path, options: dict
) -> None:
    with pytest.raises(ValueError):
        make_draft(tmp_path, target, **options)


def test_images_and_features_repeat_themselves() -> None:
    image = make_image(64, 96, seed=3)
    assert image.dtype == np.uint8 and image.shape == (64, 96, 3)
    assert np.array_equal(image, make_image(64, 96, seed=3))
    patches = make_patches(image)
    assert grid_of(image) == (1, 4, 6) and patches.shape == (24, 1536)
    # Row 1 is the first patch's right neighbour, channel 2, second frame.
    pixel = (float(image[5, 16 + 7, 2]) - 127.5) / 127.5
    assert patches[1].reshape(3, 2, 16, 16)[2, 1, 5, 7] == pytest.approx(pixel, abs=1e-6)
    assert np.array_equal(random_features(4, 3, 8), random_features(4, 5, 8)[:3])
