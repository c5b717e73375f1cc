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
# Blocks packed at a time, half of those that are read at a time: fewer leave threads waiting for
# each other, more do not stay in a core's cache. Not a power of two, whose rows would lie in the
# same few sets of that cache.
STEP = 8208


class Scratch:
    """Arrays for `count` blocks, a block a column, that are filled again and again.

    What is done to a block is then done to long rows, which is fast.
    """

    def __init__(self, count: int) -> None:
        self.blocks = np.zeros((BLOCK_SIZE, count), np.float32)
        self.levels = np.empty_like(self.blocks)
        self.whole = np.empty((BLOCK_SIZE, count), np.uint8)


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
    scratch = Scratch(min(STEP, len(grouped) + 1))
    for start in range(0, len(grouped), STEP):
        part = slice(start, start + STEP)
        count = len(scales[part])
        scratch.blocks[:, :count] = grouped[part].T
        # Columns beyond the last block hold what was there before, and nobody reads theirs.
        levels, found = pack(scratch)
        packed[part], scales[part] = levels[:, :count].T, found[:count]
    return packed.reshape(-1, blocks, width), scales.reshape(-1, blocks)


def pack_rows(rows: Float) -> tuple[NDArray[np.int8], Float]:
    """Rows [n, K] as signed bytes [n, K] and one scale per row [n]."""
    scales = np.abs(rows).max(axis=-1) / np.float32(127)
    levels = _levels(rows, scales[:, None], 0, (-127, 127), out=np.empty_like(rows))
    return levels.astype(np.int8), scales


def _pack_eight(scratch: Scratch) -> tuple[Bytes, Float]:
    """Blocks [32, n] as bytes [32, n] and scales [n]."""
    scales = np.abs(_peaks(scratch.blocks)) / np.float32(127)
    levels = _levels(scratch.blocks, scales, 128, (0, 255), out=scratch.levels)
    np.copyto(scratch.whole, levels, casting="unsafe")
    return scratch.whole, scales


def _pack_four(scratch: Scratch) -> tuple[Bytes, Float]:
    """Blocks [32, n] as bytes [16, n] and scales [n].

    Levels go from -8 to 7, so the value of largest size stands on the side that has eight.
    """
    plain = _peaks(scratch.blocks) / np.float32(-8)
    values = np.divide(scratch.blocks, _divisors(plain), out=scratch.blocks)
    parts = _best_parts(values, scratch.levels)
    levels = _four_bits(values, np.reciprocal(parts), out=scratch.levels)
    whole = scratch.whole
    np.copyto(whole, np.add(levels, 8, out=levels), casting="unsafe")
    # Two levels a byte, the first in the low half. A product is several times as fast as a shift.
    high = np.multiply(whole[1::2], np.uint8(16), out=whole[1::2])
    return np.bitwise_or(whole[0::2], high, out=high), plain * parts


def _peaks(blocks: Float) -> Float:
    """The value of largest size of each block [32, n], with its sign."""
    highest, lowest = blocks.max(axis=0), blocks.min(axis=0)
    return np.where(highest > -lowest, highest, lowest)


def _divisors(scales: Float) -> Float:
    """Scales to divide by: a block of zeros has scale zero."""
    return np.where(scales == 0, np.float32(1), scales)


def _levels(
    values: Float, scales: Float, zero_point: int, limits: tuple[int, int], out: Float
) -> Float:
    """Nearest levels of values under scales of their own."""
    levels = np.divide(values, _divisors(scales), out=out)
    np.rint(levels, out=levels)
    levels += zero_point
    return np.clip(levels, *limits, out=levels)


def _best_parts(blocks: Float, levels: Float) -> Float:
    """What part of the plain scale each block [32, n], given in plain levels, loses least with.

    Levels q found under any scale have a best scale of their own, <x, q> / <q, q>, which keeps
    <x, q>^2 / <q, q> of the squares. `levels` is overwritten.
    """
    count = blocks.shape[1]
    best, most = np.ones(count, np.float32), np.zeros(count, np.float32)
    for shrink in SHRINKS:
        _four_bits(blocks, np.float32(1 / shrink), out=levels)
        along, size = _products(blocks, levels), _products(levels, levels)
        # A block of zeros has no levels to divide by; any other has one of six at least.
        parts = along / np.maximum(size, 1)
        kept = along * parts
        # Zeros keep nothing under any scale, and theirs is still to be divided by.
        np.putmask(best, kept > most, parts)
        np.maximum(kept, most, out=most)
    return best


def _four_bits(values: Float, factors: Float | np.float32, out: Float) -> Float:
    """Nearest levels of values times their factors."""
    np.multiply(values, factors, out=out)
    return np.clip(np.rint(out, out=out), -8, 7, out=out)


def _products(first: Float, second: Float) -> Float:
    """Inner products of columns, each summed row by row as long as there are two columns."""
    return np.einsum("kn,kn->n", first, second)
