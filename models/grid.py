"""Where the patches of an image lie: sizes, grids, position-table weights and rotary angles.

Knows the pixel rules of a checkpoint and the spatial-merge-block order, in which the patches of
one merged row stand next to each other. Knows nothing of pixels' values, files or the network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ExportError, ImageError

MAX_ASPECT_RATIO = 200
SUPPORTED_PREPROCESSING: Mapping[str, object] = {
    "resample": 3,  # Pillow's number for bicubic
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
}


@dataclass(frozen=True)
class ImageConfig:
    """How a checkpoint wants its images: lengths and areas in pixels, colours as RGB in 0..1."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float

    @classmethod
    def from_preprocessor(cls, raw: Mapping[str, Any], where: str) -> ImageConfig:
        """Read a preprocessor_config.json; `ExportError` names the file `where` and the key."""
        _refuse_unsupported(raw, where)
        flat = _with_size_keys(raw, where)
        config = cls(
            patch_size=_count(flat, "patch_size", where),
            merge_size=_count(flat, "merge_size", where),
            temporal_patch_size=_count(flat, "temporal_patch_size", where),
            min_pixels=_pixel_limit(flat, "min_pixels", "shortest_edge", where),
            max_pixels=_pixel_limit(flat, "max_pixels", "longest_edge", where),
            mean=_colour(flat, "image_mean", where),
            std=_colour(flat, "image_std", where, above=0),
            # Released files leave it out: it is the processor class's own, one over 8-bit white.
            rescale_factor=_positive({"rescale_factor": 1 / 255, **flat}, "rescale_factor", where),
        )
        if config.min_pixels > config.max_pixels:
            limits = [config.min_pixels, config.max_pixels]
            raise _bad_value(where, "[min_pixels, max_pixels]", limits, "min_pixels to be smaller")
        return config

    @property
    def factor(self) -> int:
        """Side of the square one merged row covers, in pixels; both sides are multiples of it."""
        return self.patch_size * self.merge_size

    def with_max_pixels(self, max_pixels: int | None) -> ImageConfig:
        """The rules under another area limit in pixels (None: the same); `ImageError` if low."""
        if max_pixels is None:
            return self
        if max_pixels < self.min_pixels:
            raise ImageError(
                f"max_pixels is {max_pixels:,}, below the {self.min_pixels:,} pixels every image "
                f"of this model has; give {self.min_pixels:,} or more."
            )
        return replace(self, max_pixels=max_pixels)


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
    angles = _axis_angles(max(grid.height, grid.width), head_dim // 2, theta)
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


def _axis_angles(length: int, width: int, theta: float) -> NDArray[np.float64]:
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # float32 powers differ between libraries by a last bit, which a far row multiplies; a rounded
    # float64 power is what torch has.
    frequencies = np.float32(1) / np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    return (np.arange(length, dtype=np.float32)[:, None] * frequencies).astype(np.float64)


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    for key, supported in SUPPORTED_PREPROCESSING.items():
        if raw.get(key) is not None and raw[key] != supported:
            raise ExportError(
                f"{where}: '{key}' is {raw[key]!r}, and only {supported!r} is supported; "
                f"a checkpoint trained that way cannot be exported."
            )


def _with_size_keys(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    size = raw.get("size") or {}
    if not isinstance(size, Mapping):
        raise _bad_value(where, "size", size, "an object with shortest_edge and longest_edge")
    return {**raw, **{f"size.{key}": value for key, value in size.items()}}


def _pixel_limit(flat: Mapping[str, Any], limit: str, edge: str, where: str) -> int:
    # The order of transformers: an explicit limit wins over the edges, which also count pixels.
    keys = [limit, f"size.{edge}", f"size.{limit}"]
    given = [key for key in keys if flat.get(key) is not None]
    return _count(flat, given[0] if given else keys[1], where)


def _count(flat: Mapping[str, Any], key: str, where: str) -> int:
    number = _positive(flat, key, where)
    if not number.is_integer():
        raise _bad_value(where, key, number, "a whole number above 0")
    return int(number)


def _positive(flat: Mapping[str, Any], key: str, where: str) -> float:
    value = _required(flat, key, where)
    if not _is_number(value) or value <= 0:
        raise _bad_value(where, key, value, "a number above 0")
    return float(value)


def _colour(
    flat: Mapping[str, Any], key: str, where: str, above: float = -math.inf
) -> tuple[float, float, float]:
    match _required(flat, key, where):
        case [red, green, blue] as value if all(_is_number(v) and v > above for v in value):
            return float(red), float(green), float(blue)
        case other:
            floor = "" if above == -math.inf else f" above {above:g}"
            raise _bad_value(where, key, other, f"three numbers{floor} (red, green, blue)")


def _required(flat: Mapping[str, Any], key: str, where: str) -> Any:
    if flat.get(key) is None:
        raise ExportError(f"{where}: the key '{key}' is missing; add it with the model's value.")
    return flat[key]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bad_value(where: str, key: str, value: object, expected: str) -> ExportError:
    return ExportError(f"{where}: '{key}' is {value!r}; expected {expected}; correct the file.")
