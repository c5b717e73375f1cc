"""Rotary tables on the host: one-dimensional and interleaved M-RoPE, full or partial width.

No graph sees a position; it gets the cosines and sines made here, one row per query or key.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .rope_config import RopeConfig

Float = NDArray[np.float32]

FIRST_POSITIONS = 1024


@lru_cache(maxsize=16)
def inverse_frequencies(rotary_dim: int, theta: float) -> Float:
    """Inverse frequencies [rotary_dim / 2] in float32."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    # float32 powers differ between libraries by a last bit, which a far row multiplies; a rounded
    # float64 power is what torch has.
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


class RotaryTable:
    """Cosines and sines of one rope; those of text positions are kept and looked up.

    Text has the same position on all axes, so M-RoPE's choice among them does not matter.
    """

    def __init__(self, rope: RopeConfig) -> None:
        self._rope = rope
        # Replaced as a whole, since conversations in several threads grow it.
        self._table = self._text_table(FIRST_POSITIONS)

    def rows(self, positions: NDArray[np.int64]) -> tuple[Float, Float]:
        """Cosines and sines [n, rotary_dim / 2] of positions [n], or of M-RoPE positions [3, n]."""
        if positions.ndim == 2:
            if self._rope.mrope_section is not None and not _is_text(positions):
                return rotary_table(positions, self._rope)
            positions = positions[0]
        # Another thread may replace the table meanwhile, so all looks are at this one.
        table = self._table
        try:
            rows = table.take(positions, axis=0)
        except IndexError:
            last = int(positions.max())
            if last < len(table):
                raise
            table = self._table = self._text_table(max(last + 1, 2 * len(table)))
            rows = table.take(positions, axis=0)
        return rows[:, 0], rows[:, 1]

    def _text_table(self, count: int) -> Float:
        """Cosines and sines [count, 2, rotary_dim / 2] of positions from zero on."""
        return np.stack(rotary_table(np.arange(count), self._rope), axis=1)


def _is_text(positions: NDArray[np.int64]) -> bool:
    """Whether all axes agree; compared as bytes, which is cheap for a block's few rows."""
    return positions[0].tobytes() == positions[1].tobytes() == positions[2].tobytes()


def rotary_table(positions: NDArray[np.int64], rope: RopeConfig) -> tuple[Float, Float]:
    """Cosines and sines [n, rotary_dim / 2] of positions [n], or of M-RoPE positions [3, n]."""
    frequencies = inverse_frequencies(rope.rotary_dim, rope.theta)
    angles = positions[..., None].astype(np.float32) * frequencies
    if positions.ndim == 2:
        angles = _interleave(angles, rope)
    return np.cos(angles), np.sin(angles)


def _interleave(angles: Float, rope: RopeConfig) -> Float:
    """Pick each frequency's axis from [3, n, d]: t h w t h w ..., then t (Qwen3-VL's order)."""
    if rope.mrope_section is None:
        raise ValueError("rotary_table: [3, n] positions need a rope with mrope_section")
    chosen = angles[0].copy()
    for axis in (1, 2):
        columns = slice(axis, 3 * rope.mrope_section[axis], 3)
        chosen[:, columns] = angles[axis][:, columns]
    return chosen
