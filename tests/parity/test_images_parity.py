"""Grids, position inputs and patches against the installed transformers, run live.

Knows which transformers functions are the reference. Does not know the literal values of the
rules, which tests/models/test_grid.py writes down.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_onnx.models.errors import ImageError
from dflash_onnx.models.grid import (
    Grid,
    axial_rotary,
    position_table_lookup,
    smart_resize,
)
from dflash_onnx.models.image_config import ImageConfig
from dflash_onnx.runtime.images import prepare_image

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from transformers import vision_utils  # noqa: E402
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as reference  # noqa: E402
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig  # noqa: E402
from transformers.models.qwen3_vl.modeling_qwen3_vl import (  # noqa: E402
    Qwen3VLVisionRotaryEmbedding,
)

pytestmark = pytest.mark.parity

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN3 = ImageConfig(16, 2, 2, 4096, 65536, HALF, HALF, 0.00392156862745098)
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3-large": replace(QWEN3, min_pixels=65536, max_pixels=16777216),
    "qwen2": ImageConfig(14, 2, 2, 3136, 1003520, CLIP_MEAN, CLIP_STD, 1 / 255),
    "odd": ImageConfig(8, 3, 1, 576, 30000, CLIP_MEAN, HALF, 1 / 127.5),
}
SIZES = [(1, 1), (30, 305), (305, 30), (64, 64), (333, 477), (1000, 1500), (5, 1000), (2, 400)]
GRIDS = [(2, 2), (2, 4), (8, 6), (62, 94), (110, 146), (300, 300), (2, 300)]


def _processor(config: ImageConfig) -> reference.Qwen2VLImageProcessorPil:
    return reference.Qwen2VLImageProcessorPil(
        size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        patch_size=config.patch_size,
        merge_size=config.merge_size,
        temporal_patch_size=config.temporal_patch_size,
        image_mean=list(config.mean),
        image_std=list(config.std),
        rescale_factor=config.rescale_factor,
    )


def _picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_patches_equal_the_processor_bit_for_bit(name: str, size: tuple[int, int]) -> None:
    """The table of 256 levels per channel is the processor's float64 arithmetic, rounding and all.
    Eight sizes under four configurations leave no difference."""
    pixels = _picture(*size)
    expected = _processor(CONFIGS[name])(
        [pixels], return_tensors="np", input_data_format="channels_last"
    )
    ours = prepare_image(pixels, CONFIGS[name])
    assert [1, ours.grid.height, ours.grid.width] == expected["image_grid_thw"][0].tolist()
    np.testing.assert_array_equal(ours.patches, expected["pixel_values"])


def test_smart_resize_equals_the_reference_on_many_sizes() -> None:
    """Half-even rounding and the two square roots decide sizes at the edges of the limits.
    2000 sizes and four configurations agree, refusals included."""
    generator = np.random.default_rng(7)
    sizes = np.exp(generator.uniform(0, np.log(9000), (2000, 2))).astype(int).tolist()
    for height, width in sizes:
        for config in CONFIGS.values():
            rule = (config.factor, config.min_pixels, config.max_pixels)
            try:
                expected = reference.smart_resize(height, width, *rule)
            except ValueError:
                with pytest.raises(ImageError):
                    smart_resize(height, width, *rule)
            else:
                assert smart_resize(height, width, *rule) == expected


@pytest.mark.parametrize("side", [4, 16, 48])
@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("size", GRIDS)
def test_position_lookup_equals_vision_utils(size: tuple[int, int], merge: int, side: int) -> None:
    """A learned table is resampled to the grid, and a wrong corner shifts every patch.
    Indices and weights are the same numbers."""
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *size]]),
        side,
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=merge,
    )
    ours = position_table_lookup(Grid(*size, merge), side)
    np.testing.assert_array_equal(ours[0], indices.numpy())
    np.testing.assert_array_equal(ours[1], weights.numpy())


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [32, 64, 72, 80])
@pytest.mark.parametrize("size", GRIDS)
def test_rotary_equals_qwen3_vl(size: tuple[int, int], head_dim: int, theta: float) -> None:
    """A frequency one bit off turns a far row by 1e-5, so the powers are rounded as torch does.
    Cosines and sines then agree to a float32 bit at any row below 300."""
    config = Qwen3VLVisionConfig(
        hidden_size=head_dim * 2,
        num_heads=2,
        rope_parameters={"rope_type": "axial", "rope_theta": theta},
    )
    positions = vision_utils.get_vision_position_ids(torch.tensor([[1, *size]]), 2)
    expected = Qwen3VLVisionRotaryEmbedding(config)(torch.zeros(1), positions)
    for ours, theirs in zip(axial_rotary(Grid(*size, 2), head_dim, theta), expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs[:, : head_dim // 2].numpy(), rtol=0, atol=1e-6)
