"""The MTP head and its drafter against a reference in float64 NumPy, which shares no code with it.

The reference gets the rows that the drafter observed, and must come to the same logits and drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_checkpoint import Tensors, edit_tensors, export
from support_hybrid import HYBRID, same_bits
from support_mtp import MtpReference, Watched, check_drafts, reference_drafts
from support_networks import logits_of, max_difference
from support_oracle import endless
from support_prompts import Part, image, text, words
from tiny_checkpoint import make_target

from dflash_onnx.models.positions import Position, Row
from dflash_onnx.runtime import Model, PromptError
from dflash_onnx.runtime.drafters import mtp

BundleMaker = Callable[..., Path]
BOUND = 1e-4
# A token that no answer here holds: it may end messages.
NEVER = 503
PROMPTS: dict[str, list[Part]] = {
    "text": [text(20)],
    "image": [text(9), image(3, 2), text(6)],
    "image first and last": [image(2, 4, seed=1), text(7), image(1, 3)],
}
KINDS: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"tied": False, "seed": 3}}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, make_bundle: BundleMaker) -> tuple[Model, MtpReference]:
    bundle = make_bundle(target=HYBRID | {"mtp": True} | KINDS[request.param], drafts=[])
    return endless(Model(bundle, threads=1)), MtpReference.load(bundle.parent / "target")


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle(target=HYBRID | {"mtp": True}, drafts=[]), threads=1))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_equal_the_reference(pair: tuple[Model, MtpReference], prompt: str) -> None:
    """Transformers drops the head's weights at load, so nothing else can be asked: logits of every
    row of text and pictures, in one call, in calls of 5 and row by row."""
    model, reference = pair
    watched = Watched(model.conversation("mtp", draft_tokens=0))
    watched.answer(PROMPTS[prompt], max_new_tokens=1)
    shown, hidden, positions = watched.rows()
    embeds, hidden, positions = shown[1:], hidden[:-1], positions[:, :-1]
    expected = reference.rows(embeds.astype(np.float64), hidden.astype(np.float64), positions)
    assert model.mtp is not None
    for chunk in (64, 5, 1):
        cache, parts = model.mtp.new_cache(64), []
        for first in range(0, len(hidden), chunk):
            rows = slice(first, first + chunk)
            feeds = (embeds[rows], hidden[rows], positions[:, rows])
            parts.append(model.mtp.forward(cache, *feeds))
            cache.commit(len(parts[-1]))
        ours = np.concatenate(parts)
        logits = logits_of(model, ours), reference.logits(expected)
        difference = max_difference(*logits, model.manifest.banned_ids)
        print(f"[mtp] {prompt} {chunk}: {max_difference(ours, expected):.1e} {difference:.1e}")
        assert max_difference(ours, expected) <= BOUND and difference <= BOUND


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_equal_the_reference(pair: tuple[Model, MtpReference], prompt: str) -> None:
    """Chained drafts of every round, most of them rejected: an entry that a draft left behind, or
    a row at a position of its own, would change the next round's."""
    model, reference = pair
    watched = Watched(model.conversation("mtp", draft_tokens=5))
    result = watched.answer(PROMPTS[prompt])
    assert result.draft.accepted < result.draft.drafted
    check_drafts(reference, watched)


def test_every_row_has_an_entry(model: Model) -> None:
    """Rows of pictures are observed like any other, drafts leave nothing, and the K/V rows are the
    bits of the head run over the whole text at once."""
    watched = Watched(model.conversation("mtp", draft_tokens=4))
    watched.answer(PROMPTS["image"])
    drafter = watched.conversation.draft.drafter
    rows = watched.conversation.cache.num_rows
    drafter.crop(Row(rows), Position(0))
    assert drafter._numbers == list(range(rows - 1))
    assert drafter._cache.num_rows == drafter.counts.injected_rows == rows - 1
    shown, hidden, positions = watched.rows()
    assert model.mtp is not None
    cache = model.mtp.new_cache(64)
    model.mtp.forward(cache, shown[1:], hidden[:-1], positions[:, :-1])
    kept = [[array[:, :, : rows - 1] for array in c.layers[0]] for c in (drafter._cache, cache)]
    assert same_bits(*kept)


