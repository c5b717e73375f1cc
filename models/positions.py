"""All position arithmetic: spans, M-RoPE positions, pinned spans, holes, windows, block starts.

Three rulers that are never mixed: a `Row` indexes a K/V cache, a `Position` is a rope position,
and token counts are plain ints named num_tokens. Knows no caches and no graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

from .grid import Grid

Row = NewType("Row", int)
Position = NewType("Position", int)
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SpanKind = Literal["text", "image", "audio"]
Ruler = Literal["text", "index"]


@dataclass(frozen=True)
class Span:
    """A maximal run of text rows, one image or one audio clip; `pinned` is decided for the whole.

    Slices of a span inherit its answer, so a chunk border changes nothing (llama.cpp#28587).
    """

    start: Row
    num_rows: int
    kind: SpanKind
    pinned: bool

    @property
    def stop(self) -> Row:
        """One past the last row."""
        return Row(self.start + self.num_rows)


@dataclass(frozen=True)
class Hole:
    """Positions [start, stop) on the draft's ruler for which the draft cache has no rows."""

    start: Position
    stop: Position


def advancing_positions(start: Position, num_rows: int) -> Ints:
    """M-RoPE positions [3, num_rows] of text or audio: all axes count up from `start`."""
    positions = np.empty((3, num_rows), np.int64)
    positions[:] = np.arange(start, start + num_rows)
    return positions


def advanced(position: Position, num_rows: int) -> Position:
    """The next position after `num_rows` rows of text that begin at `position`."""
    return Position(position + num_rows)


def image_positions(start: Position, grid: Grid) -> Ints:
    """M-RoPE positions [3, grid rows] of an image: t fixed, h and w from the merged grid."""
    rows = np.repeat(np.arange(grid.merged_height), grid.merged_width)
    columns = np.tile(np.arange(grid.merged_width), grid.merged_height)
    return np.stack([np.zeros_like(rows), rows, columns]).astype(np.int64) + start


def next_position(mrope_positions: Ints) -> Position:
    """One past the maximum over all axes and rows; after an image p + max(h, w), not p + 1."""
    return Position(int(mrope_positions.max()) + 1) if mrope_positions.size else Position(0)


def is_pinned(mrope_positions: Ints) -> bool:
    """Whether a span [3, n] has more than one row and text positions that do not increase."""
    text = text_ruler(mrope_positions)
    return bool(text.size > 1 and not np.all(np.diff(text) > 0))


def text_ruler(mrope_positions: Ints) -> Ints:
    """Positions [n] of rows [3, n] on the text ruler (the temporal axis)."""
    return mrope_positions[0]


def index_ruler(first_row: Row, num_rows: int) -> Ints:
    """Positions [n] of consecutive rows on the index ruler: their row numbers."""
    return np.arange(first_row, first_row + num_rows, dtype=np.int64)


def block_positions(start: Position, num_rows: int) -> Ints:
    """Positions [num_rows] of a draft block: the anchor at `start`, one step per mask."""
    return np.arange(start, start + num_rows, dtype=np.int64)


def seed_positions(hole: Hole, max_rows: int) -> Ints:
    """Positions of the rows that fill a hole: its last `max_rows` at most."""
    return np.arange(max(hole.start, hole.stop - max_rows), hole.stop, dtype=np.int64)


def visible_context(queries: Ints, keys: Ints, window: int | None, valid: Bools) -> Bools:
    """Which cached keys [C] each query [B] sees, [B, C]: those with q - k < window; without one
    all valid ones, [1, C], since every query sees the same."""
    if window is None:
        return valid[None]
    return valid[None] & (queries[:, None] - keys[None, :] < window)


def visible_block(num_rows: int, window: int | None, causal: bool) -> Bools:
    """Which rows of its own block each query sees, [B, B]."""
    distance = np.arange(num_rows)[:, None] - np.arange(num_rows)[None, :]
    seen = distance >= 0 if causal else np.ones_like(distance, dtype=bool)
    return seen if window is None else seen & (np.abs(distance) < window)
