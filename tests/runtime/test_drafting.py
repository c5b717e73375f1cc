"""A drafter can fail or lie in any way: the request goes on and the text stays the target's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support_oracle import endless
from support_prompts import BundleMaker, image, lay_out, text, words

from dflash_onnx.models.errors import PromptError
from dflash_onnx.models.positions import Position, Row
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.base import DraftCounts, Observed, Proposal, Request
from dflash_onnx.runtime.drafters.lookup import Lookup
from dflash_onnx.runtime.drafting import DraftRunner
from dflash_onnx.runtime.options import make_options

PROMPT = [text(9), image(3, 8), text(6)]
VOCAB, IMAGE_PAD = 512, 501


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle()))


class Scripted:
    """Proposes whatever it is given and raises where it is told to, at the n-th call."""

    name = "scripted"
    taps: tuple[int, ...] = (1,)

    def __init__(self, ids: Any = (), raises: str = "", at: int = 0, max_drafts: int = 8) -> None:
        self.counts = DraftCounts()
        self.max_drafts = max_drafts
        self.requests: list[Request] = []
        self._ids, self._raises, self._left = ids, raises, at

    def observe(self, rows: Observed) -> None:
        self._maybe_raise("observe")

    def propose(self, request: Request) -> Proposal:
        self.requests.append(request)
        self._maybe_raise("propose")
        return Proposal(self._ids, request.position)

    def crop(self, num_rows: Row, position: Position) -> None:
        self._maybe_raise("crop")

    def _maybe_raise(self, where: str) -> None:
        if where == self._raises:
            if not self._left:
                raise RuntimeError("out of memory")
            self._left -= 1


def plain(model: Model, tokens: int = 12) -> tuple[int, ...]:
    options = make_options(max_new_tokens=tokens)
    generation = model.conversation("none").generate_plan(lay_out(model, PROMPT), options)
    return generation.result().token_ids


def request(max_drafts: int = 8, tokens: tuple[int, ...] = (5,)) -> Request:
    return Request(tokens[-1], max_drafts, Row(9), Position(9), 0, tokens)


@pytest.mark.parametrize(
    ("where", "at"),
    [("crop", 0), ("observe", 0), ("observe", 2), ("observe", 5), ("propose", 0), ("propose", 3)],
)
def test_raising_drafter_turns_itself_off(
    model: Model, caplog: pytest.LogCaptureFixture, where: str, at: int
) -> None:
    """The server died when an image reached a drafter without vision (llama.cpp#23398)."""
    conversation = model.conversation(Scripted([7, 8], where, at))
    generation = conversation.generate_plan(lay_out(model, PROMPT), make_options(max_new_tokens=12))
    result = generation.result()
    assert result.draft.state == f"off: {where} failed: out of memory"
    assert result.token_ids == plain(model)
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    # Three spans are observed before the first round, and a round observes after it proposes.
    rounds = {"crop": 0, "observe": max(0, at - 2), "propose": at}[where]
    assert len([r for r in generation.rounds if r.drafted]) == rounds
    again = conversation.generate_plan(lay_out(model, PROMPT), make_options(max_new_tokens=12))
    assert again.result().token_ids == result.token_ids


@pytest.mark.parametrize("ids", [None, 7, [None], [1.5], ["7"]])
def test_nonsense_turns_the_drafter_off(model: Model, ids: Any) -> None:
    """A proposal that is no list of ids must not end the request either."""
    conversation = model.conversation(Scripted(ids))
    options = make_options(max_new_tokens=12)
    result = conversation.generate_plan(lay_out(model, PROMPT), options).result()
    assert result.draft.state.startswith("off: propose failed")
    assert result.token_ids == plain(model)


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([7, 8, 9], [7, 8, 9]),
        ([7, IMAGE_PAD, 9], [7]),
        ([IMAGE_PAD, 7], []),
        ([7, VOCAB - 1, 9], [7]),
        ([7, VOCAB, 9], [7]),
        ([7, -1, 9], [7]),
        (list(range(20, 40)), list(range(20, 28))),
        (np.array([7, 8]), [7, 8]),
        ([], []),
    ],
)
def test_what_is_left_of_a_proposal(model: Model, ids: Any, kept: list[int]) -> None:
    """Placeholders and ids that no token has cut a draft; they crashed or leaked elsewhere."""
    runner = DraftRunner(Scripted(ids), model.manifest.banned_ids, VOCAB)
    assert IMAGE_PAD in model.manifest.banned_ids and VOCAB - 1 in model.manifest.banned_ids
    proposal = runner.propose(request())
    assert proposal.token_ids == kept and all(type(i) is int for i in proposal.token_ids)
    assert runner.state == "on"


