"""Text-only targets from checkpoint to prompt: no tower, no processor, no placeholders.

Knows what such a checkpoint lacks and what must be refused for it; the command line is apart.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support_checkpoint import edit_json, edit_tensors, export, refused
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.models.errors import ImageError, PromptError
from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.selfcheck import self_check

TEXT_ONLY = ("Qwen3ForCausalLM", "Qwen3_5ForCausalLM")
PICTURE = np.zeros((32, 32, 3), np.uint8)
PLACEHOLDERS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")


@pytest.fixture(scope="module", params=TEXT_ONLY)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only checkpoint, its drafter and their bundle, which no test may change."""
    folder = tmp_path_factory.mktemp(request.param)
    make_target(folder / "target", architecture=request.param, mtp=request.param == TEXT_ONLY[1])
    make_draft(folder / "draft", folder / "target")
    export(folder)
    return folder


@pytest.fixture(scope="module")
def model(made: Path) -> Model:
    return Model(made / "bundle")


@pytest.fixture
def box(made: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints to damage."""
    shutil.copytree(made, tmp_path / "box", ignore=shutil.ignore_patterns("bundle"))
    return tmp_path / "box"


def ids(model: Model, draft: str = "none", **options: Any) -> tuple[int, ...]:
    result = model.generate("Compare both.", draft=draft, max_new_tokens=12, **options).result()
    return tuple(result.token_ids)


def data_files(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(bundle.glob("*.data"))}


def test_bundle_has_no_part_for_images(made: Path, model: Model) -> None:
    """Nothing of a tower, no rules for images, and no id is banned for being a placeholder."""
    manifest = read_manifest(made / "bundle")
    assert not (made / "target/preprocessor_config.json").exists()
    assert manifest.image is manifest.target.vision is manifest.target.special is None
    assert "vision" not in manifest.graphs and "vision.data" not in manifest.data_files
    assert manifest.banned_ids == tuple(range(504, 512)), "only columns without a token"
    self_check(made / "bundle")


def test_every_drafter_gives_the_plain_answer(made: Path, model: Model) -> None:
    """All drafters of the bundle, lookup, and one row per prefill call."""
    plain = ids(model)
    assert len(set(plain)) > 3
    for draft in ("lookup", *model.manifest.draft_names):
        assert ids(model, draft) == ids(model, draft, chunk=1) == plain


@pytest.mark.parametrize("shards", [1, 3])
def test_own_head_and_shards(made: Path, tmp_path: Path, shards: int) -> None:
    """An untied head has a file of its own, which holds its matrix."""
    name = read_manifest(made / "bundle").target.architecture
    make_target(tmp_path / "target", architecture=name, tied=False, shards=shards)
    head = (export(tmp_path, draft=False) / "head.data").read_bytes()
    files = sorted((tmp_path / "target").glob("*.safetensors"))
    (matrix,) = (t["lm_head.weight"] for t in map(load_file, files) if "lm_head.weight" in t)
    assert len(files) == shards and head == matrix.tobytes()


def test_names_without_a_prefix(box: Path, made: Path) -> None:
    """A bare decoder's tensors have no `model.` before their names; the files are the same."""

    def strip(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(box / "target", strip)
    bundle = export(box)
    assert data_files(bundle) == data_files(made / "bundle")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.visual.pos_embed.weight", ("'model.visual.pos_embed.weight'", "matches nothing")),
        ("model.layers.4.mlp.up_proj.weight", ("'model.layers.4.mlp.up_proj.weight'",)),
        ("model.layers.0.mlp.experts.0.up_proj.weight", ("'model.layers.0.mlp.experts.0",)),
        ("lm_head.bias", ("'lm_head.bias'",)),
    ],
)
def test_tensors_of_another_network(box: Path, name: str, words: tuple[str, ...]) -> None:
    """A tower, a layer or experts that the configuration does not speak of."""
    edit_tensors(box / "target", lambda t: t.update({name: np.zeros((4, 4), np.float32)}))
    refused(box, *words)


def test_missing_tensor(box: Path) -> None:
    """The message names it as the checkpoint would spell it."""
    edit_tensors(box / "target", lambda t: t.pop("model.layers.3.self_attn.q_norm.weight"))
    refused(box, "no tensor 'model.layers.3.self_attn.q_norm.weight'")


def test_decoder_of_a_vision_checkpoint(box: Path) -> None:
    """With another architecture's name the tensors are looked for where that one has them."""
    edit_json(box / "target/config.json", {"architectures": ["Qwen3VLForConditionalGeneration"]})
    refused(box, "config.json", "text_config")


def test_image_options_are_refused(box: Path, made: Path) -> None:
    """A limit for images means nothing here, neither at export nor at load."""
    refused(box, "--max-pixels", "reads no images", max_pixels=65536)
    with pytest.raises(ImageError, match="text-only model; --max-pixels"):
        Model(made / "bundle", max_pixels=65536)


@pytest.mark.parametrize(
    ("messages", "images", "words"),
    [
        ("hi", [PICTURE], "text-only model"),
        ("hi", ["missing.png"], "text-only model"),
        ("hi", "photo.png", "must be a list"),
        ([{"role": "user", "content": [{"type": "image"}]}], [], "1 image part"),
        ([{"role": "user", "content": [{"type": "image"}]}], [PICTURE], "text-only model"),
        ([{"role": "user", "content": [{"type": "image", "image": PICTURE}]}], [], "text-only"),
    ],
)
def test_pictures_are_refused(model: Model, messages: Any, images: Any, words: str) -> None:
    """In whichever way they are given: one clear line, before any picture is opened."""
    with pytest.raises(PromptError, match=words) as caught:
        model.plan(messages, images)
    assert "\n" not in str(caught.value)


def test_a_placeholder_in_a_prompt_stays_text(model: Model) -> None:
    """What a user types is spelled in ordinary tokens, and counts as text alone."""
    plan = model.plan(f"Say {''.join(PLACEHOLDERS)} twice.")
    assert plan.num_image_rows == 0 and [span.kind for span in plan.spans] == ["text"]
    assert (plan.mrope_positions == np.arange(plan.num_rows)).all()
    special = {model.tokenizer.token_id(token) for token in PLACEHOLDERS}
    assert None not in special and not special & set(plan.text_ids)
