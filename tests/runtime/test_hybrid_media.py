"""Drafting around media for a hybrid target: recurrent layers see every row, drafters as before.

An all-knowing drafter must be right all the time, at one target call a round; DFlash has a hole
where an image was, the MTP head has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support_cases import DRAFTS, HYBRID
from support_drafters import Known, Oracle
from support_oracle import (
    FULL,
    WINDOW_64,
    Truth,
    Witness,
    acceptance,
    endless,
    find_truth,
    run_oracle,
)
from support_prompts import BundleMaker, Part, audio, image, lay_out, text

from dflash_onnx.models.draft_config import DraftLayer
from dflash_onnx.models.positions import Ints, Row
from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.drafters.base import Drafter, Observed
from dflash_onnx.runtime.drafters.mtp import Mtp
from dflash_onnx.runtime.drafters.policy import HolePolicy
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.target import Float

WHOLE = 4096
KINDS = (FULL, WINDOW_64, DraftLayer(16, False))
REAL = ("dflash", "dflash-2", "dflash-3", "dflash2", "mtp")
DRAFTING = [p for p in HolePolicy if p is not HolePolicy.OFF]


@dataclass(frozen=True)
class Layout:
    """A prompt, and the holes that images leave on the text ruler."""

    parts: list[Part]
    holes: tuple[tuple[int, int], ...]

    @property
    def num_images(self) -> int:
        return sum(part.is_skipped for part in self.parts)


LAYOUTS = {
    "image first": Layout([image(4, 9), text(14)], ((0, 9),)),
    "image last": Layout([text(11), image(4, 9)], ((11, 20),)),
    "over the windows": Layout([text(12), image(5, 80), text(9)], ((12, 92),)),
    "two images": Layout(
        [text(5), image(3, 8), text(4), image(9, 4), text(6)], ((5, 13), (17, 26))
    ),
    "with sound": Layout([text(5), audio(9), image(4, 4), audio(3)], ((14, 18),)),
}
layouts = pytest.mark.parametrize("name", LAYOUTS)


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle(target=HYBRID, drafts=list(DRAFTS.values())), threads=1))


@pytest.fixture(scope="module")
def truths(model: Model) -> dict[str, Truth]:
    return {name: find_truth(model, layout.parts) for name, layout in LAYOUTS.items()}


def answer(model: Model, name: str, draft: str | Drafter, chunk: int = WHOLE) -> Result:
    """A layout's answer in a conversation of its own."""
    plan = lay_out(model, LAYOUTS[name].parts)
    options = make_options(max_new_tokens=20, chunk=chunk)
    return model.conversation(draft).generate_plan(plan, options).result()


def check_calls(result: Result, truth: Truth) -> None:
    """The plain answer, nothing turned off, and no target call beside the rounds' own."""
    assert result.token_ids == truth.tokens and result.draft.state == "on", result.draft.state
    assert result.timings.target_calls == result.draft.rounds > 0


@layouts
@pytest.mark.parametrize("draft", [*REAL, "lookup", "none"])
def test_one_target_call_a_round(
    model: Model, truths: dict[str, Truth], name: str, draft: str
) -> None:
    """Putting rejected rows right must cost no call: the next one replays what was accepted."""
    result = answer(model, name, draft)
    check_calls(result, truths[name])
    assert (result.draft.drafted > 0) or draft in ("lookup", "none")


@layouts
@pytest.mark.parametrize("draft", REAL)
def test_holes_and_skipped_spans(
    model: Model, truths: dict[str, Truth], name: str, draft: str
) -> None:
    """DFlash skips images and has a hole for each; the MTP head takes their rows as the target's
    cache does. Where a prompt is cut, also inside an image, changes neither, nor any draft."""
    layout, seen = LAYOUTS[name], []
    for chunk in (1, 5, 64, WHOLE):
        result = answer(model, name, draft, chunk)
        check_calls(result, truths[name])
        seen.append(result.draft)
    assert seen == seen[:1] * len(seen)
    assert seen[0].holes == (() if draft == "mtp" else layout.holes)
    assert seen[0].skipped_spans == (0 if draft == "mtp" else layout.num_images)


