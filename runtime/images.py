"""From any picture a user may hand over to the float patches the vision graph reads.

Knows orientation, transparency, colour modes, damaged files and the arithmetic of the checkpoint's
processor. Knows nothing of tokens, prompts or graphs; sizes and grids come from `models.grid`.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageColor, ImageFile, UnidentifiedImageError

from ..models.errors import ImageError
from ..models.grid import Grid, image_grid
from ..models.image_config import ImageConfig
from .patches import patchify, strips

ImageSource: TypeAlias = "str | Path | bytes | BinaryIO | Image.Image | np.ndarray"

STRIP_PIXELS = 1 << 20
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class PreparedImage:
    """One image for the vision graph: resized picture, grid, sha256 of the original and the grid.

    The float patches, twelve times the picture's size, are made only when they are asked for.
    """

    picture: Image.Image = field(repr=False, compare=False)
    grid: Grid
    config: ImageConfig = field(repr=False)
    digest: str

    @property
    def patches(self) -> NDArray[np.float32]:
        """What the vision graph reads, [n, C*t*p*p]; a new array each time."""
        return patchify(self.picture, self.grid, self.config)


def describe(source: ImageSource) -> str:
    """A name of the image for messages: its path, or its kind and size."""
    if isinstance(source, str | Path):
        return f"Image {str(source)[:200]!r}"
    if isinstance(source, bytes):
        return f"Image of {len(source):,} bytes"
    if isinstance(source, np.ndarray):
        return f"Image array of shape {source.shape} and type {source.dtype}"
    if isinstance(source, ImageFile.ImageFile) and source.filename:
        return f"Image {str(source.filename)[:200]!r}"
    if isinstance(source, Image.Image):
        return f"Image of {source.width} x {source.height} pixels and mode {source.mode}"
    return f"Image from a {type(source).__name__}"


def load_image(source: ImageSource, background: str = "white") -> Image.Image:
    """Upright RGB image (of an animation the first frame), transparency laid on `background`;
    `ImageError` names the image and the reason."""
    name = describe(source)
    colour = _background_colour(background)
    with _pillow_errors(name), _opened(source, name) as image:
        image.load()
        return _to_rgb(_upright(image), colour, name)


def prepare_image(
    source: ImageSource, config: ImageConfig, background: str = "white"
) -> PreparedImage:
    """Patches, grid and digest of one image; `ImageError` if it is unreadable or too narrow."""
    image = load_image(source, background)
    try:
        grid = image_grid(image.height, image.width, config)
    except ImageError as error:
        raise ImageError(f"{describe(source)}: {error}") from error
    digest = _digest(image, grid)
    # One name for both, so that the full-size picture is freed before the patches are made.
    size = (grid.width * config.patch_size, grid.height * config.patch_size)
    image = image.resize(size, Image.Resampling.BICUBIC)
    return PreparedImage(image, grid, config, digest)


@contextmanager
def _pillow_errors(name: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 M pixels and refuses above 178 M; only the refusal is ours.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{name} is no image Pillow knows; give a PNG, JPEG, WebP, GIF, BMP or TIFF file."
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} is too large to open safely: {error} Scale it down.") from error
    # Decoders raise whatever a damaged file leads them to: OSError, SyntaxError, struct.error, ...
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ImageError(f"{name} cannot be read: {reason}; give a complete file.") from error


@contextmanager
def _opened(source: ImageSource, name: str) -> Iterator[Image.Image]:
    if isinstance(source, Image.Image):
        yield source
    elif isinstance(source, np.ndarray):
        yield _from_array(source, name)
    else:
        with _stream(source, name) as stream:
            if not stream.read(1):
                raise ImageError(f"{name} is empty (0 bytes); give a complete image file.")
            stream.seek(0)
            yield Image.open(stream)


def _stream(source: str | Path | bytes | BinaryIO, name: str) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not isinstance(source, str | Path):
        return io.BytesIO(_all_bytes(source, name))
    try:
        return Path(source).open("rb")
    except OSError as error:
        raise ImageError(f"{name} cannot be opened: {error.strerror}; check the path.") from error


def _all_bytes(stream: BinaryIO, name: str) -> bytes:
    try:
        # Like Pillow: a stream just written to stands at its end.
        if stream.seekable():
            stream.seek(0)
        data = stream.read()
    except AttributeError:
        data = None
    if not isinstance(data, bytes):
        raise ImageError(
            f"{name} is not readable as an image; give a path, bytes, a binary stream, a Pillow "
            f"image or a NumPy array."
        )
    return data


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not fits or array.dtype != np.uint8 or array.size == 0:
        raise ImageError(
            f"{name} is not taken; expected uint8 of shape (height, width), (height, width, 3) or "
            f"(height, width, 4), so convert it first."
        )
    return Image.fromarray(array)


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Damaged EXIF data says nothing about the pixels, which are whole.
        return image
    return image.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else image


def _to_rgb(image: Image.Image, colour: tuple[int, ...], name: str) -> Image.Image:
    if image.mode.startswith("I"):
        image = _grey_from_integers(image, name)
    elif image.mode == "F":
        image = _grey_from_floats(image, name)
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        canvas = Image.new("RGBA", image.size, colour)
        image = Image.alpha_composite(canvas, image.convert("RGBA"))
    return image.convert("RGB")


def _grey_from_integers(image: Image.Image, name: str) -> Image.Image:
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise _wrong_grey(name, low, high, 65535)
    # 16 bits keep their high byte, as Pillow reads 16-bit colour; its own conversion may clip.
    # Mode "I" carries 8 bits or 16, and 16-bit pixels all below 256 would be black anyway.
    narrow = image.mode == "I" and high < 256
    return Image.fromarray((values if narrow else values >> 8).astype(np.uint8))


def _grey_from_floats(image: Image.Image, name: str) -> Image.Image:
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    top = 1 if high <= 1 else 255
    if not (low >= 0 and high <= top):  # Written so that not-a-number is refused, too.
        raise _wrong_grey(name, low, high, 255)
    return Image.fromarray(np.rint(values * np.float32(255 / top)).astype(np.uint8))


def _wrong_grey(name: str, low: float, high: float, top: int) -> ImageError:
    return ImageError(
        f"{name} has greys {low:g} to {high:g}, not 0 to {top}; convert it to 8 bits."
    )


def _background_colour(background: str) -> tuple[int, ...]:
    try:
        return (*ImageColor.getrgb(background)[:3], 255)
    except ValueError as error:
        raise ImageError(
            f"Background {background!r} is no colour; give one like 'white' or '#ffffff'."
        ) from error


def _digest(image: Image.Image, grid: Grid) -> str:
    head = f"{image.mode} {image.width}x{image.height} {grid.height}x{grid.width}/{grid.merge}\n"
    digest = hashlib.sha256(head.encode())
    for strip in strips(image, max(1, STRIP_PIXELS // image.width)):
        digest.update(strip.tobytes())
    return digest.hexdigest()
