"""Deterministic test inputs in NumPy: pictures, their patches and random drafter features.

Integer arithmetic and uniform draws only, so every machine gets the same bytes and the golden
files can name an input by its seed.
"""

from __future__ import annotations

import numpy as np


def make_image(height: int, width: int, seed: int) -> np.ndarray:
    """Two gradients and a checkerboard with noise on top: uint8 [height, width, 3]."""
    rows, columns = np.mgrid[0:height, 0:width]
    red = rows * 255 // max(height - 1, 1)
    green = columns * 255 // max(width - 1, 1)
    blue = (rows // 8 + columns // 8 + seed) % 2 * 200
    noise = np.random.default_rng(seed).random((height, width, 3)) * 48.0
    image = np.stack([red, green, blue], axis=-1) + noise.astype(np.int64) - 24
    return np.clip(image, 0, 255).astype(np.uint8)


def make_patches(image: np.ndarray, patch: int = 16, merge: int = 2, frames: int = 2) -> np.ndarray:
    """Patches of an image whose sides are multiples of patch * merge, as Qwen-VL orders them.

    Returns float32 [grid_h * grid_w, 3 * frames * patch * patch]: groups of merge x merge patches
    follow each other, and the single picture is repeated for every frame.
    """
    height, width, channels = image.shape
    # 1/255 is folded into mean and std, as in HF's torchvision backend; its Pillow backend rescales
    # first, which differs in the last bit.
    mean_std = np.float32(0.5) * np.float32(255.0)
    pixels = (image.astype(np.float32) - mean_std) / mean_std
    side = patch * merge
    tiles = pixels.reshape(height // side, merge, patch, width // side, merge, patch, channels)
    tiles = tiles.transpose(0, 3, 1, 4, 6, 2, 5)
    tiles = np.repeat(tiles[:, :, :, :, :, None], frames, axis=5)
    return np.ascontiguousarray(tiles.reshape(-1, channels * frames * patch * patch))


def grid_of(image: np.ndarray, patch: int = 16) -> tuple[int, int, int]:
    """The image's `grid_thw` in patches."""
    return 1, image.shape[0] // patch, image.shape[1] // patch


def random_features(seed: int, rows: int, width: int) -> np.ndarray:
    """Float32 [rows, width] of unit variance; fewer rows of one seed are a prefix of more."""
    draws = np.random.default_rng(seed).random((rows, width)) - 0.5
    return (draws * np.sqrt(12.0)).astype(np.float32)
