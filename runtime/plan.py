"""The prompt plan: token ids and images become rows, spans, positions and row identities.

Knows where every row of a prompt comes from; runs the vision tower only for rows that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..models.errors import PromptError
from ..models.grid import Grid
from ..models.positions import (
    Ints,
    Position,
    Row,
    Span,
    SpanKind,
    advancing_positions,
    image_positions,
    is_pinned,
    next_position,
)
from .target import ImageRows

Float = NDArray[np.float32]
# A text row is its token id; a media row is its pixels' digest, its grid and its place.
RowKey = int | tuple[str, int]


@dataclass(frozen=True)
class Media:
    """One image or audio clip of a prompt: its identity, and how to compute its rows."""

    kind: SpanKind
    digest: str
    num_rows: int
    encode: Callable[[], ImageRows]


@dataclass(frozen=True)
class Batch:
    """A slice of one span: rows [first_row, first_row + n), what the target is called with."""

    span: Span
    first_row: Row
    token_ids: Ints
    mrope_positions: Ints
    media: Media | None

    @property
    def offset(self) -> int:
        """Where the slice starts inside its span."""
        return self.first_row - self.span.start

    @property
    def is_last_of_span(self) -> bool:
        """Whether the span ends with this slice."""
        return self.first_row + self.token_ids.size == self.span.stop


@dataclass(frozen=True)
class PromptPlan:
    """A whole prompt: token ids [R], M-RoPE positions [3, R], spans in order, their media."""

    token_ids: Ints
    mrope_positions: Ints
    spans: tuple[Span, ...]
    media: tuple[Media | None, ...]

    @property
    def num_rows(self) -> int:
        """Rows the prompt takes in the target's cache."""
        return self.token_ids.size

    @property
    def num_image_rows(self) -> int:
        """Rows that come from media."""
        return sum(span.num_rows for span in self.spans if span.kind != "text")

    @property
    def text_ids(self) -> list[int]:
        """Token ids of the text rows."""
        spans = (s for s in self.spans if s.kind == "text")
        return [int(i) for s in spans for i in self.token_ids[s.start : s.stop]]

    def keys(self) -> list[RowKey]:
        """The identity of every row: equal keys in equal places mean equal cache rows."""
        keys: list[RowKey] = []
        for span, media in zip(self.spans, self.media, strict=True):
            if media is None:
                keys += self.token_ids[span.start : span.stop].tolist()
            else:
                keys += [(media.digest, i) for i in range(span.num_rows)]
        return keys

    def message_ends(self, stop_ids: Collection[int], start: Row) -> list[Row]:
        """Rows after `start` that come next after a text token which ends messages."""
        ends = [
            Row(row + 1)
            for span in self.spans
            for row in range(span.start, span.stop)
            if span.kind == "text" and int(self.token_ids[row]) in stop_ids
        ]
        return [row for row in ends if start < row < self.num_rows]

    def batches(self, start: Row, chunk: int, cuts: Collection[Row] = ()) -> Iterator[Batch]:
        """Slices of at most `chunk` rows from row `start` on; none crosses a span border or cut."""
        for span, media in zip(self.spans, self.media, strict=True):
            first = max(span.start, start)
            while first < span.stop:
                stop = min([first + chunk, span.stop, *(cut for cut in cuts if cut > first)])
                rows = slice(first, stop)
                yield Batch(
                    span, Row(first), self.token_ids[rows], self.mrope_positions[:, rows], media
                )
                first = Row(stop)


class PlanBuilder:
    """Collects text and media in prompt order and lays out rows and positions."""

    def __init__(self) -> None:
        self._ids: list[Ints] = []
        self._positions: list[Ints] = []
        self._spans: list[Span] = []
        self._media: list[Media | None] = []
        self._num_rows = 0
        self._pos_next = Position(0)

    def text(self, token_ids: Sequence[int]) -> None:
        """Append a run of text rows."""
        if token_ids:
            positions = advancing_positions(self._pos_next, len(token_ids))
            self._append("text", np.array(token_ids, np.int64), positions, None)

    def image(self, placeholder_id: int, grid: Grid, media: Media) -> None:
        """Append an image: its rows share one text position and spread over h and w."""
        positions = image_positions(self._pos_next, grid)
        self._append("image", np.full(media.num_rows, placeholder_id), positions, media)

    def audio(self, placeholder_id: int, media: Media) -> None:
        """Append media whose positions advance row by row."""
        positions = advancing_positions(self._pos_next, media.num_rows)
        self._append("audio", np.full(media.num_rows, placeholder_id), positions, media)

    def plan(self) -> PromptPlan:
        """The finished plan."""
        if not self._num_rows:
            raise PromptError("the prompt is empty; nothing can be generated from it.")
        return PromptPlan(
            np.concatenate(self._ids),
            np.concatenate(self._positions, axis=1),
            tuple(self._spans),
            tuple(self._media),
        )

    def _append(self, kind: SpanKind, ids: Ints, positions: Ints, media: Media | None) -> None:
        self._spans.append(Span(Row(self._num_rows), ids.size, kind, is_pinned(positions)))
        self._ids.append(ids)
        self._positions.append(positions)
        self._media.append(media)
        self._num_rows += ids.size
        self._pos_next = Position(max(self._pos_next, next_position(positions)))


def common_rows(old: Sequence[RowKey], new: Sequence[RowKey]) -> Row:
    """How many leading rows two prompts share; the last row of `new` is never shared, because
    its output is what generation starts from."""
    limit = min(len(old), len(new) - 1)
    return Row(next((i for i in range(limit) if old[i] != new[i]), limit))
