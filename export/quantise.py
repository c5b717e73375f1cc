"""Packing float matrices into quantised forms, a few rows at a time.

Rounds to the nearest level; 4-bit blocks search the scale that loses least. Knows no files. Every
block is computed alone, so the result does not depend on how many come at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..models.precision import BLOCK_SIZE, BLOCKED

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Scales that levels of a 4-bit block are tried with, as parts of the one its largest value needs.
SHRINKS = (1.0, 0.93, 0.86)
# Blocks packed at a time, so that the scratch stays in a core's cache.
STEP = 4096


def packed_width(form: str, columns: int) -> tuple[int, int]:
    """Blocks per row of a blocked form, and bytes per block; a last block is padded with zeros."""
    return -(-columns // BLOCK_SIZE), BLOCK_SIZE * BLOCKED[form] // 8


def pack_blocks(rows: Float, form: str) -> tuple[Bytes, Float]:
    """Rows [n, K] as bytes [n, blocks, bytes per block] and scales [n, blocks]."""
    blocks, width = packed_width(form, rows.shape[1])
    padding = blocks * BLOCK_SIZE - rows.shape[1]
    padded = np.pad(rows, ((0, 0), (0, padding))) if padding else rows
    grouped = padded.reshape(-1, BLOCK_SIZE)
    packed = np.empty((len(grouped), width), np.uint8)
    scales = np.empty(len(grouped), np.float32)
    pack = _pack_four if form == "int4" else _pack_eight
    # A block a column: what is done to a block is then done to long rows, which is fast.
    columns = np.zeros((BLOCK_SIZE, min(STEP, len(grouped) + 1)), np.float32)
    for start in range(0, len(grouped), STEP):
        part = slice(start, start + STEP)
        count = len(scales[part])
        columns[:, :count] = grouped[part].T
        # Columns beyond the last block hold what was there before, and nobody reads theirs.
        levels, found = pack(columns)
        packed[part], scales[part] = levels[:, :count].T, found[:count]
    return packed.reshape(-1, blocks, width), scales.reshape(-1, blocks)


def pack_rows(rows: Float) -> tuple[NDArray[np.int8], Float]:
    """Rows [n, K] as signed bytes [n, K] and one scale per row [n]."""
    scales = np.abs(rows).max(axis=-1) / np.float32(127)
    return _levels(rows, scales[:, None], 0, (-127, 127)).astype(np.int8), scales


def _pack_eight(blocks: Float) -> tuple[Bytes, Float]:
    """Blocks [32, n] as bytes [32, n] and scales [n]."""
    scales = np.abs(_peaks(blocks)) / np.float32(127)
    return _levels(blocks, scales, 128, (0, 255)).astype(np.uint8), scales


def _pack_four(blocks: Float) -> tuple[Bytes, Float]:
    """Blocks [32, n] as bytes [16, n] and scales [n].

    Levels go from -8 to 7, so the value of largest size stands on the side that has eight.
    """
    plain = _peaks(blocks) / np.float32(-8)
    values = blocks / _divisors(plain)
    parts = _best_parts(values)
    levels = _four_bits(values, np.reciprocal(parts), out=values).astype(np.int8) + np.int8(8)
    # Two levels a byte, the first in the low half.
    packed: NDArray[np.int8] = levels[0::2] | (levels[1::2] << np.int8(4))
    return packed.view(np.uint8), plain * parts


def _peaks(blocks: Float) -> Float:
    """The value of largest size of each block [32, n], with its sign."""
    highest, lowest = blocks.max(axis=0), blocks.min(axis=0)
    return np.where(highest > -lowest, highest, lowest)


def _divisors(scales: Float) -> Float:
    """Scales to divide by: a block of zeros has scale zero."""
    return np.where(scales == 0, np.float32(1), scales)


def _levels(values: Float, scales: Float, zero_point: int, limits: tuple[int, int]) -> Float:
    """Nearest levels of values under scales of their own."""
    levels = values / _divisors(scales)
    np.rint(levels, out=levels)
    levels += zero_point
    return np.clip(levels, *limits, out=levels)


def _best_parts(blocks: Float) -> Float:
    """What part of the plain scale each block [32, n], given in plain levels, loses least with.

    Levels q found under any scale have a best scale of their own, <x, q> / <q, q>, which keeps
    <x, q>^2 / <q, q> of the squares.
    """
    best, most, levels = np.float32(1), np.float32(-1), np.empty_like(blocks)
    for shrink in SHRINKS:
        _four_bits(blocks, np.float32(1 / shrink), out=levels)
        along, size = _products(blocks, levels), _products(levels, levels)
        # A block of zeros has no levels to divide by; any other has one of six at least.
        parts = along / np.maximum(size, 1)
        kept = along * parts
        best = np.where(kept > most, parts, best)
        most = np.maximum(kept, most)
    # That of zeros is still to be divided by.
    return np.where(most > 0, best, np.float32(1))


def _four_bits(values: Float, factors: Float | np.float32, out: Float) -> Float:
    """Nearest levels of values times their factors."""
    np.multiply(values, factors, out=out)
    return np.clip(np.rint(out, out=out), -8, 7, out=out)


def _products(first: Float, second: Float) -> Float:
    """Inner products of columns, each summed row by row as long as there are two columns."""
    return np.einsum("kn,kn->n", first, second)
