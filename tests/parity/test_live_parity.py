"""Exported bundles against transformers and z-lab's dflash, run live on checkpoints of many kinds.

Knows which reference calls stand for which graphs. The golden files hold one checkpoint; here
seeds, head, dtypes, shards, widths, image sizes, windows and causality vary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_images import make_image, random_features
from support_networks import as_messages, draft_hidden, logits_of, max_difference, prefill
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.networks import DFlashNetworks
from dflash_onnx.runtime.images import prepare_image
from dflash_onnx.runtime.plan import PromptPlan

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity
BOUND = 1e-4

TARGETS: dict[str, dict[str, Any]] = {
    "tied": {"seed": 21},
    "untied": {"seed": 22, "tied": False},
    "bf16-sharded": {"seed": 23, "dtype": "bfloat16", "shards": 3, "tied": False},
    "fp16": {"seed": 24, "dtype": "float16", "theta": 1e6},
    # Heads times their width is 128 here, twice the hidden size; keys are shared by all heads.
    "wide-heads": {
        "seed": 25,
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 32,
        "mrope_section": (6, 5, 5),
    },
    "narrow": {"seed": 26, "heads": 3, "kv_heads": 3, "hidden": 48, "vocab": 400, "layers": 3},
    "late-deepstack": {"seed": 27, "deepstack": (2,), "vision_positions": 144, "vision_heads": 4},
    "three-deepstack": {"seed": 28, "deepstack": (0, 2, 3), "vision_depth": 4, "layers": 5},
}
SIZES = [(32, 32), (64, 320), (352, 96), (224, 256)]
DRAFTS: dict[str, dict[str, Any]] = {
    "default": {"seed": 31},
    "causal": {"seed": 32, "is_causal": True},
    "sliding": {"seed": 33, "sliding_window": 12, "is_causal": False},
    "sliding-causal": {"seed": 34, "sliding_window": 12},
    "mixed": {
        "seed": 35,
        "layers": 3,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
        "sliding_window": 20,
        "block_size": 16,
    },
    "mixed-bidirectional": {
        "seed": 36,
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 6,
        "is_causal": False,
    },
    "wide": {
        "seed": 37,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 16,
        "taps": (3, 0, 1),
        "theta": 1e4,
    },
    "bf16": {"seed": 38, "dtype": "bfloat16", "layers": 1, "taps": (2,)},
}
CONTEXTS = (1, 4, 11, 12, 13, 37, 90)


def _report(what: str, measured: float) -> None:
    print(f"[parity] {what}: {measured:.2e}")
    assert measured <= BOUND, f"{what} differs by {measured:.3e}"


def _export(folder: Path, *drafts: Path) -> Model:
    return Model(export_bundle(ExportOptions(folder / "target", folder / "bundle", drafts)))


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A loaded bundle whose drafter taps every layer, and transformers' own model."""
    folder = tmp_path_factory.mktemp("parity")
    spec = make_target(folder / "target", **TARGETS[request.param])
    make_draft(folder / "draft", folder / "target", taps=tuple(range(spec.layers)))
    reference = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        folder / "target", dtype=torch.float32
    ).eval()
    return _export(folder, folder / "draft"), reference


def _inputs(reference: Any, plan: PromptPlan, images: list[Any]) -> dict[str, Any]:
    ids = torch.from_numpy(plan.token_ids)[None]
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == reference.config.image_token_id).int(),
    }
    if images:
        grids = [[1, image.grid.height, image.grid.width] for image in images]
        patches = np.concatenate([image.patches for image in images])
        inputs |= {"pixel_values": torch.from_numpy(patches)}
        inputs |= {"image_grid_thw": torch.tensor(grids)}
    return inputs


