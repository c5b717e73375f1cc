"""How a checkpoint wants its images prepared, read from its preprocessor_config.json.

Knows sizes, limits and colour statistics; touches no pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import ImageError
from .fields import Fields

SUPPORTED_PREPROCESSING: Mapping[str, object] = {
    "resample": 3,  # Pillow's number for bicubic
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": False,
    "do_pad": False,
}
# Released files leave it out: it is the processor class's own, one over 8-bit white.
RESCALE_FACTOR = 1 / 255


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
        fields = Fields(where, raw, {"rescale_factor": RESCALE_FACTOR})
        for key, supported in SUPPORTED_PREPROCESSING.items():
            fields.refuse(key, supported)
        size = fields.optional_section("size")
        return cls(
            patch_size=fields.integer("patch_size"),
            merge_size=fields.integer("merge_size"),
            temporal_patch_size=fields.integer("temporal_patch_size"),
            min_pixels=_pixel_limit(raw, size, "min_pixels", "shortest_edge", where),
            max_pixels=_pixel_limit(raw, size, "max_pixels", "longest_edge", where),
            mean=_colour(fields, "image_mean"),
            std=_colour(fields, "image_std", above=0.0),
            rescale_factor=fields.number("rescale_factor", above=0.0),
        )._checked(fields)

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

    def _checked(self, fields: Fields) -> ImageConfig:
        if self.min_pixels > self.max_pixels:
            limits = [self.min_pixels, self.max_pixels]
            raise fields.bad("[min_pixels, max_pixels]", "min_pixels to be smaller", limits)
        return self


def _pixel_limit(
    raw: Mapping[str, Any], size: Mapping[str, Any], limit: str, edge: str, where: str
) -> int:
    # The order of transformers: an explicit limit wins over the edges, which also count pixels.
    if raw.get(limit) is not None:
        return Fields(where, raw).integer(limit)
    key = edge if size.get(edge) is not None or size.get(limit) is None else limit
    return Fields(f"{where}, size", size).integer(key)


def _colour(fields: Fields, key: str, above: float = -math.inf) -> tuple[float, float, float]:
    match fields.require(key):
        case [red, green, blue] as value if all(_is_number(v) and v > above for v in value):
            return float(red), float(green), float(blue)
        case other:
            floor = "" if above == -math.inf else f" above {above:g}"
            raise fields.bad(key, f"three numbers{floor} (red, green, blue)", other)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
