"""Hybrid and text-only bundles against transformers, run live on checkpoints of many kinds.

The golden files hold one checkpoint of a kind; here seeds, head, dtypes, shards, head layouts,
intervals and images vary.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import tiny_hybrid
from support_hybrid import Feeder, states, windows
from support_images import make_image
from support_networks import as_messages, logits_of, max_difference, prefill
from support_oracle import endless
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.images import prepare_image
from dflash_onnx.runtime.options import GenerateOptions
from dflash_onnx.runtime.plan import PromptPlan

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
modeling_qwen3_5 = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

pytestmark = pytest.mark.parity
BOUND, TOKENS = 1e-4, 64
VISION = {"architecture": "Qwen3_5ForConditionalGeneration"}
TEXT = {"architecture": "Qwen3_5ForCausalLM"}
PLAIN = {"architecture": "Qwen3ForCausalLM"}
WIDE = {"heads": 2, "head_dim": 32, "mrope_section": (4, 2, 2), "deepstack": ()}
TARGETS: dict[str, dict[str, Any]] = {
    "tied": VISION | {"seed": 51},
    "untied": VISION | {"seed": 52, "tied": False},
    "bf16-sharded": VISION | {"seed": 53, "dtype": "bfloat16", "shards": 3, "tied": False},
    "fp16": VISION | {"seed": 54, "dtype": "float16", "theta": 1e6},
    "every-second": VISION | {"seed": 55, "interval": 2, "layers": 5, "kv_heads": 1},
    "wide-heads": VISION | WIDE | {"seed": 56},
    "text": TEXT | {"seed": 57},
    "text-bf16": TEXT | {"seed": 58, "dtype": "bfloat16", "tied": False, "shards": 2},
    "qwen3": PLAIN | {"seed": 59},
    "qwen3-fp16": PLAIN | {"seed": 60, "dtype": "float16", "kv_heads": 4, "tied": False},
}
# Key heads, value heads, their widths and the convolution's taps, instead of 2, 4, 8, 16, 4.
LAYOUTS = {
    "as-many-keys": (VISION | {"seed": 64}, (4, 4, 8, 16, 4)),
    "one-key-head": (VISION | {"seed": 62, "tied": False}, (1, 4, 16, 8, 3)),
    "two-taps": (TEXT | {"seed": 63}, (2, 6, 8, 8, 2)),
}
LAYOUT = ("KEY_HEADS", "VALUE_HEADS", "KEY_DIM", "VALUE_DIM", "CONV")
SIZES: dict[str, list[tuple[int, int]]] = {
    "text": [],
    "start": [(64, 96)],
    "middle": [(96, 64)],
    "two": [(64, 64), (32, 128)],
}


class Pair:
    """A loaded bundle whose drafter taps every layer, its portable form, and transformers'."""

    def __init__(self, folder: Any, options: dict[str, Any]) -> None:
        spec = make_target(folder / "target", **{"gain": 1.0} | options)
        make_draft(folder / "draft", folder / "target", taps=tuple(range(spec.layers)))
        bundle = ExportOptions(folder / "target", folder / "bundle", (folder / "draft",))
        export_bundle(bundle)
        self.forms = [
            endless(Model(folder / "bundle", threads=1, portable=portable))
            for portable in (False, True)
        ]
        kind = getattr(transformers, options["architecture"])
        self.reference = kind.from_pretrained(folder / "target", dtype=torch.float32).eval()
        self.reference.generation_config.eos_token_id = None
        self.has_vision = hasattr(self.reference.config, "image_token_id")

    @property
    def model(self) -> Model:
        """The fused form."""
        return self.forms[0]