def _reference_rows(reference: Any, inputs: dict[str, Any]) -> tuple[Any, dict[int, np.ndarray]]:
    """One cache-free call, and every decoder layer's own output."""
    taps: dict[int, np.ndarray] = {}

    def hook(layer: Any, _: Any, output: Any) -> None:
        taps[layer.self_attn.layer_idx] = output[0].numpy().copy()

    layers = reference.model.language_model.layers
    handles = [layer.register_forward_hook(hook) for layer in layers]
    with torch.inference_mode():
        output = reference(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return output, taps


@pytest.mark.parametrize("sizes", [[], *([size] for size in SIZES), [SIZES[2], SIZES[0]]])
def test_target_equals_transformers(pair: Any, sizes: list[tuple[int, int]]) -> None:
    """Text, one image of four shapes, two images: positions, taps, final rows and logits.
    A prefill in chunks of 5 cuts images anywhere and gives the same rows."""
    model, reference = pair
    parts = [["text", "The page: "], *(["image", ""] for _ in sizes), ["text", "What is it?"]]
    prepared = [
        prepare_image(make_image(*size, seed), model.image_config)
        for seed, size in enumerate(sizes)
    ]
    plan = model.plan_prepared(as_messages(parts), prepared)
    inputs = _inputs(reference, plan, prepared)
    positions, _ = reference.model.get_rope_index(**inputs)
    np.testing.assert_array_equal(plan.mrope_positions, positions[:, 0].numpy())
    output, taps = _reference_rows(reference, inputs)
    for chunk in (512, 5):
        ours = prefill(model, plan, model.manifest.tap_layers, chunk=chunk)
        for i, tap in taps.items():
            _report(f"{sizes} tap.{i}", max_difference(ours.taps[i], tap))
        final = output.hidden_states[-1][0].numpy()
        _report(f"{sizes} final", max_difference(ours.hidden, final))
        logits = output.logits[0].numpy()
        _report(f"{sizes} logits", max_difference(ours.logits, logits, model.manifest.banned_ids))


@pytest.mark.parametrize("size", SIZES)
def test_vision_equals_transformers(pair: Any, size: tuple[int, int]) -> None:
    """The tower alone, so that a difference there is not blamed on the decoder.
    Pooler rows and every DeepStack output."""
    model, reference = pair
    image = prepare_image(make_image(*size, 9), model.image_config)
    grid = torch.tensor([[1, image.grid.height, image.grid.width]])
    with torch.inference_mode():
        output = reference.model.visual(torch.from_numpy(image.patches), grid_thw=grid)
    ours = model.target.encode_patches(image.patches, image.grid)
    _report(f"vision {size}", max_difference(ours.embeds, output.pooler_output.numpy()))
    for k, rows in enumerate(output.deepstack_features):
        _report(f"deepstack.{k} {size}", max_difference(ours.deepstack[k], rows.numpy()))


def _zlab_hidden(draft: Any, networks: DFlashNetworks, table: np.ndarray, features: Any) -> Any:
    ids = [300] + [networks.spec.mask_token_id] * (networks.block_size - 1)
    rows = features.shape[0]
    with torch.inference_mode():
        return draft(
            target_hidden=torch.from_numpy(features)[None],
            noise_embedding=torch.from_numpy(table[ids].astype(np.float32))[None],
            position_ids=torch.arange(rows + len(ids))[None],
        )[0].numpy()


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_equals_zlab(name: str, tmp_path: Path) -> None:
    """Windows around the context length, both causalities and their mixes, other heads and taps.
    The ring and the mask are ours, the numbers z-lab's."""
    zlab = pytest.importorskip("dflash.model")
    make_target(tmp_path / "target", seed=40)
    make_draft(tmp_path / "draft", tmp_path / "target", **DRAFTS[name])
    reference = zlab.DFlashDraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    model = _export(tmp_path, tmp_path / "draft")
    networks = model.networks["dflash"]
    _check_windows(reference, networks)
    width = model.manifest.target.text.hidden_size * len(networks.taps)
    table = model.target.embed(np.arange(model.manifest.target.text.vocab_size))
    for rows in CONTEXTS:
        features = random_features(rows, rows, width)
        theirs = _zlab_hidden(reference.eval(), networks, table, features)
        for chunk in (512, 5):
            ours = draft_hidden(networks, features, 300, networks.block_size, chunk=chunk)
            _report(f"draft {name} c{rows}", max_difference(ours, theirs))


def _check_windows(reference: Any, networks: DFlashNetworks) -> None:
    """The reference forgets windows under some configurations; then the test would test nothing."""
    theirs = [layer.self_attn.sliding_window for layer in reference.layers]
    assert theirs == [layer.window for layer in networks.layers]


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 9}, {"sliding_window": 9, "is_causal": False}, {"training_keys": True}],
)
def test_speculators_layout_equals_zlab_layout(options: dict[str, Any], tmp_path: Path) -> None:
    """One drafter saved in both layouts: tap ids shifted by one, nested body, other causality flag.
    Hidden rows and logits are equal bit for bit."""
    make_target(tmp_path / "target", seed=41)
    common = {"seed": 42, "taps": (0, 3)} | options
    zlab_only = {k: v for k, v in common.items() if k != "training_keys"}
    make_draft(tmp_path / "zlab", tmp_path / "target", **zlab_only)
    make_draft(tmp_path / "spec", tmp_path / "target", layout="speculators", **common)
    model = _export(tmp_path, tmp_path / "zlab", tmp_path / "spec")
    first, second = (model.networks[name] for name in ("dflash", "dflash-2"))
    assert (first.taps, first.layers) == (second.taps, second.layers)
    features = random_features(1, 23, 2 * model.manifest.target.text.hidden_size)
    hidden = [draft_hidden(networks, features, 300, 8) for networks in (first, second)]
    np.testing.assert_array_equal(*hidden)
    np.testing.assert_array_equal(*(logits_of(model, rows) for rows in hidden))
