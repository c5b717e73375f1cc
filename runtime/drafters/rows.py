"""Writing new rows into a cache buffer: plainly in host memory, or by the bundle's append graph."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.positions import Ints
from ..session import Graph

Float = NDArray[np.float32]


class RowWriter(Protocol):
    """Writes rows [1, heads, n, d] at `slots` [n] of a buffer [1, heads, slots, d], in place."""

    def write(self, buffer: Float, rows: Float, slots: Ints) -> None:
        """Write the rows."""


class HostWriter:
    """NumPy writes, for caches in host memory."""

    def write(self, buffer: Float, rows: Float, slots: Ints) -> None:
        """Write the rows; a run of slots is one plain copy."""
        first, last = slots[0], slots[-1]
        run = last - first + 1 == slots.size
        buffer[:, :, slice(first, last + 1) if run else slots] = rows


class GraphWriter:
    """The append graph with input and output bound to one buffer, for caches on a device."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def write(self, buffer: Float, rows: Float, slots: Ints) -> None:
        """Write the rows; the graph scatters them into the shared buffer."""
        binding = self._graph.bind()
        binding.share("cache", "present", buffer)
        binding.feed("new", rows)
        binding.feed("row_numbers", slots)
        binding.run(())
