"""How each building block is emitted: norms, linear layers, rotary, activations, attention.

One place per rule, used by every network. Values are [rows, width] unless a shape says otherwise.
"""

from __future__ import annotations

import numpy as np

from .builder import CONTRIB, GraphBuilder
from .matmul import linear as linear
from .matmul import stacked

FULL_STOP = np.iinfo(np.int64).max
Tables = tuple[str, str]


def norm_scale(g: GraphBuilder, weight: str, zero_centred: bool) -> str:
    """What a norm multiplies by: its weight, or one more than it; folded at load."""
    scale = g.weight(weight)
    return g.op("Add", scale, g.constant(1.0, np.float32)) if zero_centred else scale


def rms_norm(g: GraphBuilder, x: str, scale: str, eps: float) -> str:
    """RMSNorm over the last axis, in the primitives ONNX Runtime fuses at load."""
    square = g.op("Pow", x, g.constant(2.0, np.float32))
    mean = g.op("ReduceMean", square, axes=[-1], keepdims=1)
    root = g.op("Sqrt", g.op("Add", mean, g.constant(eps, np.float32)))
    return g.op("Mul", g.op("Div", x, root), scale)


def add_and_norm(g: GraphBuilder, x: str, added: str, scale: str, eps: float) -> tuple[str, str]:
    """RMSNorm of x + added [rows, H], and the sum itself, in one operator."""
    normed, _, _, total = g.ops(
        "SkipSimplifiedLayerNormalization", x, added, scale, count=4, domain=CONTRIB, epsilon=eps
    )
    return normed, total


def rotary_inputs(g: GraphBuilder, rows: str, width: int) -> Tables:
    """Declare the inputs cos and sin, float32 [rows, width]."""
    return g.input("cos", "float32", [rows, width]), g.input("sin", "float32", [rows, width])


def layer_norm(g: GraphBuilder, x: str, name: str, eps: float) -> str:
    """LayerNorm over the last axis with `name`.weight and `name`.bias."""
    inputs = (x, g.weight(f"{name}.weight"), g.weight(f"{name}.bias"))
    return g.op("LayerNormalization", *inputs, axis=-1, epsilon=eps)


def swiglu(g: GraphBuilder, x: str, gate_up: str, down: str, width: int) -> str:
    """down(silu(gate x) * up x), gate and up stored as one [2 * width, in] weight."""
    gate, up = stacked(g, x, gate_up, (width, width))
    return linear(g, g.op("Mul", silu(g, gate), up), down)


def silu(g: GraphBuilder, x: str) -> str:
    """x sigmoid(x), which ONNX Runtime fuses at load."""
    return g.op("Mul", x, g.op("Sigmoid", x))


def causal_conv(g: GraphBuilder, rows: str, weight: str, kernel: int) -> str:
    """Depthwise convolution of rows [kernel - 1 + n, C] with weights [C, kernel] to [n, C].

    Shifted products: on CPU half the time of CausalConvWithState and a quarter at 8 rows, and
    unlike Conv equal bit for bit however the rows are cut into calls.
    """
    by_tap = g.op("Transpose", g.weight(weight), perm=[1, 0])
    taps = g.ops("Split", by_tap, g.constant([1] * kernel), count=kernel, axis=0)
    total = ""
    for j, tap in enumerate(taps):
        stop = j - kernel + 1 or FULL_STOP
        product = g.op("Mul", slice_axis(g, rows, j, stop, 0), tap)
        total = g.op("Add", total, product) if total else product
    return total


def gelu(g: GraphBuilder, x: str) -> str:
    """Exact GELU: 0.5 x (1 + erf(x / sqrt 2))."""
    erf = g.op("Erf", g.op("Div", x, g.constant(2.0**0.5, np.float32)))
    inner = g.op("Mul", x, g.op("Add", erf, g.constant(1.0, np.float32)))
    return g.op("Mul", inner, g.constant(0.5, np.float32))


def gelu_tanh(g: GraphBuilder, x: str) -> str:
    """GELU's tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    cube = g.op("Pow", x, g.constant(3.0, np.float32))
    inner = g.op("Add", x, g.op("Mul", cube, g.constant(0.044715, np.float32)))
    tanh = g.op("Tanh", g.op("Mul", inner, g.constant((2 / np.pi) ** 0.5, np.float32)))
    half = g.op("Mul", x, g.constant(0.5, np.float32))
    return g.op("Mul", half, g.op("Add", tanh, g.constant(1.0, np.float32)))


def reshape(g: GraphBuilder, x: str, *shape: int) -> str:
    """Reshape; 0 keeps a dimension, -1 is inferred."""
    return g.op("Reshape", x, g.constant(list(shape)))


def slice_axis(g: GraphBuilder, x: str, start: int, stop: int, axis: int) -> str:
    """x[start:stop] along one axis."""
    return g.op("Slice", x, g.constant([start]), g.constant([stop]), g.constant([axis]))


def rotary(
    g: GraphBuilder, x: str, tables: Tables, num_heads: int, head_dim: int, rotary_dim: int
) -> str:
    """Rotate the first `rotary_dim` values of every head of x [1, n, heads * d].

    (cos, sin) are [n, rotary_dim / 2], one table row per row of x.
    """
    # The operator takes the width only where it is a part of the head.
    part = {} if rotary_dim == head_dim else {"rotary_embedding_dim": rotary_dim}
    # Position 0 with one element means: row i uses table row i.
    return g.op(
        "RotaryEmbedding", x, g.constant([0]), *tables,
        domain=CONTRIB, num_heads=num_heads, interleaved=0, **part,
    )  # fmt: skip


def normed_heads(
    g: GraphBuilder, x: str, scale: str, eps: float, num_heads: int, head_dim: int
) -> str:
    """Per-head RMSNorm of x [n, heads * d], as [1, n, heads * d]."""
    heads = rms_norm(g, reshape(g, x, -1, num_heads, head_dim), scale, eps)
    return reshape(g, heads, 1, -1, num_heads * head_dim)
