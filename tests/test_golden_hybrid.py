"""Exported hybrid and text-only bundles against the stored outputs of transformers.

Needs neither torch nor transformers. The bounds are absolute; `pytest -s` prints what was measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_hybrid import Feeder, states, windows
from support_images import make_image
from support_networks import as_messages, logits_of, max_difference, prefill
from support_oracle import endless
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.positions import advancing_positions
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.options import GenerateOptions
from dflash_onnx.runtime.plan import PromptPlan

GOLDEN = Path(__file__).parent / "golden"
META: dict[str, Any] = json.loads((GOLDEN / "hybrid.json").read_text(encoding="utf-8"))
TARGETS, PARTS, IMAGES = META["targets"], META["parts"], META["images"]
CASES = [(name, prompt) for name in TARGETS for prompt in TARGETS[name]["prompts"]]
HYBRIDS = [name for name in TARGETS if "3_5" in TARGETS[name]["options"]["architecture"]]
BOUND = 1e-4
CLEAR_MARGIN = 1e-3


@dataclass(frozen=True)
class Golden:
    """A golden target: its bundle, which also has an MTP head, and transformers' arrays."""

    model: Model
    portable: Model
    arrays: dict[str, np.ndarray]
    banned: list[int]


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    return {name: make_golden(name, tmp_path_factory.mktemp(name)) for name in TARGETS}


def make_golden(name: str, folder: Path) -> Golden:
    target, draft = folder / "target", folder / "draft"
    options = TARGETS[name]["options"]
    make_target(target, **options, mtp=name in HYBRIDS)
    # Asks for the taps of all layers.
    make_draft(draft, target, taps=(0, 1, 2, 3))
    bundle = export_bundle(ExportOptions(target, folder / "bundle", (draft,)))
    model, portable = (endless(Model(bundle, threads=1, portable=p)) for p in (False, True))
    arrays = dict(np.load(GOLDEN / f"hybrid_{name}.npz"))
    return Golden(model, portable, arrays, TARGETS[name]["banned_ids"])


def plan_of(model: Model, name: str, prompt: str) -> PromptPlan:
    images = [make_image(**IMAGES[image]) for image in TARGETS[name]["prompts"][prompt]["images"]]
    return model.plan(as_messages(PARTS[prompt]), images)


def report(what: str, measured: float) -> None:
    print(f"[golden] {what}: {measured:.2e}")
    assert measured <= BOUND, f"{what} differs by {measured:.3e}"


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_plan_has_the_reference_ids_and_positions(
    goldens: dict[str, Golden], name: str, prompt: str
) -> None:
    """Ids, and where there are three position axes all of them, are exactly transformers'; so are
    the ids that may not be chosen."""
    golden = goldens[name]
    plan = plan_of(golden.model, name, prompt)
    np.testing.assert_array_equal(plan.token_ids, golden.arrays[f"{prompt}.input_ids"])
    expected = golden.arrays.get(f"{prompt}.position_ids")
    if expected is None:
        expected = advancing_positions(plan.spans[0].start, plan.num_rows)  # type: ignore[arg-type]
    np.testing.assert_array_equal(plan.mrope_positions, expected)
    assert list(golden.model.manifest.banned_ids) == golden.banned


@pytest.mark.parametrize("form", ["model", "portable"])
@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_prefill_equals_transformers(
    goldens: dict[str, Golden], name: str, prompt: str, form: str
) -> None:
    """Taps of every layer, final rows and logits; in one call and in chunks of 7."""
    golden = goldens[name]
    model: Model = getattr(golden, form)
    theirs = {key.removeprefix(f"{prompt}."): value for key, value in golden.arrays.items()}
    rows = theirs["rows"]
    for chunk in (64, 7):
        ours = prefill(model, plan_of(model, name, prompt), (0, 1, 2, 3), chunk=chunk)
        for i, tap in ours.taps.items():
            report(f"{name} {prompt} {form} tap.{i}", max_difference(tap[rows], theirs[f"tap.{i}"]))
        report(f"{name} {prompt} final", max_difference(ours.hidden[rows], theirs["final"]))
        logits = max_difference(ours.logits[rows], theirs["logits"], golden.banned)
        report(f"{name} {prompt} {form} logits", logits)


@pytest.mark.parametrize("chunk", [64, 7, 1])
@pytest.mark.parametrize("form", ["model", "portable"])
@pytest.mark.parametrize("count", META["counts"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_equal_transformers(
    goldens: dict[str, Golden], name: str, count: int, form: str, chunk: int
) -> None:
    """After 1, 7 and 200 tokens: the state of every recurrent layer, its convolution window and
    the logits that come next."""
    golden = goldens[name]
    model: Model = getattr(golden, form)
    feeder = Feeder(model)
    for first in range(0, count, chunk):
        hidden = feeder.call(META["ids"][first : min(first + chunk, count)], certain=True)
    layers = model.manifest.target.text.linear_layers
    assert layers == (0, 1, 2)
    ours = zip(layers, states(feeder.cache), windows(feeder.cache), strict=True)
    for i, state, window in ours:
        theirs = golden.arrays[f"after{count}.state.{i}"]
        report(f"{name} {form} {count} state.{i}", max_difference(state, theirs))
        # Channels first, and one row more than a window needs.
        conv = golden.arrays[f"after{count}.conv.{i}"][0, :, 1:].T
        report(f"{name} {form} {count} window.{i}", max_difference(window, conv))
    logits = max_difference(
        logits_of(model, hidden[-1:]), golden.arrays[f"after{count}.logits"], golden.banned
    )
    report(f"{name} {form} {count} logits", logits)


def test_golden_margins_are_clear() -> None:
    """Greedy tokens can only be compared where no decision hangs on rounding, and say little in a
    text that repeats itself."""
    for name, prompt in CASES:
        entry = TARGETS[name]["prompts"][prompt]
        assert entry["min_margin"] > CLEAR_MARGIN and entry["distinct_tokens"] >= 40


@pytest.mark.parametrize("form", ["model", "portable"])
@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_greedy_tokens_equal_transformers(
    goldens: dict[str, Golden], name: str, prompt: str, form: str
) -> None:
    """64 tokens, plain and with each drafter that the bundle has, are those that transformers'
    generate chose."""
    golden = goldens[name]
    model: Model = getattr(golden, form)
    expected = golden.arrays[f"{prompt}.tokens"].tolist()
    drafts = ["none", "dflash", *(["mtp"] if name in HYBRIDS else [])]
    for draft in drafts:
        conversation = model.conversation(draft)
        options = GenerateOptions(max_new_tokens=len(expected))
        result = conversation.generate_plan(plan_of(model, name, prompt), options).result()
        assert result.draft.state == "on"
        assert list(result.token_ids) == expected
        assert draft == "none" or result.draft.drafted > len(expected)
