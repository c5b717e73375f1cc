"""From a block's hidden rows to drafted ids: best token per row, or DFlash2's candidate walk.

Knows heads and tables of a drafter; knows no cache, no positions and no policy.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.manifest import SelectorSpec
from ...models.positions import Ints
from ..sampling import Distribution, Purpose, uniform
from ..session import Graph
from ..target import Head
from .base import Drafted, DraftSampling

Float = NDArray[np.float32]


class Chooser(Protocol):
    """Turns hidden rows [n, H] of the drafted positions into ids."""

    def choose(self, hidden: Float, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """Ids [n]; with `sampling` they may be drawn, and then come with their distributions."""


class BestToken:
    """DFlash v1: the best token of every row, by the target's head or a reduced one of its own.

    Drafts stay greedy when the answer is sampled: a point mass is a valid proposal.
    """

    def __init__(self, head: Head, target_ids: NDArray[np.int64] | None) -> None:
        self.head = head
        self._target_ids = target_ids

    def choose(self, hidden: Float, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """The best id of each row."""
        ids = self.head.argmax(hidden, np.arange(hidden.shape[0]))
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
        projection: Graph,
        predecessor: NDArray,
        successor: NDArray,
    ) -> None:
        self._spec = spec
        self._head = head
        self._projection = projection
        self._predecessor = predecessor
        self._successor = successor

    def candidates(self, hidden: Float) -> tuple[Float, Ints, Float]:
        """Transformed logits [n, K] and ids [n, K] of each row's candidates, projections [n, r]."""
        best, k = self._head.rows(hidden, np.arange(len(hidden)), False), self._spec.top_k
        values = self._transformed(best.top_values[:, :k])
        return values, best.top_ids[:, :k], self._projection.run({"hidden": hidden})[0]

    def _transformed(self, values: Float) -> Float:
        """Multiplier first, then the cap, as the drafter was trained."""
        values = values * np.float32(self._spec.output_multiplier)
        if self._spec.logit_softcap is None:
            return values
        cap = np.float32(self._spec.logit_softcap)
        # A banned id stays at minus infinity.
        return np.where(np.isneginf(values), values, np.tanh(values / cap) * cap)

    def scores(self, previous: int, values: Float, successors: Float, projected: Float) -> Float:
        """Scores [K] of one row's candidates, whose successor rows are [K, r], after `previous`."""
        before = self._predecessor[previous].astype(np.float32) * projected
        return values + successors @ before

    def successors(self, ids: Ints) -> Float:
        """Rows [..., r] of the successor table."""
        return self._successor[ids].astype(np.float32)

    def choose(self, hidden: Float, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """Walk the rows from the anchor, each choice being the next row's predecessor."""
        chosen: list[int] = []
        proposals: list[Distribution] = []
        found = self.candidates(hidden)
        rows = zip(*found, self.successors(found[1]), strict=True)
        for row, (values, ids, projected, successors) in enumerate(rows):
            scores = self.scores(chosen[-1] if chosen else anchor, values, successors, projected)
            if sampling is None:
                chosen.append(int(ids[scores == scores.max()].min()))
                continue
            q = _softmax(ids, scores, sampling.temperature)
            index = sampling.first_output_index + row
            chosen.append(q.token_at(uniform(sampling.rng_seed, index, Purpose.DRAFT)))
            proposals.append(q)
        return Drafted(chosen, proposals if sampling is not None else None)


def _softmax(ids: Ints, scores: Float, temperature: float) -> Distribution:
    """The proposal over one row's candidates; temperature only, no other filter."""
    order = np.argsort(ids)
    scaled = scores[order].astype(np.float64) / temperature
    return Distribution.of(ids[order], np.exp(scaled - scaled.max()))
