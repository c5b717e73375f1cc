"""What models/image_config.py takes from a preprocessor_config.json, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_onnx.models.errors import ExportError, ImageError
from dflash_onnx.models.image_config import ImageConfig

RAW: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.5, 1],
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 4194304},
}
REQUIRED = ["image_mean", "image_std", "patch_size", "merge_size"]


def _config(**changes: Any) -> ImageConfig:
    return ImageConfig.from_preprocessor({**RAW, **changes}, "preprocessor_config.json")


def test_config_takes_every_value_from_the_file() -> None:
    """The file is the only source of numbers.
    Both edges count pixels, not lengths."""
    config = _config()
    assert (config.min_pixels, config.max_pixels, config.factor) == (65536, 4194304, 32)
    assert config.std == (0.25, 0.5, 1.0)
    assert config.rescale_factor == 0.00392156862745098


@pytest.mark.parametrize(
    "changes",
    [
        {"size": None, "min_pixels": 100, "max_pixels": 900},
        {"size": {"min_pixels": 100, "max_pixels": 900}},
        {"min_pixels": 100, "max_pixels": 900},
        {"size": {"shortest_edge": 100, "longest_edge": 900}, "min_pixels": None},
    ],
)
def test_pixel_limits_have_three_spellings(changes: dict[str, Any]) -> None:
    """Checkpoints of three years spell the same two limits differently.
    A limit at the top level wins over the edges, as in transformers."""
    config = _config(**changes)
    assert (config.min_pixels, config.max_pixels) == (100, 900)


@pytest.mark.parametrize("key", [*REQUIRED, "temporal_patch_size", "size"])
def test_a_missing_key_is_named(key: str) -> None:
    """A default standing for a checkpoint's value would run and read badly.
    The message names the file and the key instead."""
    with pytest.raises(
        ExportError, match=rf"^preprocessor_config.json.* has no '({key}|shortest_edge)'"
    ):
        _config(**{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_size", 0),
        ("patch_size", True),
        ("merge_size", "2"),
        ("temporal_patch_size", 1.5),
        ("image_mean", 0.5),
        ("image_mean", [0.5, 0.5]),
        ("image_std", [0.5, 0.5, 0]),
        ("rescale_factor", float("nan")),
        ("size", [1, 2]),
        ("max_pixels", -1),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object) -> None:
    """A value of another type or range would fail far away, in a graph.
    It is refused where it is read, with what was expected."""
    with pytest.raises(ExportError, match=rf"preprocessor_config.json.*: '{key}' must be "):
        _config(**{key: value})


def test_released_files_leave_out_the_rescale_factor() -> None:
    """Published Qwen3-VL files have neither rescale_factor nor do_*: the class's own holds."""
    raw = {k: v for k, v in RAW.items() if not k.startswith("do_") and k != "resample"}
    del raw["rescale_factor"]
    config = ImageConfig.from_preprocessor(raw, "preprocessor_config.json")
    assert config.rescale_factor == 1 / 255


def test_crossed_pixel_limits_are_refused() -> None:
    """With a minimum above the maximum no image has a size.
    Both numbers are in the message."""
    with pytest.raises(ExportError, match="900.*100"):
        _config(min_pixels=900, max_pixels=100)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resample", 2),
        ("do_resize", False),
        ("do_rescale", False),
        ("do_normalize", False),
        ("do_convert_rgb", False),
        ("do_center_crop", True),
        ("do_pad", True),
    ],
)
def test_unsupported_preprocessing_is_refused_by_name(key: str, value: object) -> None:
    """Another resampling filter changes every pixel a little and no one notices.
    What is not done here is refused, never ignored."""
    with pytest.raises(ExportError, match=f"{key}={value!r}, which is not supported"):
        _config(**{key: value})


def test_pixel_cap_of_the_user() -> None:
    """A user lowers the cap to save memory; None leaves the model's own.
    A cap below the model's smallest image cannot be met and says so."""
    config = _config()
    assert config.with_max_pixels(None) == config
    assert config.with_max_pixels(100_000).max_pixels == 100_000
    assert config.with_max_pixels(100_000).min_pixels == config.min_pixels
    with pytest.raises(ImageError, match="65,535.*65,536"):
        config.with_max_pixels(65_535)
