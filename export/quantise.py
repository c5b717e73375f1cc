"""Packing float matrices into quantised forms, a few rows at a time.

Rounds to the nearest level; 4-bit blocks search the scale that loses least. Knows no files.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..models.precision import BLOCK_SIZE, BLOCKED

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Scales tried for a 4-bit block, as parts of the one that holds its largest value.
SHRINKS = np.array([1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7], np.float32)


def packed_width(form: str, columns: int) -> tuple[int, int]:
    """Blocks per row of a blocked form, and bytes per block; a last block is padded with zeros."""
    return -(-columns // BLOCK_SIZE), BLOCK_SIZE * BLOCKED[form] // 8


def pack_blocks(rows: Float, form: str) -> tuple[Bytes, Float]:
    """Rows [n, K] as bytes [n, blocks, bytes per block] and scales [n, blocks]."""
    blocks, _ = packed_width(form, rows.shape[1])
    padding = blocks * BLOCK_SIZE - rows.shape[1]
    grouped = np.pad(rows, ((0, 0), (0, padding))).reshape(len(rows), blocks, BLOCK_SIZE)
    if form == "int8":
        scales = np.abs(grouped).max(axis=-1) / np.float32(127)
        return _levels(grouped, scales, 128, 255).astype(np.uint8), scales
    scales = _best_scales(grouped)
    levels = _levels(grouped, scales, 8, 15)
    # Two levels a byte, the first in the low half.
    return (levels[..., 0::2] + 16 * levels[..., 1::2]).astype(np.uint8), scales


def pack_rows(rows: Float) -> tuple[NDArray[np.int8], Float]:
    """Rows [n, K] as signed bytes [n, K] and one scale per row [n]."""
    scales = np.abs(rows).max(axis=-1) / np.float32(127)
    return _levels(rows, scales, 0, 127).astype(np.int8), scales


def _levels(values: Float, scales: Float, zero_point: int, largest: int) -> Float:
    """Nearest levels of values [..., K] under scales [...]; a block of zeros has scale zero."""
    safe = np.where(scales == 0, np.float32(1), scales)[..., None]
    lowest = 0 if zero_point else -largest
    return np.clip(np.rint(values / safe) + zero_point, lowest, largest)


def _best_scales(blocks: Float) -> Float:
    """The 4-bit scale of each block that loses least in squares, among shrunken ones.

    Levels go from -8 to 7, so the value of largest size stands on the side that has eight.
    """
    widest = np.abs(blocks).argmax(axis=-1)
    peak = np.take_along_axis(blocks, widest[..., None], axis=-1)[..., 0]
    best, least = peak / np.float32(-8), np.full(peak.shape, np.inf, np.float32)
    for shrink in SHRINKS:
        scales = peak * shrink / np.float32(-8)
        restored = (_levels(blocks, scales, 8, 15) - 8) * scales[..., None]
        lost = np.square(restored - blocks).sum(axis=-1)
        best = np.where(lost < least, scales, best)
        least = np.minimum(lost, least)
    return best
