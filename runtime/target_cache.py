"""The target's K/V cache: one growing host buffer per layer, updated in place by the graph.

Owned by one conversation together with the binding of the decoder graph. Knows rows only;
positions live elsewhere. One row beyond the limit is reserved, because the graph's extra
attention row is written just past the last real one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..models.errors import ContextError
from ..models.positions import Row
from .session import Binding

INITIAL_ROWS = 256


class TargetCache:
    """Keys and values [1, kv heads, capacity, d] of every layer; rows [0, num_rows) are valid."""

    def __init__(
        self, binding: Binding, num_layers: int, num_kv_heads: int, head_dim: int, limit: int
    ) -> None:
        self.binding = binding
        self.limit = limit
        self.num_rows = Row(0)
        self._shape = (1, num_kv_heads, head_dim)
        self.layers: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = [
            (self._buffer(0), self._buffer(0)) for _ in range(num_layers)
        ]

    @property
    def capacity(self) -> int:
        """Rows that every layer's buffers hold, also after a growth that failed half-way."""
        return min(key.shape[2] for key, _ in self.layers)

    @property
    def num_bytes(self) -> int:
        """Memory held by all layers."""
        return sum(key.nbytes + value.nbytes for key, value in self.layers)

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

    def _grow_layer(self, i: int, capacity: int) -> None:
        """One layer at a time, so that only one is held twice."""
        key, value = (self._grown(old, capacity) for old in self.layers[i])
        self.layers[i] = (key, value)
        self.binding.share(f"past_key_values.{i}.key", f"present.{i}.key", key)
        self.binding.share(f"past_key_values.{i}.value", f"present.{i}.value", value)

    def commit(self, num_new: int) -> None:
        """Keep `num_new` rows that the graph has just written."""
        self.num_rows = Row(self.num_rows + num_new)

    def crop(self, num_rows: Row) -> None:
        """Forget every row from `num_rows` on."""
        self.num_rows = Row(min(self.num_rows, num_rows))

    def _buffer(self, capacity: int) -> NDArray[np.float32]:
        batch, heads, width = self._shape
        return np.zeros((batch, heads, capacity, width), np.float32)

    def _grown(self, old: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
        new = self._buffer(capacity)
        new[:, :, : self.num_rows] = old[:, :, : self.num_rows]
        return new
