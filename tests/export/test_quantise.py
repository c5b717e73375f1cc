"""Packed weights against a dequantiser of the test's own, and against ONNX Runtime's kernels.

Knows how bytes stand for numbers; that whole networks still agree is `test_precisions.py`'s.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dflash_onnx.export.checkpoint import scan
from dflash_onnx.export.parallel import workers
from dflash_onnx.export.quantise import pack_blocks, pack_rows
from dflash_onnx.export.store import DataWriter
from dflash_onnx.models.errors import ExportError
from dflash_onnx.models.graphs.builder import GraphBuilder
from dflash_onnx.models.graphs.matmul import linear
from dflash_onnx.models.stored import StoredTensor

Float = NDArray[np.float32]
Wide = NDArray[np.float64]
BLOCKED = {"int4": 16, "int8": 32}
FORMS = (*BLOCKED, "w8a8")


def matrix(rows: int, columns: int, seed: int = 0) -> Float:
    """Weights whose rows differ in size, with a few outliers."""
    rng = np.random.default_rng([seed, rows, columns])
    values = rng.normal(size=(rows, columns)) * rng.uniform(0.01, 3, (rows, 1))
    return (values * np.where(rng.random(values.shape) < 0.01, 8, 1)).astype(np.float32)


def in_blocks(values: NDArray) -> Wide:
    """Values [n, K] as blocks of 32 [n, blocks, 32], the last one padded with zeros."""
    wide = np.zeros((len(values), -(-values.shape[1] // 32) * 32))
    wide[:, : values.shape[1]] = values
    return wide.reshape(len(values), -1, 32)


def levels(packed: NDArray[np.uint8]) -> Wide:
    """Signed levels [n, blocks, 32]: a byte each, or two a byte with the first in the low half."""
    if packed.shape[-1] == 32:
        return packed.astype(np.float64) - 128
    halves = np.stack([packed & 15, packed >> 4], axis=-1)
    return halves.reshape(*packed.shape[:-1], 32).astype(np.float64) - 8


def restored(values: Float, form: str) -> Wide:
    """What is left of a matrix after packing."""
    if form == "w8a8":
        packed, scales = pack_rows(values)
        return packed * scales.astype(np.float64)[:, None]
    packed, scales = pack_blocks(values, form)
    assert packed.dtype == np.uint8 and packed.shape[-1] == BLOCKED[form]
    whole = (levels(packed) * scales[..., None]).reshape(len(values), -1)
    assert not whole[:, values.shape[1] :].any(), "padding stands for zeros"
    return whole[:, : values.shape[1]]


@pytest.mark.parametrize("columns", [32, 64, 50, 7])
def test_eight_bits_lose_half_a_level(columns: int) -> None:
    """A level is the largest value of a block, or of a row, by 127; nothing is cut off."""
    values = matrix(9, columns)
    lost = np.abs(restored(values, "int8") - values)
    peaks = np.abs(in_blocks(values)).max(axis=-1, keepdims=True)
    assert (in_blocks(lost) <= peaks / 254 * (1 + 1e-5)).all()
    lost = np.abs(restored(values, "w8a8") - values)
    assert (lost <= np.abs(values).max(axis=1, keepdims=True) / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize("columns", [32, 96, 50, 7])
def test_four_bits_lose_half_a_level(columns: int) -> None:
    """What is not cut off is off by half a level of its block's own scale at most."""
    values = matrix(40, columns)
    packed, scales = pack_blocks(values, "int4")
    level, own = levels(packed), np.abs(scales.astype(np.float64))[..., None]
    lost = np.abs(level * scales[..., None] - in_blocks(values))
    inside = (level > -8) & (level < 7)
    assert inside.mean() > 0.8
    assert (lost <= np.where(inside, own / 2 * (1 + 1e-5), np.inf)).all()


