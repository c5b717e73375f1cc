"""Reading and preparing images: orientation, colour modes, damaged files and patch values.

Expected arrays are written out or computed here in plain NumPy; nothing but Pillow is needed.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dflash_onnx.models.errors import ImageError
from dflash_onnx.models.image_config import ImageConfig
from dflash_onnx.runtime.images import describe, load_image, prepare_image

HALF = (0.5, 0.5, 0.5)
CONFIG = ImageConfig(16, 2, 2, 1024, 65536, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 1 / 255)
RGB = np.random.default_rng(5).integers(0, 256, (96, 64, 3), dtype=np.uint8)
ALPHA = np.tile(np.uint8([[0, 255], [255, 0]]), (48, 32))


def _encode(image: Image.Image | np.ndarray, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _pixels(source: Any, background: str = "white") -> np.ndarray:
    image = load_image(source, background)
    assert image.mode == "RGB"
    return np.asarray(image)


def _png_of_size(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    return start + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["png", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_eight_orientations_are_one_picture(orientation: int, kind: str) -> None:
    """Phones store the sensor's picture and a number; ignoring it swaps the axes of the grid.
    TIFF files are turned by Pillow itself and must not be turned twice."""
    stored = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: RGB.transpose(1, 0, 2),
        6: RGB.transpose(1, 0, 2)[::-1],
        7: RGB[::-1, ::-1].transpose(1, 0, 2),
        8: RGB.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _encode(np.ascontiguousarray(stored), kind, exif=exif)
    np.testing.assert_array_equal(_pixels(data), RGB)
    np.testing.assert_array_equal(_pixels(Image.open(io.BytesIO(data))), RGB)
    assert prepare_image(data, CONFIG) == prepare_image(RGB, CONFIG)


def test_damaged_exif_does_not_hide_the_picture() -> None:
    """Some cameras write EXIF data that no one can parse.
    The pixels are whole, so they are read as they lie."""
    data = _encode(RGB, "png", exif=b"Exif\x00\x00no tiff header")
    np.testing.assert_array_equal(_pixels(data), RGB)


def _transparent(kind: str) -> bytes:
    if kind == "grey":
        grey = np.dstack([RGB[:, :, 0], ALPHA])
        return _encode(Image.fromarray(grey, "LA"), "png")
    if kind == "palette":
        image = Image.fromarray(np.where(ALPHA == 255, RGB[:, :, 0] // 2, 255).astype(np.uint8))
        image = image.convert("P")
        image.putpalette([value for i in range(256) for value in (i, 255 - i, 7)])
        return _encode(image, "png", transparency=255)
    options = {"lossless": True, "exact": True} if kind == "webp" else {}
    return _encode(np.dstack([RGB, ALPHA]), kind, **options)


def _flattened(kind: str) -> np.ndarray:
    if kind == "grey":
        colours = np.repeat(RGB[:, :, :1], 3, axis=2)
    elif kind == "palette":
        index = RGB[:, :, 0] // 2
        colours = np.dstack([index, 255 - index, np.full_like(index, 7)])
    else:
        colours = RGB
    return np.where(ALPHA[:, :, None] == 255, colours, np.uint8(255))


@pytest.mark.parametrize("kind", ["png", "webp", "grey", "palette"])
def test_transparent_images_equal_the_flattened_file(kind: str) -> None:
    """Hidden pixels hold any colour, and dropping alpha shows it to the model.
    They show the background, as if the file had been saved without transparency."""
    flat = _flattened(kind)
    np.testing.assert_array_equal(_pixels(_transparent(kind)), flat)
    assert prepare_image(_transparent(kind), CONFIG) == prepare_image(_encode(flat, "png"), CONFIG)


def test_background_is_a_choice() -> None:
    """White text on nothing vanishes on white (RapidOCR#158), so the background can be chosen.
    Half-transparent pixels mix; a word that is no colour is refused."""
    text = np.zeros((4, 4, 4), np.uint8) + np.uint8([255, 255, 255, 51])
    assert _pixels(text).tolist() == [[[255] * 3] * 4] * 4
    assert _pixels(text, "black").tolist() == [[[51] * 3] * 4] * 4
    assert _pixels(text, "#ff0000")[0, 0].tolist() == [255, 51, 51]
    with pytest.raises(ImageError, match="'whiteish'"):
        load_image(text, "whiteish")


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_sixteen_bit_grey_keeps_its_range(kind: str) -> None:
    """Scanners write 16-bit grey; a plain conversion clips everything above 255 to white.
    The high byte keeps the whole range."""
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    expected = np.repeat(levels.astype(np.uint8)[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(_pixels(_encode(levels * 257, kind)), expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.int32([[0, 128, 255]]), [0, 128, 255]),
        (np.int32([[0, 32768, 65535]]), [0, 128, 255]),
        (np.float32([[0, 0.5, 1]]), [0, 128, 255]),
        (np.float32([[0, 127.6, 255]]), [0, 128, 255]),
    ],
)
def test_wide_grey_is_brought_to_eight_bits(values: np.ndarray, expected: list[int]) -> None:
    """Modes I and F come with 8 bits, 16 bits or 0..1.
    Each known range lands on 0..255."""
    assert _pixels(Image.fromarray(values))[0, :, 0].tolist() == expected


@pytest.mark.parametrize("values", [[-1, 5], [0, 70000], [float("nan"), 1.0], [0.0, 256.5]])
def test_wide_grey_outside_every_range_is_refused(values: list[float]) -> None:
    """Clipping measurements to white would look like an answer.
    The message gives the range that was found."""
    grey = np.array([values], np.int32 if isinstance(values[0], int) else np.float32)
    with pytest.raises(ImageError, match="has greys .* convert"):
        load_image(Image.fromarray(grey))


def test_print_colours_and_bitmaps() -> None:
    """Print shops send CMYK, fax machines one bit per pixel.
    Both become plain RGB."""
    inks = np.uint8([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 255, 255, 0], [0, 0, 0, 255]]])
    data = _encode(Image.fromarray(inks, "CMYK"), "tiff")
    assert _pixels(data)[0].tolist() == [[255] * 3, [0, 255, 255], [255, 0, 0], [0, 0, 0]]
    bits = Image.fromarray(np.uint8([[0, 255, 255]])).convert("1")
    assert _pixels(_encode(bits, "png"))[0, :, 1].tolist() == [0, 255, 255]


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    """A sticker or screen recording has many frames, the model reads one.
    It is the first."""
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "webp" else {}
    data = _encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert _pixels(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("shape", [(32, 48), (32, 48, 3), (32, 48, 4)])
def test_arrays_are_images(shape: tuple[int, ...]) -> None:
    """Video frames and screenshots arrive as arrays, often as views with a stride.
    They are read as grey, RGB or RGBA."""
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)[:, ::-1]
    if len(shape) == 3 and shape[2] == 4:
        array[:, :, 3] = 255
    colours = array[:, :, :3] if array.ndim == 3 else np.repeat(array[:, :, None], 3, axis=2)
    np.testing.assert_array_equal(_pixels(array), colours)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4), np.float32),
        np.zeros((4, 4, 3), np.uint16),
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((4, 4, 1), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
    ],
)
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    """Floats in 0..1 or channels first would be read as another picture.
    The message names shape and type found and the three shapes taken."""
    with pytest.raises(ImageError, match=r"shape \(.*type .*expected uint8"):
        load_image(array)


def test_every_source_gives_the_same_picture(tmp_path: Path) -> None:
    """Path, text, bytes, stream, Pillow image and array are one picture with one digest.
    A stream just written to is read from its start and left open."""
    path = tmp_path / "page.png"
    data = _encode(RGB, "png")
    path.write_bytes(data)
    stream = io.BytesIO()
    stream.write(data)
    sources = [path, str(path), data, stream, Image.open(path), RGB]
    assert len({prepare_image(source, CONFIG) for source in sources}) == 1
    assert not stream.closed
    path.unlink()


def test_no_file_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that leaks a handle per image stops after a thousand.
    Good, animated and damaged files are all closed on return, not when garbage is collected."""
    opened = []
    path_open = Path.open

    def recording_open(path: Path, mode: str) -> Any:
        opened.append(path_open(path, mode))
        return opened[-1]

    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    animation = _encode(frames[0], "gif", save_all=True, append_images=frames[1:])
    for data in (_encode(RGB, "png"), animation, _encode(RGB, "tiff")):
        (tmp_path / f"{len(data)}.good").write_bytes(data)
        (tmp_path / f"{len(data)}.bad").write_bytes(data[:-128])
    monkeypatch.setattr(Path, "open", recording_open)
    for path in sorted(tmp_path.glob("*.good")):
        load_image(path)
    for path in sorted(tmp_path.glob("*.bad")):
        with pytest.raises(ImageError):
            load_image(path)
    assert [stream.closed for stream in opened] == [True] * 6


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "webp", "tiff"])
def test_truncated_files_are_refused(tmp_path: Path, kind: str) -> None:
    """A download that lost its last 128 bytes has a grey or repeated end (vllm#38253).
    It is refused with its name, in every format."""
    path = tmp_path / f"scan.{kind}"
    path.write_bytes(_encode(RGB, kind)[:-128])
    with pytest.raises(ImageError, match=rf"scan\.{kind}"):
        load_image(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"Dear model, this is text.", "no image"),
        (b"\x89PNG\r\n", "no image"),
    ],
)
def test_files_that_are_no_images(tmp_path: Path, content: bytes, reason: str) -> None:
    """An empty upload and a text saved as .png are the user's commonest mistakes.
    Each is named with its reason, from a path and from bytes."""
    path = tmp_path / "note.png"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=rf"note\.png' is {reason}"):
        load_image(path)
    with pytest.raises(ImageError, match=rf"^Image of \d+ bytes is {reason}"):
        load_image(content)


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    """A missing file and a folder are found before anything is decoded.
    Objects that are no source at all are refused as such."""
    with pytest.raises(ImageError, match="missing.png' cannot be opened: No such file"):
        load_image(tmp_path / "missing.png")
    with pytest.raises(ImageError, match=f"{tmp_path.name}' cannot be opened"):
        load_image(str(tmp_path))
    for source in (io.StringIO("text"), 7, None):
        with pytest.raises(ImageError, match="give a path, bytes"):
            load_image(source)  # type: ignore[arg-type]


