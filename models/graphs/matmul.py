"""Rows times a stored matrix, in whatever form the matrix is stored.

Every form gives a row the same result whatever other rows are in the call (ort.md, 4e), so that a
block and single steps agree. Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from ..precision import BLOCK_SIZE, BLOCKED
from ..stored import StoredTensor
from .builder import CONTRIB, GraphBuilder

# Rows of activations become unsigned: signed times signed has no fast kernel on x86 (ort.md, 3).
ZERO_POINT = 128
LARGEST = 127.0


def linear(g: GraphBuilder, x: str, weight: str, bias: str | None = None) -> str:
    """x [n, in] times the matrix `weight` [out, in] of the checkpoint, plus a bias, [n, out]."""
    stored = g.stored(weight)
    if stored.form is None and bias:
        return g.op("Gemm", x, g.floats(stored), g.weight(bias), transB=1)
    product = _product(g, x, stored)
    return g.op("Add", product, g.weight(bias)) if bias else product


def stacked(g: GraphBuilder, x: str, weight: str, sizes: Sequence[int]) -> list[str]:
    """x [n, in] times each of the matrices [size, in] that `weight` holds one after another.

    They are separate products, which saves taking a joint one apart, unless the matrix is stored
    by columns.
    """
    stored = g.stored(weight)
    if stored.form == "w8a8":
        product = _product(g, x, stored)
        return g.ops("Split", product, g.constant(list(sizes)), count=len(sizes), axis=-1)
    stops = np.cumsum(sizes).tolist()
    parts = (stored.rows(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))
    return [_product(g, x, part) for part in parts]


def _product(g: GraphBuilder, x: str, stored: StoredTensor) -> str:
    if stored.form is None:
        return g.op("Gemm", x, g.floats(stored), transB=1)
    return (_row_quantised if stored.form == "w8a8" else _blocked)(g, x, stored)


def _blocked(g: GraphBuilder, x: str, stored: StoredTensor) -> str:
    """Weights of 4 or 8 bits in blocks; activations are quantised block by block in the kernel."""
    assert stored.form is not None and stored.scales is not None
    return g.op(
        "MatMulNBits",
        x,
        g.raw(stored),
        g.raw(stored.scales),
        domain=CONTRIB,
        K=stored.columns,
        N=stored.shape[0],
        bits=BLOCKED[stored.form],
        block_size=BLOCK_SIZE,
        # Level 0 is fifty times slower at 8 bits.
        accuracy_level=4,
    )


def _row_quantised(g: GraphBuilder, x: str, stored: StoredTensor) -> str:
    """8-bit activations with a scale per row, 8-bit weights with a scale per output."""
    assert stored.scales is not None
    peak = g.op("ReduceMax", g.op("Abs", x), axes=[-1], keepdims=1)
    # A row of zeros stays one: any scale does, but not zero.
    peak = g.op("Max", peak, g.constant(1e-30, np.float32))
    scale = g.op("Div", peak, g.constant(LARGEST, np.float32))
    rounded = g.op("Round", g.op("Div", x, scale))
    shifted = g.op("Add", rounded, g.constant(float(ZERO_POINT), np.float32))
    levels = g.op("Cast", shifted, to=TensorProto.UINT8)
    product = g.op("MatMulInteger", levels, g.raw(stored), g.constant(ZERO_POINT, np.uint8))
    floats = g.op("Cast", product, to=TensorProto.FLOAT)
    return g.op("Mul", g.op("Mul", floats, g.raw(stored.scales)), scale)