@pytest.fixture(scope="module", params=[*TARGETS, *LAYOUTS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("hybrid")
    if request.param in TARGETS:
        return Pair(folder, TARGETS[request.param])
    options, layout = LAYOUTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(LAYOUT, layout, strict=True):
            patch.setattr(tiny_hybrid, name, value)
        return Pair(folder, options)


def report(what: str, measured: float, bound: float = BOUND) -> None:
    print(f"[hybrid] {what}: {measured:.2e} (bound {bound:.1e})")
    assert measured <= bound, f"{what} differs by {measured:.3e}, more than {bound:.1e}"


class Double:
    """The module torch whose float32 is float64, for a function that casts."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def lay_out(pair: Pair, images: str) -> tuple[PromptPlan, dict[str, Any]]:
    """A prompt and transformers' inputs for it; a text-only target gets the text alone."""
    sizes = SIZES[images] if pair.has_vision else []
    pictures = [["image", ""] for _ in sizes]
    parts = [*pictures, ["text", "What is the old stone bridge?"]]
    if images == "middle":
        parts = [["text", "The first page: "], *parts]
    config = pair.model.image_config
    prepared = [
        prepare_image(make_image(*size, seed), config)
        for seed, size in enumerate(sizes)
        if config is not None
    ]
    plan = pair.model.plan_prepared(as_messages(parts), prepared)
    ids = torch.from_numpy(plan.token_ids)[None]
    inputs: dict[str, Any] = {"input_ids": ids}
    if pair.has_vision:
        inputs["mm_token_type_ids"] = (ids == pair.reference.config.image_token_id).int()
    if prepared:
        grids = [[1, image.grid.height, image.grid.width] for image in prepared]
        patches = np.concatenate([image.patches for image in prepared])
        inputs |= {"pixel_values": torch.from_numpy(patches)}
        inputs |= {"image_grid_thw": torch.tensor(grids)}
    return plan, inputs


def reference_rows(pair: Pair, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """One call: every decoder layer's own output, the final rows and the logits."""
    taps: list[np.ndarray] = []
    body = pair.reference.model
    hooks = [
        layer.register_forward_hook(lambda _layer, _args, out: taps.append(out[0].numpy().copy()))
        for layer in getattr(body, "language_model", body).layers
    ]
    with torch.inference_mode():
        output = pair.reference(**inputs, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    rows = {"final": output.hidden_states[-1][0].numpy(), "logits": output.logits[0].numpy()}
    return rows | {f"tap.{i}": tap for i, tap in enumerate(taps)}


def exact_rows(pair: Pair, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    """The same in float64, the recurrence included."""
    rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rule.__globals__, "torch", Double())
        pair.reference.double()
        rows = reference_rows(pair, wide)
    pair.reference.float()
    return rows


@pytest.mark.parametrize("images", SIZES)
def test_target_equals_transformers(pair: Pair, images: str) -> None:
    """Taps, final rows and logits of text and images, both forms, in one call and in chunks of 5
    that cut images anywhere, against transformers in float64."""
    plan, inputs = lay_out(pair, images)
    if pair.has_vision:
        positions, _ = pair.reference.model.get_rope_index(**inputs)
        np.testing.assert_array_equal(plan.mrope_positions, positions[:, 0].numpy())
    theirs, exact = reference_rows(pair, inputs), exact_rows(pair, inputs)
    for model in pair.forms:
        banned = model.manifest.banned_ids
        for chunk in (64, 5):
            rows = prefill(model, plan, model.manifest.tap_layers, chunk=chunk)
            ours = {"final": rows.hidden, "logits": rows.logits}
            ours |= {f"tap.{i}": tap for i, tap in rows.taps.items()}
            assert ours.keys() == exact.keys()
            for name in ours:
                without = banned if name == "logits" else ()
                # Random weights magnify rounding, transformers' own by up to 3e-4.
                own = max_difference(theirs[name], exact[name], without)
                measured = max_difference(ours[name], exact[name], without)
                report(f"{images} {name}", measured, BOUND + 2 * own)


@pytest.mark.parametrize("count", [1, 3, 7, 64, 200])
def test_states_equal_transformers(pair: Pair, count: int) -> None:
    """State, window and next logits of every recurrent layer after some tokens, also such counts
    that are shorter than the window."""
    ids = np.random.default_rng(count).integers(20, 480, count)
    with torch.inference_mode():
        output = pair.reference(input_ids=torch.from_numpy(ids)[None], use_cache=True)
    logits, cache = output.logits[0, -1:].numpy(), output.past_key_values
    for model in pair.forms:
        feeder = Feeder(model)
        for first in range(0, count, 64):
            hidden = feeder.call(ids[first : first + 64].tolist(), certain=True)
        banned = model.manifest.banned_ids
        report(f"{count} logits", max_difference(logits_of(model, hidden[-1:]), logits, banned))
        if feeder.cache.state is None:
            continue
        layers = model.manifest.target.text.linear_layers
        ours = zip(layers, states(feeder.cache), windows(feeder.cache), strict=True)
        for i, state, window in ours:
            theirs = cache.get_recurrent_state(i).numpy()
            report(f"{count} state.{i}", max_difference(state, theirs))
            conv = cache.get_conv_state(i).numpy()[0, :, 1:].T
            report(f"{count} window.{i}", max_difference(window, conv))


@pytest.mark.parametrize("images", SIZES)
def test_greedy_tokens_equal_transformers(pair: Pair, images: str) -> None:
    """64 tokens, plain and drafted, up to the first decision that hangs on rounding."""
    plan, inputs = lay_out(pair, images)
    banned = list(pair.model.manifest.banned_ids)
    with torch.inference_mode():
        output = pair.reference.generate(
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            suppress_tokens=banned,
            output_scores=True,
            return_dict_in_generate=True,
        )
    expected = output.sequences[0, -TOKENS:].tolist()
    best = torch.stack(output.scores)[:, 0].topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    clear = next((i for i, margin in enumerate(margins) if margin < 5e-4), TOKENS)
    assert clear > 1, "a near tie comes early; change the seed"
    print(f"[hybrid] {images}: {clear} tokens compared")
    for model in pair.forms:
        for draft in ("none", "dflash"):
            generation = model.conversation(draft).generate_plan(plan, GenerateOptions(TOKENS))
            assert list(generation.result().token_ids)[:clear] == expected[:clear]
