"""Drafters for tests: right, wrong, half right, random and failing ones.

A drafter that is right by knowledge is right only where the loop says it should draft: it compares
the request's anchor, row and position with what the known answer demands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from dflash_onnx.models.positions import Ints, Position, Row
from dflash_onnx.runtime.drafters.base import (
    DraftCounts,
    Drafted,
    DraftSampling,
    Observed,
    Proposal,
    Request,
)
from dflash_onnx.runtime.drafters.draft_cache import DraftCache
from dflash_onnx.runtime.drafters.networks import DFlashNetworks
from dflash_onnx.runtime.drafters.rows import Float


class Broken(Exception):
    """What a failing drafter raises."""


def wrong(token: int) -> int:
    """Another usable id; with close logits it is the runner-up as often as not."""
    return (token + 1) % 256


@dataclass(frozen=True)
class Known:
    """An answer known beforehand, and the row and position of its first token."""

    ids: tuple[int, ...]
    row: int
    position: int

    def fits(self, request: Request) -> bool:
        """Whether the request stands where its output index belongs."""
        last = request.output_index - 1
        return (
            request.row == self.row + last
            and request.position == self.position + last
            and request.anchor == request.tokens[-1] == self.ids[last]
            and len(request.tokens) == self.row + request.output_index
        )

    def drafts(self, request: Request, num_right: int, num_drafts: int) -> list[int]:
        """`num_drafts` ids, the first `num_right` of them right if the request fits."""
        ids = list(self.ids[request.output_index :][:num_drafts])
        ids += [0] * (num_drafts - len(ids))
        right = num_right if self.fits(request) else 0
        return ids[:right] + [wrong(i) for i in ids[right:]]


class Quiet:
    """What the test drafters share: they note nothing and forget nothing."""

    name = "quiet"
    taps: tuple[int, ...] = ()

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.counts = DraftCounts()

    def observe(self, rows: Observed) -> None:
        """Nothing to note."""

    def propose(self, request: Request) -> Proposal:
        """No drafts."""
        return Proposal([])

    def crop(self, num_rows: Row, position: Position) -> None:
        """Nothing to forget."""


class FirstK(Quiet):
    """Right for the first k tokens of a block and wrong after; k goes round in `rights`."""

    name = "first-k"

    def __init__(self, known: Known, max_drafts: int, rights: Sequence[int]) -> None:
        super().__init__(max_drafts)
        self._known = known
        self._rights: Iterator[int] = cycle(rights)

    def propose(self, request: Request) -> Proposal:
        """A full block, even beyond what is asked for."""
        return Proposal(self._known.drafts(request, next(self._rights), self.max_drafts))


class Oracle(FirstK):
    """Always right, as long as the loop asks at the right row and position."""

    name = "oracle"

    def __init__(self, known: Known, max_drafts: int) -> None:
        super().__init__(known, max_drafts, [max_drafts])


class Adversary(FirstK):
    """Always wrong, and from the first token on."""

    name = "adversary"

    def __init__(self, known: Known, max_drafts: int) -> None:
        super().__init__(known, max_drafts, [0])


class Random(Quiet):
    """Any ids and any number of them; some are banned, some are no ids at all."""

    name = "random"

    def __init__(self, max_drafts: int, vocab_size: int, rng_seed: int = 0) -> None:
        super().__init__(max_drafts)
        self._rng = np.random.default_rng(rng_seed)
        self._bounds = (-3, vocab_size + 40)

    def propose(self, request: Request) -> Proposal:
        """Up to two tokens more than allowed."""
        count = int(self._rng.integers(0, self.max_drafts + 3))
        return Proposal([int(i) for i in self._rng.integers(*self._bounds, count)])


class Raising(Oracle):
    """An oracle that breaks on call `after` + 1 of one method; it wants a tap, for nothing."""

    name = "raising"

    def __init__(
        self, known: Known, max_drafts: int, where: str, after: int, taps: tuple[int, ...]
    ) -> None:
        super().__init__(known, max_drafts)
        self.taps = taps
        self._where = where
        self._left = after

    def observe(self, rows: Observed) -> None:
        """Check that the tap came, or break."""
        self._count("observe")
        assert set(rows.taps) == set(self.taps)

    def propose(self, request: Request) -> Proposal:
        """The right drafts, or break."""
        self._count("propose")
        return super().propose(request)

    def crop(self, num_rows: Row, position: Position) -> None:
        """Nothing, or break."""
        self._count("crop")

    def _count(self, method: str) -> None:
        if method == self._where:
            self._left -= 1
            if self._left < 0:
                raise Broken(f"{method} breaks on purpose")


class GuidedNetworks:
    """A drafter's real graphs, whose first k ids are replaced by right ones; k goes round.

    `start` is the known answer's first position on the draft's ruler, so that a block at a wrong
    position gets wrong ids. Random weights alone would hardly ever have a draft accepted.
    """

    def __init__(
        self, inner: DFlashNetworks, known: Known, start: int, rights: Sequence[int]
    ) -> None:
        self.taps, self.block_size = inner.taps, inner.block_size
        self.layers, self.kinds = inner.layers, inner.kinds
        self._inner, self._known, self._start = inner, known, start
        self._rights: Iterator[int] = cycle(rights)

    def new_cache(self, kind: object) -> DraftCache:
        """An empty cache."""
        return self._inner.new_cache(kind)  # type: ignore[arg-type]

    def inject(self, features: list[Float], positions: Ints) -> tuple[list[Float], list[Float]]:
        """The real keys and values."""
        return self._inner.inject(features, positions)

    def zero_features(self, num_rows: int) -> list[Float]:
        """Rows of zeros."""
        return self._inner.zero_features(num_rows)

    def draft(
        self,
        anchor: int,
        positions: Ints,
        caches: list[DraftCache],
        sampling: DraftSampling | None,
    ) -> Drafted:
        """Run the block for real, then put the right ids in front."""
        ids = self._inner.draft(anchor, positions, caches, sampling).token_ids
        index = int(positions[0]) - self._start + 1
        right = list(self._known.ids[index : index + next(self._rights)])[: len(ids)]
        return Drafted(right + ids[len(right) :])