def test_bombs_are_refused() -> None:
    """A kilobyte can claim 20000 x 20000 pixels and fill the memory.
    Pillow's limit of 178 million pixels is an error with the image's size in it."""
    with pytest.raises(ImageError, match="too large to open safely.*400000000 pixels"):
        load_image(_png_of_size(20000, 20000))


def test_large_scans_give_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between half the limit and the limit Pillow warns, which a strict program turns into a crash.
    Such scans (zulip#11215) are read in silence."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 96 * 64 - 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_array_equal(_pixels(_encode(RGB, "png")), RGB)
    assert caught == []


def test_patches_are_in_merge_block_order() -> None:
    """One loop per axis says where every number of a patch comes from.
    The picture needs no resizing, so the values are exact."""
    prepared = prepare_image(RGB, CONFIG)
    assert (prepared.grid.height, prepared.grid.width) == (6, 4)
    assert prepared.patches.shape == (24, 3 * 2 * 16 * 16)
    assert prepared.patches.dtype == np.float32
    scaled = (RGB * np.float64(1 / 255)).astype(np.float32)
    values = (scaled - np.float32(CONFIG.mean)) / np.float32(CONFIG.std)
    patch = 0
    for top, left in [(0, 0), (0, 32), (32, 0), (32, 32), (64, 0), (64, 32)]:
        for y, x in [(top, left), (top, left + 16), (top + 16, left), (top + 16, left + 16)]:
            square = values[y : y + 16, x : x + 16].transpose(2, 0, 1)
            expected = np.stack([square, square], axis=1).reshape(-1)
            np.testing.assert_array_equal(prepared.patches[patch], expected)
            patch += 1


@pytest.mark.parametrize(
    ("size", "grid"), [((1, 1), (2, 2)), ((30, 305), (2, 20)), ((400, 400), (16, 16))]
)
def test_small_and_large_pictures_are_resized(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """One red pixel once broke a drafter (ik_llama.cpp#1758), so it is a picture like any other.
    It grows to the smallest size; larger ones shrink to the limit, and keep their colour."""
    red = np.zeros((*size, 3), np.uint8) + np.uint8([255, 0, 0])
    prepared = prepare_image(red, CONFIG)
    assert (prepared.grid.height, prepared.grid.width) == grid
    channels = prepared.patches.reshape(-1, 3, 512)
    assert channels[:, 0].min() == pytest.approx((1 - 0.4) / 0.2, abs=1e-5)
    assert channels[:, 1].max() == pytest.approx((0 - 0.5) / 0.3, abs=1e-5)


def test_narrow_strips_are_refused_with_their_name(tmp_path: Path) -> None:
    """A ruler line cut from a page has no sensible size for the model (omlx#3529).
    The message gives file, sides and limit."""
    path = tmp_path / "line.png"
    Image.new("RGB", (1093, 5)).save(path)
    with pytest.raises(ImageError, match=r"line\.png.*1093 x 5.*218\.6.*200"):
        prepare_image(path, CONFIG)


def test_digest_knows_pixels_and_shape() -> None:
    """Equal bytes in another shape, or one other pixel, once reused a wrong cache (LMCache#4783).
    Each has a digest of its own; an equal picture has the same."""
    other = RGB.copy()
    other[95, 63, 2] ^= 1
    blank = np.zeros((20, 30, 3), np.uint8)
    pictures = [RGB, RGB.reshape(64, 96, 3), other, blank, blank.reshape(30, 20, 3)]
    digests = [prepare_image(picture, CONFIG).digest for picture in pictures]
    assert len(set(digests)) == 5
    assert all(len(digest) == 64 for digest in digests)
    assert prepare_image(RGB.copy(), CONFIG).digest == digests[0]
    assert prepare_image(RGB, CONFIG.with_max_pixels(1024)).digest != digests[0]


def test_random_sizes_do_not_crash() -> None:
    """Rare sizes crashed other runtimes and broke the next request (ollama#14170).
    200 sizes give finite patches of their grid's shape."""
    for height, width in np.random.default_rng(11).integers(1, 400, (200, 2)).tolist():
        if max(height, width) > 200 * min(height, width):
            continue
        prepared = prepare_image(np.zeros((height, width, 3), np.uint8), CONFIG)
        assert prepared.patches.shape == (prepared.grid.num_patches, 1536)
        assert np.isfinite(prepared.patches).all()


def test_a_twelve_megapixel_photo_fits() -> None:
    """A phone photo under a 16 megapixel cap is the largest common picture.
    It gives 47,000 patches at its own size, rounded to whole rows."""
    config = ImageConfig(16, 2, 2, 65536, 16777216, HALF, HALF, 1 / 255)
    prepared = prepare_image(np.zeros((3000, 4000, 3), np.uint8), config)
    assert (prepared.grid.merged_height, prepared.grid.merged_width) == (94, 125)
    assert prepared.patches.shape == (47000, 1536)


def test_descriptions_name_the_image() -> None:
    """Every message starts with what the user would call the image.
    Unnamed ones are told apart by their size."""
    assert describe("a/b.png") == describe(Path("a/b.png")) == "Image 'a/b.png'"
    assert describe(b"1234") == "Image of 4 bytes"
    assert describe(Image.new("L", (3, 2))) == "Image of 3 x 2 pixels and mode L"
    assert describe(RGB) == "Image array of shape (96, 64, 3) and type uint8"
    assert describe(io.BytesIO()) == "Image from a BytesIO"
