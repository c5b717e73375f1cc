"""Where the patches of an image lie: sizes, grids, position-table weights and rotary angles.

Knows the size rule and the spatial-merge-block order, in which the patches of
one merged row stand next to each other. Knows nothing of pixels' values, files or the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import ImageError
from .image_config import ImageConfig
from .rope import inverse_frequencies

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class Grid:
    """`height` x `width` patches of one image, `merge` x `merge` of them per merged row."""

    height: int
    width: int
    merge: int

    @property
    def num_patches(self) -> int:
        """Patches the vision network reads."""
        return self.height * self.width

    @property
    def merged_height(self) -> int:
        """Rows of merge blocks, from top to bottom."""
        return self.height // self.merge

    @property
    def merged_width(self) -> int:
        """Columns of merge blocks, from left to right."""
        return self.width // self.merge

    @property
    def num_rows(self) -> int:
        """Rows the image takes in the language model, one per merge block."""
        return self.merged_height * self.merged_width


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Target (height, width) in pixels by the Qwen2-VL rule; `ImageError` for sides over 200:1."""
    _check_sides(height, width)
    sides = (height, width)
    # Python's round takes halves to the even neighbour, and the checkpoints were trained that way.
    target = [round(side / factor) * factor for side in sides]
    area = target[0] * target[1]
    if area > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        target = [max(factor, math.floor(side / shrink / factor) * factor) for side in sides]
    elif area < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        target = [math.ceil(side * grow / factor) * factor for side in sides]
    return target[0], target[1]


def image_grid(height: int, width: int, config: ImageConfig) -> Grid:
    """Grid of an upright image of `height` x `width` pixels; `ImageError` as `smart_resize`."""
    target = smart_resize(height, width, config.factor, config.min_pixels, config.max_pixels)
    return Grid(target[0] // config.patch_size, target[1] // config.patch_size, config.merge_size)


def position_table_lookup(grid: Grid, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Corners [n, 4] in a flat `side` x `side` table and their bilinear weights [n, 4]."""
    rows, columns = _patch_coordinates(grid)
    row_taps, row_weights = _axis_taps(grid.height, side)
    column_taps, column_weights = _axis_taps(grid.width, side)
    indices = row_taps[rows, :, None] * side + column_taps[columns, None, :]
    weights = row_weights[rows, :, None] * column_weights[columns, None, :]
    return indices.reshape(-1, 4), weights.reshape(-1, 4)


def axial_rotary(
    grid: Grid, head_dim: int, theta: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rotary (cos, sin), each [n, head_dim // 2]: angles of the row first, then of the column."""
    rows, columns = _patch_coordinates(grid)
    lines = np.arange(max(grid.height, grid.width), dtype=np.float32)
    angles = (lines[:, None] * inverse_frequencies(head_dim // 2, theta)).astype(np.float64)
    # Cosines rounded from float64 are the same on every machine; one table per axis is cheap.
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return (
        np.concatenate((cos[rows], cos[columns]), axis=1),
        np.concatenate((sin[rows], sin[columns]), axis=1),
    )


def _check_sides(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise ImageError(f"The image is {width} x {height} pixels; give one with pixels in it.")
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ImageError(
            f"The image is {width} x {height} pixels, one side {ratio:.1f} times the other; the "
            f"model takes at most {MAX_ASPECT_RATIO} times, so crop or split the image."
        )


def _patch_coordinates(grid: Grid) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    raster = np.arange(grid.num_patches, dtype=np.int64)
    blocks = raster.reshape(grid.merged_height, grid.merge, grid.merged_width, grid.merge)
    return np.divmod(blocks.transpose(0, 2, 1, 3).reshape(-1), grid.width)


def _axis_taps(length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    # float32 and 1 - |distance| throughout, since the reference rounds at these very places.
    source = np.arange(length, dtype=np.float32) * np.float32(side - 1)
    source /= np.float32(max(length - 1, 1))
    floor = np.floor(source)
    distances = np.abs((source - floor)[:, None] - np.arange(2, dtype=np.float32))
    taps = floor.astype(np.int64)[:, None] + np.arange(2)
    return taps.clip(0, side - 1), 1 - distances
