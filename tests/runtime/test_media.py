"""Drafting around media, from the bug threads: an oracle that is right exactly when rows and
positions are right must be right all the time."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image
from support_oracle import (
    FULL,
    WINDOW_64,
    OracleNetworks,
    Truth,
    acceptance,
    endless,
    find_truth,
    run_oracle,
)
from support_prompts import BundleMaker, Part, audio, image, lay_out, text, words

from dflash_onnx.models.draft_config import DraftLayer
from dflash_onnx.models.grid import Grid
from dflash_onnx.models.positions import (
    Ints,
    Position,
    Row,
    Span,
    SpanKind,
    advancing_positions,
    image_positions,
    is_pinned,
)
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.base import Observed
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.policy import HolePolicy, HoleSettings
from dflash_onnx.runtime.drafters.token_count import AtTokenCount
from dflash_onnx.runtime.options import make_options

MIXED = (FULL, WINDOW_64, DraftLayer(16, False))
DRAFTING = [p for p in HolePolicy if p is not HolePolicy.OFF]
ON_TEXT_RULER = [p for p in DRAFTING if p.ruler == "text"]
SEEDING = [HolePolicy.SEED, HolePolicy.SEED_MASKED]


@dataclass(frozen=True)
class Layout:
    """A prompt, the windows of the drafter that reads it, and the holes it must meet."""

    parts: list[Part]
    holes: tuple[tuple[int, int], ...]
    kinds: tuple[DraftLayer, ...] = (FULL,)


LAYOUTS = {
    "small image": Layout([text(12), image(3, 8), text(9)], ((12, 20),)),
    "llama.cpp#27408": Layout([text(53), image(16, 47), text(10)], ((53, 100),)),
    "over a chunk": Layout([text(12), image(26, 40), text(9)], ((12, 52),), MIXED),
    "over the window": Layout([image(10, 10), text(46)], ((0, 10),), (WINDOW_64,)),
    "behind 3k": Layout([text(3000), image(31, 47), text(46)], ((3000, 3047),), (WINDOW_64,)),
    "two": Layout([text(5), image(3, 8), text(4), image(9, 4), text(6)], ((5, 13), (17, 26))),
    "adjacent": Layout([text(5), image(3, 8), image(9, 4), text(6)], ((5, 22),), MIXED),
    "last": Layout([text(9), image(6, 8)], ((9, 17),)),
    "with a one-row image": Layout(
        [text(5), image(3, 8), image(1, 1), text(2), image(2, 2)], ((5, 13), (16, 18)), MIXED
    ),
    "with sound": Layout([text(5), audio(9), image(4, 4), audio(3)], ((14, 18),), (WINDOW_64,)),
}


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle({"context": 16384, "max_pixels": 16_777_216})))


@pytest.fixture(scope="module")
def truths(model: Model) -> dict[str, Truth]:
    return {name: find_truth(model, layout.parts) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("policy", DRAFTING, ids=lambda p: p.value)
@pytest.mark.parametrize("name", LAYOUTS)
def test_oracle_is_right_after_media(
    model: Model, truths: dict[str, Truth], name: str, policy: HolePolicy
) -> None:
    """Vision requests got 500 or never drafted again (llama.cpp#27408, #28587, #28715)."""
    layout = LAYOUTS[name]
    run = run_oracle(model, layout.parts, truths[name], policy, kinds=layout.kinds)
    assert [call.fault for call in run.oracle.drafts if call.fault] == []
    assert acceptance(run.result) == 1.0
    assert run.result.draft.holes == (layout.holes if policy.ruler == "text" else ())
    assert [call.start for call in run.oracle.drafts] == run.expected_starts[
        : len(run.oracle.drafts)
    ]


@pytest.mark.parametrize("policy", ON_TEXT_RULER, ids=lambda p: p.value)
@pytest.mark.parametrize("name", LAYOUTS)
def test_oracle_is_wrong_at_the_token_count(
    model: Model, truths: dict[str, Truth], name: str, policy: HolePolicy
) -> None:
    """Blocks at n_tokens instead of pos_next: as slow as without a drafter (llama.cpp#28715)."""
    layout = LAYOUTS[name]
    run = run_oracle(
        model, layout.parts, truths[name], policy, kinds=layout.kinds, drafter=AtTokenCount
    )
    assert acceptance(run.result) == 0.0


@pytest.mark.parametrize("policy", HolePolicy, ids=lambda p: p.value)
@pytest.mark.parametrize("name", ["small image", "with a one-row image", "with sound"])
def test_chunks_change_nothing_the_drafter_sees(
    model: Model, truths: dict[str, Truth], name: str, policy: HolePolicy
) -> None:
    """Images failed or not by how they fell into micro-batches (first thread, second commit)."""
    layout, seen = LAYOUTS[name], []
    for chunk in (1, 2, 7, 64, 10_000):
        run = run_oracle(model, layout.parts, truths[name], policy, kinds=layout.kinds, chunk=chunk)
        seen.append((run.oracle.injected(), run.oracle.drafts, run.result.draft))
    assert all(other == seen[0] for other in seen[1:])


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 65])
def test_small_and_large_images_take_one_path(model: Model, num_rows: int) -> None:
    """Small images "worked" only while they fitted one micro-batch, at bogus positions."""
    parts = [text(6), image(num_rows, 1), text(5, seed=1)]
    truth, kinds = find_truth(model, parts), (WINDOW_64,)
    for chunk in (64, 512):
        run = run_oracle(model, parts, truth, HolePolicy.GAP, kinds=kinds, chunk=chunk)
        holes = ((6, 6 + num_rows),) if num_rows > 1 else ()
        assert (run.result.draft.holes, acceptance(run.result)) == (holes, 1.0)


