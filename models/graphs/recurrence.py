"""The gated delta rule, emitted two ways that compute the same rows and states.

`fused` is one contrib operator, for providers that have its kernel; `chunked` solves all rows at
once in matrix products, for those that do not. Knows nothing of projections and caches.

S <- exp(g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q / sqrt(d)      (dflash.md, 3.3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..text_config import PORTABLE_ROWS, LinearConfig
from . import ops
from .builder import CONTRIB, GraphBuilder

Recurrence = Literal["fused", "chunked"]
_ONES = np.ones((PORTABLE_ROWS, PORTABLE_ROWS), np.float32)


@dataclass(frozen=True)
class GatedRows:
    """Keys and queries [1, rows, key width], values [1, rows, value width], log-decay and beta
    [1, rows, value heads]; keys and queries are L2-normed. Without queries only states come out."""

    query: str | None
    key: str
    value: str
    decay: str
    beta: str


def emit(
    g: GraphBuilder, linear: LinearConfig, how: Recurrence, rows: GatedRows, state: str, after: str
) -> str:
    """Outputs [1, rows, value width] of rows after `state`; the new state is graph output `after`.

    States are [1, value heads, dk, dv]. A row whose decay and beta are zero leaves a state as it
    is, and so do no rows at all; but those only `fused` takes (a MatMul of ONNX Runtime over an
    empty axis does not write its output).
    """
    output = (_fused if how == "fused" else _chunked)(g, linear, rows, state, after)
    g.direct_output(after, [1, linear.num_value_heads, linear.key_dim, linear.value_dim])
    return output


def _fused(g: GraphBuilder, linear: LinearConfig, rows: GatedRows, state: str, after: str) -> str:
    output, _ = g.ops(
        "LinearAttention",
        *(rows.query or rows.key, rows.key, rows.value),
        state,
        *(rows.decay, rows.beta),
        names=[f"{after}/output", after],
        domain=CONTRIB,
        q_num_heads=linear.num_key_heads,
        kv_num_heads=linear.num_value_heads,
        update_rule="gated_delta",
    )
    return output


def _chunked(g: GraphBuilder, linear: LinearConfig, rows: GatedRows, state: str, after: str) -> str:
    """All rows at once: (I + M) U = B with M strictly lower triangular, per value head."""
    key = _key_heads(g, linear, rows.key)
    value = _heads(g, rows.value, linear.num_value_heads, linear.value_dim)
    decay, beta = (_column(g, part) for part in (rows.decay, rows.beta))
    lower, strict = (_triangle(g, rows.key, np.tril(_ONES, k)) for k in (0, -1))
    total = g.op("MatMul", lower, decay)
    grown = g.op("Exp", total)
    # Summed between two rows: the difference of two long sums loses the digits of strong decay.
    between = g.op("MatMul", lower, g.op("Mul", decay, strict))
    falls = g.op("Exp", between)
    products = g.op("MatMul", key, g.op("Transpose", key, perm=[0, 2, 1]))
    coupling = g.op("Mul", beta, g.op("Mul", g.op("Mul", products, falls), strict))
    past = g.op("Squeeze", state, g.constant([0]))
    known = g.op("Mul", grown, g.op("MatMul", key, past))
    right = g.op("Mul", beta, g.op("Sub", value, known))
    updates = g.op("MatMul", _inverse(g, coupling, rows.key), right)
    state = _new_state(g, key, updates, decay, falls, past)
    g.ops("Unsqueeze", state, g.constant([0]), names=[after])
    if rows.query is None:
        return updates
    query = g.op(
        "Mul", _key_heads(g, linear, rows.query), g.constant(linear.key_dim**-0.5, np.float32)
    )
    scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 2, 1]))
    inner = g.op("MatMul", g.op("Mul", g.op("Mul", scores, falls), lower), updates)
    output = g.op("Add", inner, g.op("Mul", grown, g.op("MatMul", query, past)))
    flat = g.op("Transpose", output, perm=[1, 0, 2])
    return ops.reshape(g, flat, 1, -1, linear.value_width)


def _new_state(g: GraphBuilder, key: str, updates: str, decay: str, falls: str, past: str) -> str:
    """exp(G_T) S + sum over rows of exp(G_T - G_t) k_t u_t^T."""
    whole = g.op("ReduceSum", decay, g.constant([1]), keepdims=1)
    last = ops.slice_axis(g, falls, -1, ops.FULL_STOP, 1)
    faded = g.op("Mul", key, g.op("Transpose", last, perm=[0, 2, 1]))
    added = g.op("MatMul", g.op("Transpose", faded, perm=[0, 2, 1]), updates)
    return g.op("Add", g.op("Mul", g.op("Exp", whole), past), added)


def _inverse(g: GraphBuilder, coupling: str, rows: str) -> str:
    """(I + M)^-1 by doubling blocks on the diagonal: X - X N X, N what joins two neighbours.

    As stable as forward substitution; a product of powers of M loses all digits on equal keys.
    """
    inverse = _triangle(g, rows, np.eye(PORTABLE_ROWS, dtype=np.float32))
    block = np.arange(PORTABLE_ROWS)
    size = 1
    while size < PORTABLE_ROWS:
        pair, half = block // (2 * size), block // size
        joins = (pair[:, None] == pair[None]) & (half[:, None] > half[None])
        part = g.op("Mul", coupling, _triangle(g, rows, joins.astype(np.float32)))
        inner = g.op("MatMul", g.op("MatMul", inverse, part), inverse)
        inverse = g.op("Sub", inverse, inner)
        size *= 2
    return inverse


def _triangle(g: GraphBuilder, rows: str, matrix: np.ndarray) -> str:
    """The first n x n of a constant, n being the number of rows."""
    count = g.op("Shape", rows, start=1, end=2)
    ends = g.op("Concat", count, count, axis=0)
    table = g.constant(matrix, np.float32)
    return g.op("Slice", table, g.constant([0, 0]), ends, g.constant([0, 1]))


def _column(g: GraphBuilder, x: str) -> str:
    """[1, n, heads] to [heads, n, 1]."""
    return g.op("Transpose", x, perm=[2, 1, 0])


def _heads(g: GraphBuilder, x: str, num_heads: int, dim: int) -> str:
    """[1, n, heads * d] to [heads, n, d]."""
    return g.op("Transpose", ops.reshape(g, x, -1, num_heads, dim), perm=[1, 0, 2])


def _key_heads(g: GraphBuilder, linear: LinearConfig, x: str) -> str:
    """[1, n, key heads * d] to [value heads, n, d]: a key head serves consecutive value heads."""
    heads, groups = linear.num_key_heads, linear.num_value_heads // linear.num_key_heads
    x = _heads(g, x, heads, linear.key_dim)
    ids = np.repeat(np.arange(heads), groups)
    return x if groups == 1 else g.op("Gather", x, g.constant(ids), axis=0)
