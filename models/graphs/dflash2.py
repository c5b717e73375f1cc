"""What DFlash2 adds to a drafter's layers: the grouped dynamic convolution.

The convolution mixes a block row with its left neighbours only; taps stop at the block's start.
"""

from __future__ import annotations

from ..draft_config import DraftConfig
from . import ops
from .builder import GraphBuilder


class DynamicConv:
    """One convolution pair around a sublayer: `before` its input, `after` its output.

    The coefficients of both sides come from the sublayer's unconvolved input (dflash.md, 2.5).
    """

    def __init__(self, g: GraphBuilder, draft: DraftConfig, name: str, normed: str) -> None:
        assert draft.conv is not None
        self._g = g
        self._taps = draft.conv.kernel_size
        self._groups = draft.hidden_size // draft.conv.group_size
        self._shape = (-1, self._groups, draft.conv.group_size)
        dynamic = ops.linear(g, normed, f"{name}.kernel_projection.weight")
        self._dynamic = self._split(ops.reshape(g, dynamic, -1, 2 * self._taps, self._groups, 1))
        base = ops.reshape(g, g.weight(f"{name}.base_kernel"), 1, 2 * self._taps, *self._shape[1:])
        self._base = self._split(base)

    def before(self, normed: str) -> str:
        """Convolve the sublayer's input [B, H]."""
        return self._convolve(normed, 0)

    def after(self, output: str) -> str:
        """Convolve the sublayer's output [B, H]."""
        return self._convolve(output, self._taps)

    def _split(self, kernels: str) -> list[str]:
        """[rows, 2 * taps, groups, w] to one [rows, groups, w] per side and tap."""
        g, count = self._g, 2 * self._taps
        parts = g.ops("Split", kernels, g.constant([1] * count), count=count, axis=1)
        return [g.op("Squeeze", part, g.constant([1])) for part in parts]

    def _convolve(self, x: str, first: int) -> str:
        g = self._g
        rows = ops.reshape(g, x, *self._shape)
        terms = []
        for tap in range(self._taps):
            kernel = g.op("Add", self._base[first + tap], self._dynamic[first + tap])
            terms.append(g.op("Mul", _shifted(g, rows, tap), kernel))
        total = terms[0]
        for term in terms[1:]:
            total = g.op("Add", total, term)
        return ops.reshape(g, total, -1, self._shape[1] * self._shape[2])


def _shifted(g: GraphBuilder, rows: str, tap: int) -> str:
    """Row t - tap at row t of rows [B, groups, w], zeros before the block."""
    if tap == 0:
        return rows
    padded = g.op("Pad", rows, g.constant([tap, 0, 0, 0, 0, 0]))
    return ops.slice_axis(g, padded, 0, -tap, 0)
