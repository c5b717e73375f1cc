"""The interface of every way to draft, and the plain one that never drafts.

A drafter sees committed rows and proposes tokens; it never changes what the target answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.positions import Hole, Ints, Position, Row, Span
from ..sampling import Distribution

Float = NDArray[np.float32]


class Observed(NamedTuple):
    """Committed target rows of one span: ids [n], M-RoPE positions [3, n], taps {layer: [n, H]}.

    `span` is the whole span, of which these rows may be a slice. `embeds` [n, H] is what the
    target was fed, `hidden` [n, H] what it gave after the final norm. Taps and hidden rows lie in
    memory that the target's next call writes to: copy what is to stay. `embeds` may be read-only.
    """

    first_row: Row
    token_ids: Ints
    mrope_positions: Ints
    taps: dict[int, Float]
    span: Span
    embeds: Float
    hidden: Float


@dataclass(frozen=True)
class DraftSampling:
    """Drafts may be drawn: at this temperature, keyed by seed and output index."""

    temperature: float
    rng_seed: int
    first_output_index: int


class Request(NamedTuple):
    """Draft up to `max_drafts` tokens after `anchor`, whose row and position come next.

    `tokens` is everything so far, prompt and output, the anchor last; `output_index` is the
    index in the output of the first token to draft. `sampling` is set when drawn drafts pay.
    """

    anchor: int
    max_drafts: int
    row: Row
    position: Position
    output_index: int
    tokens: Sequence[int]
    sampling: DraftSampling | None = None


class BlockRows(NamedTuple):
    """What a block computed: hidden rows [B, H] and, for DFlash2, their projections [B, r]."""

    hidden: Float
    projected: Float | None

    @property
    def drafted(self) -> BlockRows:
        """The rows of drafted positions, which are all but the anchor's."""
        return BlockRows(self.hidden[1:], None if self.projected is None else self.projected[1:])


class Drafted(NamedTuple):
    """Drafted ids and, when they were drawn, the distribution each was drawn from."""

    token_ids: list[int]
    proposals: list[Distribution] | None = None


class Proposal(NamedTuple):
    """What was drafted; where the block started on the draft's ruler, if it has one."""

    token_ids: list[int]
    block_start: Position | None = None
    proposals: list[Distribution] | None = None


@dataclass
class DraftCounts:
    """What happened on the draft side so far, and the memory its caches hold."""

    holes: list[Hole] = field(default_factory=list)
    seeded_rows: int = 0
    skipped_spans: int = 0
    injected_rows: int = 0
    cache_bytes: int = 0


class Drafter(Protocol):
    """One way to draft; owned by one conversation."""

    name: str
    max_drafts: int
    taps: tuple[int, ...]
    counts: DraftCounts

    def observe(self, rows: Observed) -> None:
        """Take note of rows the target has committed."""

    def propose(self, request: Request) -> Proposal:
        """Draft at most `request.max_drafts` tokens."""

    def crop(self, num_rows: Row, position: Position) -> None:
        """Forget rows from `num_rows` on; the next row will have text position `position`."""


class NoDraft:
    """Plain decoding: one target call per token."""

    name = "none"
    max_drafts = 0
    taps: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.counts = DraftCounts()

    def observe(self, rows: Observed) -> None:
        """Nothing to note."""

    def propose(self, request: Request) -> Proposal:
        """No drafts."""
        return Proposal([])

    def crop(self, num_rows: Row, position: Position) -> None:
        """Nothing to forget."""
