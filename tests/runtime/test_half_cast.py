"""ONNX Runtime rounds to fp16 as NumPy does, bit for bit, so that it may do so in an export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.export.store import HALF_OVERFLOW, to_half
from dflash_onnx.models.errors import ExportError
from dflash_onnx.models.graphs.cast import half_cast_model
from dflash_onnx.runtime.cli import main
from dflash_onnx.runtime.half_cast import HalfCast


@pytest.fixture(scope="module")
def cast() -> HalfCast:
    """The one that the export command uses."""
    return HalfCast(half_cast_model())


def same_bits(cast: HalfCast, values: np.ndarray) -> bool:
    """Whether both give the same halves in the same shape."""
    return np.array_equal(cast(values).view(np.uint16), to_half(values).view(np.uint16))


def test_every_half_and_what_lies_between(cast: HalfCast) -> None:
    """All halves, subnormal ones among them, the middle of each two, and the numbers beside it."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    near = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    values = np.concatenate([halves, middles, *near])
    assert values.max() < HALF_OVERFLOW
    assert same_bits(cast, values) and same_bits(cast, -values)


@pytest.mark.parametrize("shape", [(0, 3), (1,), (7, 33), (5, 2, 3)])
def test_shapes(cast: HalfCast, shape: tuple[int, ...]) -> None:
    """Any tensor that an export rounds, also one that is a part of another."""
    whole = np.random.default_rng(0).normal(size=(*shape, 2)).astype(np.float32)
    assert same_bits(cast, whole[..., 0]) and same_bits(cast, whole)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_command_writes_the_bytes_that_numpy_gives(tmp_path: Path, dtype: str) -> None:
    """With the check, which has ONNX Runtime loaded, and without it; halves are only copied."""
    make_target(tmp_path / "target", dtype=dtype, tied=False)
    make_draft(tmp_path / "draft", tmp_path / "target", dtype=dtype)
    pair = [str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    for name, more in (("checked", []), ("unchecked", ["--skip-check"])):
        paths = [*pair, "-o", str(tmp_path / name)]
        assert main(["export", *paths, "--precision", "fp16", *more]) == 0
    files = sorted(path.name for path in (tmp_path / "checked").iterdir())
    assert {"target.data", "head.data", "dflash.data"} <= set(files)
    for file in files:
        first, second = ((tmp_path / name / file).read_bytes() for name in ("checked", "unchecked"))
        assert first == second, file


def test_what_overflows_is_refused_before_it_is_rounded(tmp_path: Path) -> None:
    """Halves end at 65,504: a weight of 65,520 would become infinity."""
    make_target(tmp_path / "target")
    path = tmp_path / "target/model.safetensors"
    tensors = load_file(path)
    name = next(n for n, t in tensors.items() if "q_proj" in n and t.ndim == 2)
    tensors[name] = tensors[name].astype(np.float32)
    tensors[name][0, 0] = HALF_OVERFLOW
    save_file(tensors, path)
    options = ExportOptions(tmp_path / "target", tmp_path / "bundle", precision="fp16")
    with pytest.raises(ExportError, match=f"{name} overflows fp16"):
        export_bundle(options, half_cast=HalfCast)
    assert not (tmp_path / "bundle").exists()
