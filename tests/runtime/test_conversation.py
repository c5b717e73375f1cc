"""A conversation's state after closed, interrupted and switched answers."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from dflash_onnx.models.positions import Position, Row
from dflash_onnx.runtime import Model, PromptError
from dflash_onnx.runtime.drafters.base import DraftCounts, Observed, Proposal, Request
from dflash_onnx.runtime.sampling import Distribution


def test_a_closed_answer_has_no_result(tiny_model: Model) -> None:
    """Closing after the last token but before the end used to end in a bare AssertionError."""
    generation = tiny_model.generate("hi", max_new_tokens=1)
    next(iter(generation))
    generation.close()
    assert generation.result().output_tokens == 1
    generation = tiny_model.generate("hi", max_new_tokens=9)
    next(iter(generation))
    generation.close()
    with pytest.raises(PromptError, match="closed before it finished"):
        generation.result()


@pytest.mark.parametrize("draft", ["none", "lookup", "dflash"])
def test_caches_go_with_their_conversation(tiny_model: Model, draft: str) -> None:
    """A server that forgets a chat gets its memory back at once, not when cycles are collected."""
    gc.disable()
    try:
        conversation = tiny_model.conversation(draft)
        generation = conversation.generate("hello", max_new_tokens=4)
        generation.on_round(lambda record: None).result()
        cache = weakref.ref(conversation.cache)
        del conversation, generation
        assert cache() is None
    finally:
        gc.enable()


def test_an_interrupt_never_leaves_keys_without_rows(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of rows that are gone would be reused by the next prompt, with another text."""
    conversation = tiny_model.conversation("none")
    conversation.generate("hello there my friend", max_new_tokens=8).result()

    def interrupted(num_rows: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversation.cache, "crop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.generate("another prompt", max_new_tokens=8).result()
    assert len(conversation.row_keys) <= conversation.cache.num_rows
    again = conversation.generate("hello there my friend", max_new_tokens=8).result()
    fresh = tiny_model.generate("hello there my friend", draft="none", max_new_tokens=8).result()
    assert again.token_ids == fresh.token_ids


def test_a_dead_drafter_can_be_chosen_again(tiny_model: Model) -> None:
    """use_draft used to hand back the drafter that had turned itself off."""
    conversation = tiny_model.conversation("dflash")
    conversation.draft.state = "off: for the test"
    conversation.use_draft(draft="dflash")
    assert conversation.draft.is_on


def test_drafter_cannot_change_in_mid_answer(tiny_model: Model) -> None:
    """A running answer keeps its drafter; the switch has to wait."""
    conversation = tiny_model.conversation("dflash")
    generation = conversation.generate("hi", max_new_tokens=9)
    next(iter(generation))
    with pytest.raises(PromptError, match="already generating"):
        conversation.use_draft(draft="none")
    generation.close()
    conversation.use_draft(draft="none")


class Drawn:
    """A drafter that hands over distributions, wrong in one way or another."""

    name, max_drafts, taps = "drawn", 3, ()

    def __init__(self, proposals: list[Distribution]) -> None:
        self.counts = DraftCounts()
        self._proposals = proposals

    def observe(self, rows: Observed) -> None:
        """Nothing to note."""

    def propose(self, request: Request) -> Proposal:
        """Three ids, with whatever the test wants beside them."""
        return Proposal([5, 6, 7], None, self._proposals)

    def crop(self, num_rows: Row, position: Position) -> None:
        """Nothing to forget."""


def test_distributions_are_not_trusted(tiny_model: Model) -> None:
    """A drafter's own bookkeeping must not end the request, nor bend the target's distribution."""
    banned = tiny_model.manifest.banned_ids[0]
    weights = np.ones(3)
    bad = Distribution.of(np.array([5, 6, banned]), weights)
    other = Distribution.of(np.array([8, 9, 10]), weights)
    for proposals in ([], [other] * 3, [bad] * 3):
        conversation = tiny_model.conversation(Drawn(proposals))
        options = {"temperature": 1.0, "accept": "rejection", "max_new_tokens": 6}
        result = conversation.generate("hi", **options).result()
        assert result.output_tokens == 6 and result.draft.state.startswith("off: propose failed")
