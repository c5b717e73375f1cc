"""From a block's rows to drafted ids: best token per row, or DFlash2's candidate walk.

Knows heads and tables of a drafter; knows no cache, no positions and no policy.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.manifest import SelectorSpec
from ...models.positions import Ints
from ..sampling import Distribution, Purpose, uniform
from ..target import Head
from .base import BlockRows, Drafted, DraftSampling

Float = NDArray[np.float32]


class Chooser(Protocol):
    """Turns the n rows of the drafted positions into ids."""

    def open(self) -> None:
        """Bring what every block reads into memory."""

    def choose(self, rows: BlockRows, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """Ids [n]; with `sampling` they may be drawn, and then come with their distributions."""


class BestToken:
    """DFlash v1: the best token of every row, by the target's head or a reduced one of its own.

    Drafts stay greedy when the answer is sampled: a point mass is a valid proposal.
    """

    def __init__(self, head: Head, target_ids: NDArray[np.int64] | None) -> None:
        self.head = head
        self._target_ids = target_ids

    def open(self) -> None:
        """Nothing: the head is a graph."""

    def choose(self, rows: BlockRows, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """The best id of each row."""
        ids = self.head.argmax(rows.hidden, np.arange(len(rows.hidden)))
        return Drafted((ids if self._target_ids is None else self._target_ids[ids]).tolist())


class SelectorWalk:
    """DFlash2: K candidates a row, scored with the token chosen before them (dflash.md, 2.6).

    The candidates are the target head's best tokens: the drafter has no head of its own, and
    multiplier and softcap keep their order.
    """

    def __init__(
        self,
        spec: SelectorSpec,
        head: Head,
        predecessor: NDArray,
        successor: NDArray,
    ) -> None:
        self._spec = spec
        self._head = head
        # Rows [V, rank] for the token before, and for the candidates after it.
        self.tables = (predecessor, successor)
        self._opening = threading.Lock()

    def open(self) -> None:
        """Hold both tables: a row at a random place of a mapped file took 3 to 10 us, of this
        memory half of one (NumPy asks for huge pages)."""
        # One after the other: threads that come together would each read a copy.
        with self._opening:
            before, after = self.tables
            self.tables = (np.require(before, None, "O"), np.require(after, None, "O"))

    def candidates(self, hidden: Float) -> tuple[Float, Ints]:
        """Transformed logits [n, K] and ids [n, K] of each row's candidates."""
        best, k = self._head.rows(hidden, np.arange(len(hidden)), False), self._spec.top_k
        values = self._transformed(best.top_values[:, :k])
        return values, best.top_ids[:, :k]

    def _transformed(self, values: Float) -> Float:
        """Multiplier first, then the cap, as the drafter was trained."""
        if self._spec.output_multiplier != 1:
            values = values * np.float32(self._spec.output_multiplier)
        if self._spec.logit_softcap is None:
            return values
        cap = np.float32(self._spec.logit_softcap)
        # A banned id stays at minus infinity.
        return np.where(np.isneginf(values), values, np.tanh(values / cap) * cap)

    def scorer(self, rows: BlockRows) -> tuple[Ints, Scorer]:
        """Candidate ids [n, K] of n rows, and what scores them."""
        assert rows.projected is not None
        before, after = self.tables
        values, ids = self.candidates(rows.hidden)
        return ids, Scorer(values, rows.projected, before, after.take(ids, axis=0))

    def choose(self, rows: BlockRows, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """Walk the rows from the anchor, each choice being the next row's predecessor."""
        ids, scorer = self.scorer(rows)
        if sampling is None:
            return Drafted(_greedy(scorer, ids.tolist(), anchor))
        return _drawn(scorer, ids, anchor, sampling)


class Scorer:
    """Scores of each row's candidates once the token before them is known."""

    def __init__(
        self, values: Float, projected: Float, predecessor: NDArray, successors: NDArray
    ) -> None:
        self._values = values
        self._projected = projected
        self._predecessor = predecessor
        self._successors = successors.astype(np.float32, copy=False)

    def scores(self, row: int, before: int) -> Float:
        """Scores [K] at `row` after the token `before`."""
        mixed = self._predecessor[before] * self._projected[row]
        # A matrix product this small spends its time in fetching a library's code.
        return self._values[row] + (self._successors[row] * mixed).sum(axis=-1)


def _greedy(scorer: Scorer, ids: list[list[int]], anchor: int) -> list[int]:
    chosen = [anchor]
    for row, candidates in enumerate(ids):
        scores = scorer.scores(row, chosen[-1]).tolist()
        best = max(scores)
        # Of equal scores the lowest id. NaN equals none: where half precision overflowed, any id.
        equal = (i for i, s in zip(candidates, scores, strict=True) if s == best)
        chosen.append(min(equal, default=candidates[0]))
    return chosen[1:]


def _drawn(scorer: Scorer, ids: Ints, anchor: int, sampling: DraftSampling) -> Drafted:
    chosen, proposals = [anchor], []
    for row, candidates in enumerate(ids):
        by_id = np.argsort(candidates)
        scores = scorer.scores(row, chosen[-1])[by_id]
        q = _softmax(candidates[by_id], scores, sampling.temperature)
        index = sampling.first_output_index + row
        chosen.append(q.token_at(uniform(sampling.rng_seed, index, Purpose.DRAFT)))
        proposals.append(q)
    return Drafted(chosen[1:], proposals)


def _softmax(ids: Ints, scores: Float, temperature: float) -> Distribution:
    """The proposal over one row's candidates, whose ids grow; temperature only, no other filter."""
    scaled = scores.astype(np.float64) / temperature
    return Distribution.of(ids, np.exp(scaled - scaled.max()))
