"""A drafter's cache after Ctrl-C in one of its writes: whole rows only, and still in turn."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_onnx.models.positions import Ints, Position
from dflash_onnx.runtime.drafters.draft_cache import FREE, DraftCache
from dflash_onnx.runtime.drafters.rows import Float, HostWriter

COUNT = 3


class Interrupted(BaseException):
    """Like KeyboardInterrupt."""


class BrokenWriter(HostWriter):
    """Raises at one of its writes."""

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def write(self, buffer: Float, rows: Float, slots: Ints) -> None:
        self.writes -= 1
        if not self.writes:
            raise Interrupted
        super().write(buffer, rows, slots)


def append(cache: DraftCache, start: int) -> None:
    """Rows that hold their own position, in two layers."""
    positions = np.arange(start, start + COUNT)
    rows = positions.astype(np.float32).reshape(1, 1, -1, 1)
    cache.append([rows] * 2, [rows] * 2, positions, True)


def held(cache: DraftCache) -> list[int]:
    """Positions in the cache, every row of which must be its own in every layer."""
    cache.check()
    used = np.flatnonzero(cache.positions != FREE)
    assert used.size == cache.num_rows and cache.valid[used].all()
    for store in (*cache.keys, *cache.values):
        np.testing.assert_array_equal(store[0, 0, used, 0], cache.positions[used])
    return sorted(cache.positions[used].tolist())


@pytest.mark.parametrize("writes", range(1, 41))
@pytest.mark.parametrize("window", [None, 16])
def test_an_interrupted_append_leaves_rows_in_turn(window: int | None, writes: int) -> None:
    """The crop that begins the next answer finds the rows that are whole, and later rows drop the
    oldest and no others."""
    cache, start = DraftCache(2, 1, 1, window, BrokenWriter(writes)), 0
    with pytest.raises(Interrupted):
        while True:
            append(cache, start)
            start += COUNT
    cache.crop(Position(start))
    before = held(cache)
    assert before == list(range(start - len(before), start))
    for first in range(start, start + 20 * COUNT, COUNT):
        append(cache, first)
        now = held(cache)
        assert now == list(range(first + COUNT - len(now), first + COUNT))
