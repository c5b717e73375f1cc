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

    def lattice(self, hidden: Float, anchor: int) -> tuple[Ints, Float]:
        """Candidate ids [n, K], the smallest first, and scores [n, K, K]: of row t's candidate b
        after row t-1's candidate a; before row 0 stands the anchor alone, for every a."""
        values, ids, projected = self.candidates(hidden)
        order = np.argsort(ids, axis=-1)
        ids = np.take_along_axis(ids, order, axis=-1)
        values = np.take_along_axis(values, order, axis=-1)
        before = np.empty_like(ids)
        before[0], before[1:] = anchor, ids[:-1]
        predecessors = self._predecessor[before].astype(np.float32) * projected[:, None]
        successors = self._successor[ids].astype(np.float32)
        return ids, values[:, None] + predecessors @ successors.transpose(0, 2, 1)

    def choose(self, hidden: Float, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """Walk the rows from the anchor, each choice being the next row's predecessor."""
        ids, scores = self.lattice(hidden, anchor)
        chosen: list[int] = []
        proposals: list[Distribution] = []
        place = 0
        for row in range(len(ids)):
            after = scores[row, place]
            if sampling is None:
                # Of equal scores the first, which has the lowest id.
                place = int(after.argmax())
                chosen.append(int(ids[row, place]))
                continue
            q = _softmax(ids[row], after, sampling.temperature)
            index = sampling.first_output_index + row
            chosen.append(q.token_at(uniform(sampling.rng_seed, index, Purpose.DRAFT)))
            place = int(np.searchsorted(ids[row], chosen[-1]))
            proposals.append(q)
        return Drafted(chosen, proposals if sampling is not None else None)


def _softmax(ids: Ints, scores: Float, temperature: float) -> Distribution:
    """The proposal over one row's candidates, whose ids grow; temperature only, no other filter."""
    scaled = scores.astype(np.float64) / temperature
    return Distribution.of(ids, np.exp(scaled - scaled.max()))