@pytest.mark.parametrize("policy", DRAFTING, ids=lambda p: p.value)
def test_media_that_advance_are_injected(model: Model, policy: HolePolicy) -> None:
    """Skipping every embedding batch silently dropped audio (llama.cpp#28587, review point 2)."""
    parts = [text(5), audio(9), text(4)]
    truth = find_truth(model, parts)
    run = run_oracle(model, parts, truth, policy)
    injected = dict(run.oracle.injected())
    assert [injected[p] for p in range(5, 14)] == [r.fingerprint for r in truth.rows[5:14]]
    assert run.result.draft.skipped_spans == 0 and acceptance(run.result) == 1.0


def test_one_row_image_is_injected(model: Model) -> None:
    """A 1x1 picture is one row: nothing pins it, nothing is skipped (ik_llama.cpp#1758)."""
    parts = [text(5), image(1, 1), text(4)]
    run = run_oracle(model, parts, find_truth(model, parts), HolePolicy.SEED)
    assert run.oracle.real_positions()[:10] == list(range(10))
    assert (run.result.draft.skipped_spans, run.result.draft.holes) == (0, ())


BATCHES: dict[str, tuple[SpanKind, Ints, int, int, bool]] = {
    # Kind and positions of the span, first row and number of rows of the batch, skipped or not.
    "two pinned rows": ("image", image_positions(Position(8), Grid(4, 2, 2)), 0, 2, True),
    "one pinned row": ("image", image_positions(Position(8), Grid(2, 2, 2)), 0, 1, False),
    "one row of a big image": ("image", image_positions(Position(8), Grid(8, 8, 2)), 5, 1, True),
    "sound": ("audio", advancing_positions(Position(8), 6), 2, 3, False),
    "text": ("text", advancing_positions(Position(8), 6), 0, 6, False),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_only_pinned_spans_are_skipped(batch: str) -> None:
    """The guard asked the wrong model's rope type, or the batch (llama.cpp#28587, point 1)."""
    kind, positions, first, count, skipped = BATCHES[batch]
    drafter = DFlash("o", oracle := OracleNetworks(Truth([], (), 0)), HoleSettings(HolePolicy.GAP))
    span = Span(Row(3), positions.shape[1], kind, is_pinned(positions))
    rows = slice(first, first + count)
    taps = {i: np.ones((count, 4), np.float32) for i in oracle.taps}
    ids = np.zeros(count, np.int64)
    nothing = np.zeros((count, 4), np.float32)
    observed = Observed(Row(3 + first), ids, positions[:, rows], taps, span, nothing, nothing)
    drafter.observe(observed)
    drafter.crop(Row(99), Position(99))
    expected = [] if skipped else positions[0, rows].tolist()
    assert oracle.real_positions() == expected


@pytest.mark.parametrize("policy", SEEDING, ids=lambda p: p.value)
@pytest.mark.parametrize(("kind", "most"), [(WINDOW_64, 63), (FULL, 512)])
def test_wide_hole_is_bounded_work(
    model: Model, policy: HolePolicy, kind: DraftLayer, most: int
) -> None:
    """An image of 2000 positions costs a window of zero rows, not 2000 (llama.cpp#18039)."""
    parts = [text(20), image(2000, 1), text(10)]
    run = run_oracle(model, parts, find_truth(model, parts), policy, kinds=(kind,))
    assert run.result.draft.holes == ((20, 2020),)
    assert run.oracle.zero_positions() == list(range(2020 - most, 2020))
    assert run.result.draft.seeded_rows == most and acceptance(run.result) == 1.0


@pytest.mark.parametrize("policy", DRAFTING, ids=lambda p: p.value)
@pytest.mark.parametrize("prefix", [[text(30)], [text(9), image(3, 8), text(4)]])
def test_prefix_the_drafter_never_saw(model: Model, prefix: list[Part], policy: HolePolicy) -> None:
    """The target reused a cached prefix, the draft cache had no row of it (first thread)."""
    parts = [*prefix, text(6), image(4, 4), text(3)]
    truth, num_reused = find_truth(model, parts), sum(p.num_rows for p in prefix)
    conversation = model.conversation("none")
    options = make_options(max_new_tokens=len(truth.tokens))
    first = [*prefix, text(5, seed=9)]
    conversation.generate_plan(lay_out(model, first), options).result()
    oracle = OracleNetworks(truth, policy.ruler, (FULL,), seen_from=num_reused)
    conversation.use_draft(draft=DFlash("oracle", oracle, HoleSettings(policy)))
    result = conversation.generate_plan(lay_out(model, parts), options).result()
    assert result.timings.reused_rows == num_reused
    assert (acceptance(result), result.token_ids) == (1.0, truth.tokens)
    start = truth.rows[num_reused].position
    image_hole = (start + 6, start + 10)
    holes = ((0, start), image_hole) if policy.ruler == "text" else ((0, num_reused),)
    assert result.draft.holes == holes


@pytest.mark.parametrize("policy", DRAFTING, ids=lambda p: p.value)
def test_image_in_turn_one_does_not_spoil_turn_two(model: Model, policy: HolePolicy) -> None:
    """One image ruined drafting for the rest of the chat (llama-cpp-turboquant#344)."""
    turn_one = [text(5), image(6, 8), text(4)]
    truth = find_truth(model, turn_one)
    turn_two = [*turn_one, words(truth.tokens), text(8, seed=2)]
    oracle = OracleNetworks(truth, policy.ruler, MIXED)
    conversation = model.conversation(DFlash("oracle", oracle, HoleSettings(policy)))
    options = make_options(max_new_tokens=len(truth.tokens))
    assert acceptance(conversation.generate_plan(lay_out(model, turn_one), options).result()) == 1
    oracle.truth = find_truth(model, turn_two)
    result = conversation.generate_plan(lay_out(model, turn_two), options).result()
    assert (acceptance(result), result.token_ids) == (1.0, oracle.truth.tokens)
    assert result.timings.reused_rows == truth.num_prompt_rows + len(truth.tokens) - 1
    assert result.draft.holes == ()


def test_normal_image_prompt_logs_no_warning(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning on every media prompt reads as an error (llama.cpp#28587, review point 4)."""
    caplog.set_level(logging.DEBUG, "dflash_onnx")
    picture = Image.new("RGB", (96, 64), "red")
    result = model.generate("Read", [picture], max_new_tokens=4).result()
    assert result.draft.holes and result.draft.skipped_spans == 1
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == []
    logged = " ".join(r.message for r in caplog.records)
    assert "skipped a pinned span of 6 rows" in logged and "hole [" in logged
