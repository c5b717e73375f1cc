"""The rules of models/grid.py against literal values and loops written out here.

Needs neither torch nor transformers; the live comparison is in tests/parity.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_onnx.models.errors import ImageError
from dflash_onnx.models.grid import (
    Grid,
    axial_rotary,
    image_grid,
    position_table_lookup,
    smart_resize,
)
from dflash_onnx.models.image_config import ImageConfig

CONFIG = ImageConfig(16, 2, 2, 65536, 4194304, (0.5,) * 3, (0.5,) * 3, 1 / 255)


def _naive_order(grid: Grid) -> list[tuple[int, int]]:
    merge = grid.merge
    return [
        (block_row * merge + row, block_column * merge + column)
        for block_row in range(grid.height // merge)
        for block_column in range(grid.width // merge)
        for row in range(merge)
        for column in range(merge)
    ]


@pytest.mark.parametrize(
    ("height", "width", "merged", "rows"),
    [
        (1000, 1500, (31, 47), 1457),
        (1500, 1000, (47, 31), 1457),
        (3000, 4000, (55, 73), 4015),
        (1, 1, (8, 8), 64),
        (305, 30, (26, 3), 78),
    ],
)
def test_known_sizes(height: int, width: int, merged: tuple[int, int], rows: int) -> None:
    """A 1000 x 1500 photo takes 1457 rows and a 12 megapixel one 4015 (llama.cpp#28587).
    Swapped axes would give the same count, so the sides are checked, too."""
    grid = image_grid(height, width, CONFIG)
    assert (grid.merged_height, grid.merged_width) == merged
    assert grid.num_rows == rows
    assert grid.num_patches == 4 * rows


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (80, 112, (64, 128)),  # 2.5 and 3.5 rows: halves go to the even neighbour
        (81, 111, (96, 96)),
        (64, 96, (64, 96)),
        (10, 10, (32, 32)),
        (300, 300, (256, 256)),
        (32, 3200, (32, 2560)),
        (5, 1000, (32, 480)),
    ],
)
def test_smart_resize_literals(height: int, width: int, expected: tuple[int, int]) -> None:
    """Rounding half up instead of half to even moves 80 to 96 and shifts every later position.
    The other sizes sit at the lower limit, the upper limit and between."""
    assert smart_resize(height, width, 32, 1024, 65536) == expected


def test_aspect_ratio_of_200_is_the_last_one_taken() -> None:
    """A strip of 1093 x 5 pixels was a server error elsewhere (omlx#3529).
    Exactly 200 passes, more is refused with both numbers."""
    assert smart_resize(1000, 5, 32, 1024, 65536) == (480, 32)
    with pytest.raises(ImageError, match=r"1093 x 5 .*218\.6.*200"):
        smart_resize(5, 1093, 32, 1024, 65536)
    with pytest.raises(ImageError, match="0 x 5"):
        smart_resize(5, 0, 32, 1024, 65536)


def test_random_sizes_keep_the_limits() -> None:
    """Whatever the size, both sides are multiples of the factor.
    The area stays within the limits unless a side is already one factor long."""
    for height, width in np.random.default_rng(3).integers(1, 5000, (500, 2)).tolist():
        if max(height, width) > 200 * min(height, width):
            continue
        tall, wide = smart_resize(height, width, 32, 4096, 65536)
        assert tall % 32 == wide % 32 == 0 < min(tall, wide)
        assert tall * wide >= 4096
        assert tall * wide <= 65536 or min(tall, wide) == 32


def test_position_lookup_literals() -> None:
    """Four patches a side over a table of seven: every patch falls on a table entry.
    The order is one 2 x 2 block after the other, not line by line."""
    indices, weights = position_table_lookup(Grid(4, 4, 2), 7)
    assert indices.dtype == np.int64 and weights.dtype == np.float32
    assert indices[:6, 0].tolist() == [0, 2, 14, 16, 4, 6]
    assert indices[0].tolist() == [0, 1, 7, 8]
    np.testing.assert_array_equal(weights, np.tile(np.float32([1, 0, 0, 0]), (16, 1)))


@pytest.mark.parametrize("grid", [Grid(2, 2, 2), Grid(6, 10, 2), Grid(9, 3, 3), Grid(1, 5, 1)])
def test_position_lookup_equals_a_loop(grid: Grid) -> None:
    """Resampling with corners aligned, written out patch by patch in float64.
    Sizes of one patch keep the first corner and divide by no zero."""
    table = np.random.default_rng(0).random((5, 5))
    indices, weights = position_table_lookup(grid, 5)
    for patch, (row, column) in enumerate(_naive_order(grid)):
        y, x = row * 4 / max(grid.height - 1, 1), column * 4 / max(grid.width - 1, 1)
        top, left = min(int(y), 3), min(int(x), 3)
        down, right = y - top, x - left
        upper = table[top, left] * (1 - right) + table[top, left + 1] * right
        lower = table[top + 1, left] * (1 - right) + table[top + 1, left + 1] * right
        expected = upper * (1 - down) + lower * down
        found = (table.reshape(-1)[indices[patch]] * weights[patch]).sum()
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("grid", [Grid(2, 2, 2), Grid(8, 6, 2), Grid(3, 6, 3)])
def test_rotary_equals_a_loop(grid: Grid) -> None:
    """The first half of the angles follows the row of a patch, the second its column.
    Swapped halves would still have the right shape."""
    cos, sin = axial_rotary(grid, 16, 10000.0)
    assert cos.shape == sin.shape == (grid.num_patches, 8)
    assert cos.dtype == sin.dtype == np.float32
    for patch, place in enumerate(_naive_order(grid)):
        angles = [side / 10000.0 ** (step / 8) for side in place for step in (0, 2, 4, 6)]
        assert cos[patch] == pytest.approx([math.cos(angle) for angle in angles], abs=1e-6)
        assert sin[patch] == pytest.approx([math.sin(angle) for angle in angles], abs=1e-6)
