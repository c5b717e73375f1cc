"""The drafter's K/V rows of one mask kind: slots with a position and a visibility each.

Attention does not care about slot order once keys are rotated, so a full ring simply overwrites
its oldest rows. Knows positions on the draft's ruler; knows no graphs and no policy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...models.positions import Hole, Ints, Position
from .rows import Float, RowWriter

FREE = -1
INITIAL_ROWS = 64


class DraftCache:
    """Keys and values [1, kv heads, slots, d] for `num_layers` layers that share one window.

    Slots double as rows come, for a block reads them all. A sliding window W stops at W-1, all that
    a query can see, and is a ring from then on.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        writer: RowWriter,
    ) -> None:
        self.window = window
        self._writer = writer
        self._head = (num_kv_heads, head_dim)
        capacity = self._within_window(INITIAL_ROWS)
        self.keys = [self._buffer(capacity) for _ in range(num_layers)]
        self.values = [self._buffer(capacity) for _ in range(num_layers)]
        self.positions: Ints = np.full(capacity, FREE, np.int64)
        self.valid: NDArray[np.bool_] = np.zeros(capacity, bool)
        self._evicted_below = Position(0)
        # Rows held, and the slot of the next one: rows lie in turn, in the order of positions.
        self._held = self._next = 0

    @property
    def num_rows(self) -> int:
        """Rows held, visible or not."""
        return self._held

    @property
    def num_bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(array.nbytes for array in (*self.keys, *self.values))

    def append(
        self, keys: list[Float], values: list[Float], positions: Ints, visible: bool
    ) -> None:
        """Store rows [1, kv heads, n, d] of every layer at `positions` [n]."""
        kept = self._newest(positions)
        if kept == positions.size:
            return
        below = self._held and positions[kept] < self.positions[self._next - 1]
        slots = self._next_slots(positions.size - kept)
        for store, new in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            self._writer.write(store, np.ascontiguousarray(new[:, :, kept:]), slots)
        self.positions[slots] = positions[kept:]
        self.valid[slots] = visible
        if below:
            self._sort()

    def crop(self, position: Position) -> Hole | None:
        """Drop rows at `position` and beyond; returns rows a ring had already lost before it."""
        self._drop(self.positions >= position)
        if self.window is None:
            return None
        start = max(0, position - (self.window - 1))
        stop = min(self._evicted_below, position)
        self._evicted_below = Position(min(self._evicted_below, start))
        return Hole(Position(start), Position(stop)) if start < stop else None

    def check(self) -> None:
        """Invariants, for tests: distinct positions, free slots invisible."""
        used = self.positions[self.positions != FREE]
        assert len(set(used.tolist())) == used.size, "two rows at one position"
        assert not self.valid[self.positions == FREE].any(), "a free slot is visible"

    def _drop(self, rows: NDArray[np.bool_]) -> None:
        """Free the slots of rows [slots] that are the last in turn."""
        self.positions[rows] = FREE
        self.valid[rows] = False
        count = int(rows.sum())
        self._held -= count
        self._next = (self._next - count) % max(1, self.positions.size)
        held = int(np.count_nonzero(self.positions != FREE))
        if held != self._held:
            # An interrupt came while rows were written or dropped.
            self._held = held
            self._sort()

    def _newest(self, positions: Ints) -> int:
        """From which row on a ring can hold them at all; those before count as evicted."""
        if self.window is None:
            return 0
        first = max(0, positions.size - (self.window - 1))
        self._evict(positions[:first])
        return first

    def _next_slots(self, count: int) -> Ints:
        """Slots for `count` rows: the next ones, in a full ring those of its oldest rows."""
        needed = self._within_window(self._held + count)
        if needed > self.positions.size:
            self._grow(needed)
        size = self.positions.size
        slots = np.arange(self._next, self._next + count)
        if self._next + count > size:
            slots %= size
        if self._held + count > size:
            lost = self.positions[slots]
            self._evict(lost[lost != FREE])
            # Before they are overwritten: an interrupt must not leave half a row in sight.
            self.positions[slots], self.valid[slots] = FREE, False
        self._held = min(self._held + count, size)
        self._next = (self._next + count) % max(1, size)
        return slots

    def _evict(self, positions: Ints) -> None:
        if positions.size:
            self._evicted_below = Position(max(self._evicted_below, int(positions.max()) + 1))

    def _grow(self, needed: int) -> None:
        extra = self._within_window(max(needed, 2 * self.positions.size)) - self.positions.size
        self.positions = np.pad(self.positions, (0, extra), constant_values=FREE)
        self.valid = np.pad(self.valid, (0, extra))
        for stores in (self.keys, self.values):
            stores[:] = [np.concatenate([s, self._buffer(extra)], axis=2) for s in stores]
        # Only a cache that never lost a row grows.
        self._next = self._held

    def _sort(self) -> None:
        """Bring rows in turn again after some came late, as those that fill an old hole do."""
        order = np.argsort(self.positions)
        order = np.roll(order, self._held - order.size)
        self.positions, self.valid = self.positions[order], self.valid[order]
        for stores in (self.keys, self.values):
            stores[:] = [store.take(order, axis=2) for store in stores]
        self._next = self._held % order.size

    def _within_window(self, rows: int) -> int:
        return rows if self.window is None else min(rows, self.window - 1)

    def _buffer(self, capacity: int) -> Float:
        heads, width = self._head
        return np.zeros((1, heads, capacity, width), np.float32)