@pytest.mark.parametrize("form", BLOCKED)
def test_steps_change_no_byte(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Blocks are packed some at a time; how many makes no difference."""
    values = matrix(30, 96)
    whole = pack_blocks(values, form)
    monkeypatch.setattr("dflash_onnx.export.quantise.STEP", 7)
    for ours, theirs in zip(pack_blocks(values, form), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_search_is_never_worse_than_the_plain_scale() -> None:
    """Squares lost per block, against the scale that puts the largest value on level -8."""
    values = matrix(200, 96)
    blocks = in_blocks(values)
    widest = np.abs(blocks).argmax(axis=-1, keepdims=True)
    plain = np.take_along_axis(blocks, widest, axis=-1) / -8
    kept = np.clip(np.rint(blocks / plain), -8, 7) * plain
    before = np.square(kept - blocks).sum(axis=-1)
    after = np.square(in_blocks(restored(values, "int4")) - blocks).sum(axis=-1)
    assert (after <= before * (1 + 1e-4)).all()
    assert after.sum() < 0.97 * before.sum(), "and it is worth its time"


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros(form: str) -> None:
    """A block, a row or a matrix of nothing else has scale zero and divides by none."""
    values = matrix(3, 64)
    values[0, :32] = 0
    values[2] = 0
    result = restored(values, form)
    assert not result[values == 0].any() and result[0, 32:].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4, 1e18])
def test_size_does_not_matter(form: str, size: float) -> None:
    """Scales carry it: a matrix a thousand million times as large loses the same share."""
    values = matrix(5, 64) * np.float32(size)
    lost = np.abs(restored(values, form) - values).max()
    assert lost <= np.abs(values).max() * (0.1 if form == "int4" else 0.005)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_lone_value_is_kept(form: str, sign: int) -> None:
    """The largest value of a block stands on a level, whichever side it is on."""
    values = np.zeros((2, 32), np.float32)
    values[0, 5] = sign * 3.7
    np.testing.assert_allclose(restored(values, form), values, rtol=1e-6)


def write(folder: Path, parts: list[Float], form: str, chunk: int = 2**24) -> StoredTensor:
    """Store matrices as one called w in folder/w.data, read `chunk` bytes at a time."""
    infos = []
    for i, part in enumerate(parts):
        save_file({"part": part}, folder / f"{i}.safetensors")
        infos += scan(folder / f"{i}.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_onnx.export.checkpoint.BLOCK_BYTES", chunk)
        with workers(2) as pool, DataWriter(folder, "w.data", form, lambda _: None, pool) as writer:
            writer.add("w", infos, matrix=True)
    return writer.tensors["w"]


@pytest.mark.parametrize("form", FORMS)
def test_joined_in_chunks(form: str, tmp_path: Path) -> None:
    """Three tensors read two rows and a half at a time are stored like one read at once."""
    parts = [matrix(n, 72, n) for n in (5, 1, 8)]
    for name in ("once", "chunks"):
        (tmp_path / name).mkdir()
    once = write(tmp_path / "once", [np.concatenate(parts)], form)
    chunks = write(tmp_path / "chunks", parts, form, chunk=4 * 72 * 5 // 2)
    assert once == chunks and (chunks.form, chunks.columns) == (form, 72)
    data = [(tmp_path / name / "w.data").read_bytes() for name in ("once", "chunks")]
    assert data[0] == data[1]
    assert chunks.shape == ((72, 14) if form == "w8a8" else (14, 3, BLOCKED[form]))


def multiplied(folder: Path, stored: StoredTensor, x: Float) -> Float:
    """x [n, K] times the stored matrix, by the graph that bundles have."""
    g = GraphBuilder("linear", {"w": stored})
    rows = g.input("x", "float32", ["n", stored.columns])
    g.output(linear(g, rows, "w"), "y", ["n", "out"])
    path = folder / "linear.onnx"
    path.write_bytes(g.model().SerializeToString())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x})
    return result


def activation_bound(x: Float, weights: Wide, form: str) -> Wide:
    """The most that half a level of every activation can change a product [n, N]."""
    if form == "w8a8":
        return np.abs(x).max(axis=1, keepdims=True) / 254 * np.abs(weights).sum(axis=1)
    levels = np.abs(in_blocks(x)).max(axis=-1) / 254
    return levels @ np.abs(in_blocks(weights)).sum(axis=-1).T


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [64, 200])
def test_kernels_multiply_by_what_was_packed(form: str, columns: int, tmp_path: Path) -> None:
    """The product is x times the restored weights, but for the activations' own 8 bits.

    A row of zeros among the activations and outliers in others; the width need not be whole blocks.
    """
    values, x = matrix(48, columns, 1), matrix(5, columns, 2)
    x[3] = 0
    ours = multiplied(tmp_path, write(tmp_path, [values], form), x)
    weights = restored(values, form)
    product = x.astype(np.float64) @ weights.T
    slack = 1e-5 * (np.abs(x).astype(np.float64) @ np.abs(weights).T)
    assert (np.abs(ours - product) <= activation_bound(x, weights, form) + slack).all()
    assert not ours[3].any() and np.abs(product).max() > 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers(form: str, value: float, tmp_path: Path) -> None:
    """They would spoil a whole block in silence; the message names the tensor instead."""
    values = matrix(4, 32)
    values[2, 9] = value
    with pytest.raises(ExportError, match="a value of part is not finite"):
        write(tmp_path, [values], form)