@pytest.mark.parametrize(("own", "asked", "allowed"), [(8, 3, 3), (3, 8, 3), (0, 8, 0), (8, 0, 0)])
def test_draft_length_is_the_smaller_limit(own: int, asked: int, allowed: int) -> None:
    """Neither the drafter's own limit nor the tokens still allowed are passed."""
    drafter = Scripted([7] * 9, max_drafts=own)
    proposal = DraftRunner(drafter, (), VOCAB).propose(request(asked))
    assert (drafter.requests[0].max_drafts, len(proposal.token_ids)) == (allowed, allowed)


@pytest.mark.parametrize("draft_tokens", [0, 1, 3, 7])
@pytest.mark.parametrize("draft", ["dflash", "lookup"])
def test_draft_tokens(model: Model, draft: str, draft_tokens: int) -> None:
    """`draft_tokens` bounds every round; 0 is plain decoding."""
    conversation = model.conversation(draft, draft_tokens=draft_tokens)
    options = make_options(max_new_tokens=12)
    generation = conversation.generate_plan(lay_out(model, PROMPT), options)
    assert generation.result().token_ids == plain(model)
    longest = max(len(r.drafted) for r in generation.rounds)
    assert longest == draft_tokens if draft == "dflash" else longest <= draft_tokens
    left = [12 - 1 - sum(r.produced for r in generation.rounds[:i]) for i in range(12)]
    assert all(len(r.drafted) < max(1, n) for r, n in zip(generation.rounds, left, strict=False))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"draft": "eagle"}, ["'eagle'", "none", "lookup", "dflash"]),
        ({"holes": "fill"}, ["'fill'", "seed", "seed-masked", "gap", "index", "off"]),
        ({"draft_tokens": 8}, ["0 and 7", "not 8"]),
        ({"draft_tokens": -1}, ["0 and 7", "not -1"]),
        ({"draft": "lookup", "draft_tokens": -1}, ["0 or more", "-1"]),
        ({"hole_rows": -1}, ["0 or more", "-1"]),
        ({"draft": "none", "holes": "gap"}, ["holes='gap'", "'none'"]),
        ({"holes": "gap", "hole_rows": 4}, ["hole_rows", "'gap'"]),
        ({"holes": "index", "hole_rows": 4}, ["hole_rows", "'index'"]),
        ({"draft": "lookup", "hole_rows": 4}, ["hole_rows=4", "'lookup'"]),
    ],
)
def test_wrong_choices_name_the_right_ones(
    model: Model, choice: dict[str, Any], words: list[str]
) -> None:
    """A message says what was wrong and what there is instead."""
    with pytest.raises(PromptError) as caught:
        model.conversation(**choice)
    assert all(word in str(caught.value) for word in words), caught.value


def test_layers_that_were_not_exported(model: Model) -> None:
    """A drafter that reads other layers was found out inside the first request, and ended it."""
    drafter = Scripted()
    drafter.taps = (1, 3)
    with pytest.raises(PromptError, match=r"'scripted' reads target layers \[1, 3\].*\[1, 2\]"):
        model.conversation(drafter)


def naive_lookup(tokens: list[int], most: int) -> list[int]:
    """The longest ending of 4 to 2 tokens that occurred before, its latest occurrence first."""
    for size in (4, 3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) > size and tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + most]
    return []


@pytest.mark.parametrize("seed", range(8))
def test_lookup_is_an_ngram_search(seed: int) -> None:
    """The index finds what a search of the whole text finds, and forgets the last request's."""
    rng = np.random.default_rng(seed)
    lookup = Lookup()
    for _ in range(3):
        lookup.crop(Row(0), Position(0))
        tokens = rng.integers(0, 2 + seed, 3).tolist()
        for _ in range(60):
            tokens += rng.integers(0, 2 + seed, rng.integers(1, 4)).tolist()
            found = lookup.propose(request(8, tuple(tokens)))
            assert found.token_ids == naive_lookup(tokens, 8)


def test_lookup_never_copies_an_image(model: Model) -> None:
    """Prompt lookup happily copies <|image_pad|> runs from a prompt that repeats itself."""
    token = plain(model)[0]
    start = words([30, 31, 32])
    repeated = [start, image(3, 8), start, image(3, 8), start]
    lookup = Lookup()
    ids = lay_out(model, repeated).token_ids.tolist()
    assert IMAGE_PAD in lookup.propose(request(8, tuple(ids))).token_ids
    runner = DraftRunner(Lookup(), model.manifest.banned_ids, VOCAB)
    assert runner.propose(request(8, tuple(ids))).token_ids == []
    parts = [words([token, 33]), *repeated, words([token])]
    conversation = model.conversation("lookup")
    generation = conversation.generate_plan(lay_out(model, parts), make_options(max_new_tokens=24))
    generation.result()
    drafted = {i for r in generation.rounds for i in r.drafted}
    assert not drafted & set(model.manifest.banned_ids)
