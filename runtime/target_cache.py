"""The target's cache: growing K/V buffers of attention layers, state of recurrent ones.

Owned by one conversation together with the binding of the decoder graph. Knows rows only;
positions live elsewhere. One row beyond the limit is reserved, because the graph's extra
attention row is written just past the last real one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..models.errors import ContextError
from ..models.positions import Row
from .binding import Binding
from .recurrent_state import RecurrentState, StateCopy

INITIAL_ROWS = 256
# Rows of an answer that there is room for before it begins.
ANSWER_ROWS = 64
# Copies of recurrent state kept to come back to; each is as large as the state itself.
MAX_SNAPSHOTS = 2


class TargetCache:
    """Keys and values [1, kv heads, capacity, d] of attention layers; rows [0, num_rows) are valid.

    `state` is that of the recurrent layers, if there are any; `snapshots` are earlier ones.
    """

    def __init__(
        self,
        binding: Binding,
        layer_numbers: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        limit: int,
        state: RecurrentState | None = None,
    ) -> None:
        self.binding = binding
        self.limit = limit
        self.num_rows = Row(0)
        self.state = state
        self.snapshots: dict[Row, StateCopy] = {}
        self._numbers = tuple(layer_numbers)
        self._shape = (1, num_kv_heads, head_dim)
        self.layers: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = [
            (self._buffer(0), self._buffer(0)) for _ in self._numbers
        ]
        # Rows that every layer's buffers hold, also after a growth that failed half-way.
        self.capacity = 0

    @property
    def num_bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(key.nbytes + value.nbytes for key, value in self.layers)

    @property
    def state_bytes(self) -> int:
        """Memory held by the recurrent layers' state, without snapshots."""
        return self.state.num_bytes if self.state else 0

    @property
    def snapshot_bytes(self) -> int:
        """Memory held by snapshots."""
        return sum(copy.num_bytes for copy in self.snapshots.values())

    def reserve(self, num_new: int) -> None:
        """Make room for `num_new` rows past `num_rows`; buffers grow by doubling."""
        needed = self.num_rows + num_new
        if needed > self.limit:
            raise ContextError(
                f"{needed} rows are needed but the context limit is {self.limit}; "
                "shorten the prompt, lower --max-pixels or --max-new-tokens."
            )
        if needed + 1 <= self.capacity:
            return
        capacity = min(max(2 * self.capacity, needed + 1, INITIAL_ROWS), self.limit + 1)
        for i in range(len(self.layers)):
            self._grow_layer(i, capacity)
        self.capacity = capacity

    def prepare(self, prompt_rows: int, answer_rows: int) -> None:
        """Make room for a prompt at once, and for the beginning of its answer: growing on the way
        would copy the prompt's rows."""
        self.reserve(prompt_rows + min(answer_rows, ANSWER_ROWS))

    def _grow_layer(self, i: int, capacity: int) -> None:
        """One layer at a time, so that only one is held twice."""
        key, value = (self._grown(old, capacity) for old in self.layers[i])
        self.layers[i] = (key, value)
        layer = self._numbers[i]
        self.binding.share(f"past_key_values.{layer}.key", f"present.{layer}.key", key)
        self.binding.share(f"past_key_values.{layer}.value", f"present.{layer}.value", value)

    def commit(self, num_new: int) -> None:
        """Keep `num_new` rows that the graph has just written."""
        # First: after an interrupt the caller knows fewer rows than these, and its crop goes back
        # to a snapshot.
        self.num_rows = Row(self.num_rows + num_new)
        if self.state is not None:
            self.state.commit(num_new)

    def snapshot(self) -> None:
        """Make the present row one that `crop` can come back to, after rows that were certain."""
        if self.state is not None and self.num_rows not in self.snapshots:
            while len(self.snapshots) >= MAX_SNAPSHOTS:
                del self.snapshots[min(self.snapshots)]
            self.snapshots[self.num_rows] = self.state.copy()

    def reachable(self, num_rows: Row) -> Row:
        """How many of the first `num_rows` rows `crop` can keep: recurrent state cannot shrink."""
        if self.state is None:
            return Row(min(self.num_rows, num_rows))
        if self.state.is_whole and num_rows >= self.num_rows:
            return self.num_rows
        return max((row for row in self.snapshots if row <= num_rows), default=Row(0))

    def crop(self, num_rows: Row) -> Row:
        """Forget every row from `num_rows` on, or from the last reachable one; returns it."""
        reached = self.reachable(num_rows)
        for row in [row for row in self.snapshots if row > reached]:
            del self.snapshots[row]
        if self.state is not None and not (self.state.is_whole and reached == self.num_rows):
            self.state.restore(self.snapshots.get(reached))
        self.num_rows = reached
        return reached

    def _buffer(self, capacity: int) -> NDArray[np.float32]:
        batch, heads, width = self._shape
        return np.zeros((batch, heads, capacity, width), np.float32)

    def _grown(self, old: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
        new = self._buffer(capacity)
        new[:, :, : self.num_rows] = old[:, :, : self.num_rows]
        return new