@layouts
@pytest.mark.parametrize("policy", DRAFTING, ids=lambda p: p.value)
@pytest.mark.parametrize("chunk", [7, WHOLE])
def test_a_knowing_dflash_is_right_after_media(
    model: Model, truths: dict[str, Truth], name: str, policy: HolePolicy, chunk: int
) -> None:
    """Rows, features and positions that reach the drafter are those of the hybrid's own rows."""
    layout, truth = LAYOUTS[name], truths[name]
    run = run_oracle(model, layout.parts, truth, policy, kinds=KINDS, chunk=chunk)
    assert [call.fault for call in run.oracle.drafts if call.fault] == []
    assert acceptance(run.result) == 1.0
    assert run.result.draft.holes == (layout.holes if policy.ruler == "text" else ())
    check_calls(run.result, truth)


@layouts
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_an_oracle_is_right_after_media(
    model: Model, truths: dict[str, Truth], name: str, drafts: int
) -> None:
    """The loop asks at the row and the position where the text goes on after an image."""
    truth = truths[name]
    oracle = Oracle(Known(truth.tokens, truth.num_prompt_rows, truth.pos_next), drafts)
    result = answer(model, name, oracle)
    assert acceptance(result) == 1.0
    check_calls(result, truth)


class Rows(Witness):
    """Never drafts; keeps what the target was fed and what it gave, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds: list[Float] = []
        self.hidden: list[Float] = []
        self.positions: list[Ints] = []

    def observe(self, rows: Observed) -> None:
        super().observe(rows)
        self.embeds += list(rows.embeds)
        self.hidden += list(rows.hidden.copy())
        self.positions += list(rows.mrope_positions.T)


class CountingCache:
    """A cache of as many entries as were committed."""

    num_bytes = 0

    def __init__(self) -> None:
        self.num_rows = 0

    def commit(self, count: int) -> None:
        self.num_rows += count

    def crop(self, num_rows: Row) -> None:
        self.num_rows = num_rows


class KnowingHead:
    """Stands for `MtpNetworks`: right after right entries. The hidden row of entry i is [i].

    Entry i joins row i's hidden row with the embedding of row i + 1 at row i's position, and
    knows the token of row i + 2.
    """

    def __init__(self, model: Model, rows: Rows, truth: Truth) -> None:
        self.target = model.target
        self.faults: list[int] = []
        self._rows, self._truth = rows, truth

    def new_cache(self, limit: int) -> CountingCache:
        return CountingCache()

    def forward(self, cache: CountingCache, embeds: Float, hidden: Float, positions: Ints) -> Float:
        numbers = range(cache.num_rows, cache.num_rows + len(embeds))
        for k, i in enumerate(numbers):
            # Where the target's row is not known yet, the head goes on from its own.
            before = self._rows.hidden[i] if hidden.shape[1] > 1 else [i - 1]
            right = before, self._rows.embeds[i + 1], self._rows.positions[i]
            for got, wanted in zip((hidden[k], embeds[k], positions[:, k]), right, strict=True):
                if not np.array_equal(got, wanted):
                    self.faults.append(i)
        return np.array(numbers, np.float32)[:, None]

    def best(self, hidden: Float) -> int:
        index = int(hidden[-1, 0]) + 2 - self._truth.num_prompt_rows
        return 0 if self.faults else self._truth.tokens[index]


@layouts
@pytest.mark.parametrize("chunk", [1, 7, WHOLE])
def test_a_knowing_mtp_head_is_right_after_media(
    model: Model, truths: dict[str, Truth], name: str, chunk: int
) -> None:
    """Every entry joins a row's hidden row and place with the embedding one row further, across
    the borders of images, sound, chunks and rounds."""
    rows, truth = Rows(), truths[name]
    answer(model, name, rows)
    for drafts in (1, 3, 15):
        head: Any = KnowingHead(model, rows, truth)
        result = answer(model, name, Mtp(head, WHOLE, drafts), chunk)
        assert head.faults == []
        assert acceptance(result) == 1.0
        assert result.draft.holes == () and result.draft.skipped_spans == 0
        check_calls(result, truth)
