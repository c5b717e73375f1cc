"""Pixels to float patches, with the very roundings of the checkpoint's processor.

Knows the patch order and colour arithmetic; knows no files and no colour modes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..models.grid import Grid
from ..models.image_config import ImageConfig


def strips(image: Image.Image, rows: int) -> Iterator[NDArray[np.uint8]]:
    """The picture from top to bottom, `rows` pixel rows [rows, width, 3] at a time."""
    # Pieces, because one array of the whole picture would cost its size twice over.
    for top in range(0, image.height, rows):
        yield np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))


def patchify(image: Image.Image, grid: Grid, config: ImageConfig) -> NDArray[np.float32]:
    """Rescaled, normalised patches [n, C*t*p*p] of a picture that has the grid's size."""
    side, merge, copies = config.patch_size, config.merge_size, config.temporal_patch_size
    levels = _levels(config)
    blocks = np.empty(
        (grid.merged_height, grid.merged_width, merge, merge, 3, copies, side, side), np.float32
    )
    for row, strip in zip(blocks, strips(image, config.factor), strict=True):
        pixels = strip.reshape(merge, side, grid.merged_width, merge, side, 3)
        pixels = pixels.transpose(5, 2, 0, 3, 1, 4)
        for channel in range(3):
            row[:, :, :, channel] = levels[channel][pixels[channel]][:, :, :, None]
    return blocks.reshape(grid.num_patches, -1)


def _levels(config: ImageConfig) -> NDArray[np.float32]:
    # A byte has 256 values: a table [3, 256] gives the processor's own roundings (float64 product,
    # then float32) without float64 pictures.
    scaled = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
    mean, std = (np.array(values, np.float32)[:, None] for values in (config.mean, config.std))
    return (scaled - mean) / std