def test_chunks_change_no_draft(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """However prefill and the head's own feeding are cut, every round drafts the same."""
    drafted = []
    for chunk, feed in ((1, 1), (5, 512), (64, 7), (512, 512)):
        monkeypatch.setattr(mtp, "FEED_ROWS", feed)
        watched = Watched(model.conversation("mtp"))
        watched.answer(PROMPTS["image"], chunk=chunk)
        drafted.append([drafts for _, _, drafts in watched.proposed])
    assert drafted[0] and all(one == drafted[0] for one in drafted)


@pytest.mark.parametrize("count", range(16))
def test_draft_tokens_bound_every_round(model: Model, count: int) -> None:
    """From 0, which is plain decoding, to 15; a round drafts no more than the answer may hold."""
    watched = Watched(model.conversation("mtp", draft_tokens=count))
    result = watched.answer(PROMPTS["text"], max_new_tokens=18)
    plain = Watched(model.conversation("none")).answer(PROMPTS["text"], max_new_tokens=18)
    assert result.token_ids == plain.token_ids
    lengths = [len(drafts) for _, _, drafts in watched.proposed]
    lefts = [min(count, request.max_drafts) for _, request, _ in watched.proposed]
    assert lengths == lefts and max(lengths, default=0) == count


@pytest.mark.parametrize("count", [-1, 16, True, 2.0])
def test_other_draft_tokens_are_refused(model: Model, count: Any) -> None:
    """One line that names the bounds, before anything runs."""
    with pytest.raises(PromptError, match="between 0 and 15"):
        model.conversation("mtp", draft_tokens=count)


def test_a_repeated_turn_leaves_no_hole(pair: tuple[Model, MtpReference]) -> None:
    """Two more turns that go on from the last row: the newest row's entry waited for the next
    token, and what the user wrote supplies it."""
    model, reference = pair
    watched, parts = Watched(model.conversation("mtp", draft_tokens=4)), PROMPTS["image"]
    for turn in range(3):
        result = watched.answer(parts)
        assert result.draft.holes == ()
        parts = [*parts, words(result.token_ids), image(2, 2, seed=turn), text(5, seed=turn)]
    check_drafts(reference, watched)


def test_an_edited_turn_costs_one_entry(make_bundle: BundleMaker) -> None:
    """Going back to row r keeps all entries but that of row r - 1, whose next token is another and
    whose hidden row is gone; it is counted, and drafts are made without it."""
    bundle = make_bundle(target=HYBRID | {"mtp": True}, drafts=[])
    # Its messages end, its answers do not.
    model = Model(bundle, threads=1)
    model.manifest = replace(model.manifest, stop_ids=(NEVER,))
    end = words([NEVER])
    watched = Watched(model.conversation("mtp", draft_tokens=4))
    before = [text(9), image(3, 2), text(4), end]
    watched.answer([*before, text(6), end, text(2)])
    first = len(watched.proposed)
    result = watched.answer([*before, text(5, seed=1), end, text(2)])
    # 9 rows, a picture of 6 rows that takes 3 positions, 5 rows.
    assert result.timings.reused_rows == 20 and result.draft.holes == ((16, 17),)
    reference = MtpReference.load(bundle.parent / "target")
    check_drafts(reference, watched, without=(19,), first=first)


def test_a_drafter_that_comes_later_has_a_hole(pair: tuple[Model, MtpReference]) -> None:
    """Chosen in the middle of a chat the head has seen nothing before; it says so, and drafts from
    what it sees."""
    model, reference = pair
    conversation = model.conversation("none")
    parts = PROMPTS["image"]
    result = Watched(conversation).answer(parts)
    conversation.use_draft(draft="mtp", draft_tokens=4)
    watched = Watched(conversation)
    rows = conversation.cache.num_rows
    parts = [*parts, words(result.token_ids), text(5)]
    result = watched.answer(parts)
    # The picture's 6 rows take 3 positions.
    assert result.draft.holes == ((0, rows - 3),) and result.timings.reused_rows == rows
    assert result.token_ids == Watched(model.conversation("none")).answer(parts).token_ids
    check_drafts(reference, watched)


def test_banned_ids_are_never_drafted(tmp_path: Path) -> None:
    """A head that would choose placeholders most of the time: the bias of the target's head keeps
    the drafter from them, so that no round is cut short by one."""

    def favour(tensors: Tensors) -> None:
        tensors["lm_head.weight"][498:503] *= 30

    make_target(tmp_path / "target", **HYBRID, mtp=True, tied=False, seed=3)
    edit_tensors(tmp_path / "target", favour)
    model = endless(Model(export(tmp_path, draft=False), threads=1))
    reference = MtpReference.load(tmp_path / "target")
    watched = Watched(model.conversation("mtp", draft_tokens=6))
    watched.answer(PROMPTS["image"])
    drafted = [token for _, _, drafts in watched.proposed for token in drafts]
    assert not set(drafted) & set(model.manifest.banned_ids)
    check_drafts(reference, watched)
    freely = [reference_drafts(reference, watched, i, ()) for i in range(len(watched.proposed))]
    assert any(set(ids) & set(model.manifest.banned_ids) for ids in freely)


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_failing_head_only_turns_itself_off(
    model: Model, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whatever breaks in the head, at the first call or in a chain, the answer goes on without
    drafts and says why."""
    assert model.mtp is not None
    forward, left = model.mtp.forward, [number]

    def broken(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("broken on purpose")
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model.mtp, "forward", broken)
        result = Watched(model.conversation("mtp")).answer(PROMPTS["image"])
    plain = Watched(model.conversation("none")).answer(PROMPTS["image"])
    assert result.token_ids == plain.token_ids
    assert result.draft.state.startswith("off: ") and "broken on purpose" in result.draft.state
