"""The causal attention layer of a target, over a cache that the graph updates in place.

Serves the decoder's attention layers and the MTP head's one layer. Knows no other kind of layer.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from ..text_config import TextConfig
from . import ops
from .builder import CONTRIB, GraphBuilder, Shape


class CausalAttention:
    """Grouped-query attention of a graph whose rows follow `past_rows` rows of the cache."""

    def __init__(self, g: GraphBuilder, text: TextConfig, embeds: str, tables: ops.Tables) -> None:
        self._g = g
        self._text = text
        self._extended, *self._lengths = _extended_rows(g, embeds)
        cos, sin = (g.op("Gather", table, self._extended, axis=0) for table in tables)
        self._tables = cos, sin

    def emit(self, name: str, layer: int, x: str) -> str:
        """Attention weights `name`.* on normed rows x [rows, H] to [rows, H], cached as `layer`."""
        g, text = self._g, self._text
        packed = g.op("Gather", ops.linear(g, x, f"{name}.qkv"), self._extended, axis=0)
        query_heads = (1 + text.output_gate) * text.num_heads
        sizes = g.constant([query_heads, text.num_kv_heads, text.num_kv_heads])
        heads = ops.reshape(g, packed, -1, query_heads + 2 * text.num_kv_heads, text.head_dim)
        q, k, v = g.ops("Split", heads, sizes, count=3, axis=1)
        gate = None
        if text.output_gate:
            q, gate = self._split_gate(q)
        q = self._rotated(q, f"{name}.q_norm.weight", text.num_heads)
        k = self._rotated(k, f"{name}.k_norm.weight", text.num_kv_heads)
        attended = self._attend(layer, q, k, self._flat(v, text.num_kv_heads))
        if gate is not None:
            attended = g.op("Mul", attended, g.op("Sigmoid", gate))
        rows = ops.reshape(g, attended, -1, text.num_heads * text.head_dim)
        return ops.linear(g, ops.slice_axis(g, rows, 0, -1, 0), f"{name}.o_proj.weight")

    def _split_gate(self, q: str) -> tuple[str, str]:
        """Each head's rows hold its query and then its gate."""
        g, d, heads = self._g, self._text.head_dim, self._text.num_heads
        pairs = ops.reshape(g, q, -1, heads, 2 * d)
        query, gate = g.ops("Split", pairs, g.constant([d, d]), count=2, axis=-1)
        return query, self._flat(gate, heads)

    def _rotated(self, x: str, norm: str, num_heads: int) -> str:
        """Normed and rotated heads [1, rows, heads * d] of x [rows, heads, d]."""
        g, text = self._g, self._text
        if text.qk_norm:
            scale = ops.norm_scale(g, norm, text.zero_centred_norms)
            x = ops.rms_norm(g, x, scale, text.rms_norm_eps)
        rotary_dim = text.rope.rotary_dim
        flat = self._flat(x, num_heads)
        return ops.rotary(g, flat, self._tables, num_heads, text.head_dim, rotary_dim)

    def _flat(self, x: str, num_heads: int) -> str:
        """Heads [rows, heads, d] as the operators take them, [1, rows, heads * d]."""
        return ops.reshape(self._g, x, 1, -1, num_heads * self._text.head_dim)

    def _attend(self, layer: int, q: str, k: str, v: str) -> str:
        g, text = self._g, self._text
        cache: Shape = [1, text.num_kv_heads, "capacity", text.head_dim]
        parts = ("key", "value")
        past = [g.input(f"past_key_values.{layer}.{p}", "float32", cache) for p in parts]
        present = [f"present.{layer}.{p}" for p in parts]
        attended, *_ = g.ops(
            "GroupQueryAttention",
            *(q, k, v),
            *past,
            *self._lengths,
            names=[f"attended.{layer}", *present],
            domain=CONTRIB,
            num_heads=text.num_heads,
            kv_num_heads=text.num_kv_heads,
        )
        for output in present:
            g.direct_output(output, cache)
        return attended


def mlp(g: GraphBuilder, text: TextConfig, name: str, hidden: str, mixed: str) -> tuple[str, str]:
    """The feed-forward half of a layer on its residual rows and its mixer's output; the residual
    rows between the halves, and what is to be added to them."""
    scale = ops.norm_scale(g, f"{name}.post_attention_layernorm.weight", text.zero_centred_norms)
    normed, hidden = ops.add_and_norm(g, hidden, mixed, scale, text.rms_norm_eps)
    weights = (f"{name}.mlp.gate_up", f"{name}.mlp.down_proj.weight")
    return hidden, ops.swiglu(g, normed, *weights, text.intermediate_size)


def _extended_rows(g: GraphBuilder, embeds: str) -> tuple[str, str, str]:
    """Indices [rows + 1] of all rows and the last one again; GroupQueryAttention's seqlens_k [1]
    and total length [], which count that extra row.

    Kernels take another path for one query and round differently; with the extra row a verify
    block and single steps agree bit for bit on CPU (ort.md, 4f).
    """
    past_rows = g.input("past_rows", "int32", [1])
    count = g.op("Shape", embeds, start=1, end=2)
    one, none = g.constant([1]), g.constant([0])
    scalar = g.op("Squeeze", g.op("Add", count, one), none)
    every = g.op("Range", g.constant(0), scalar, g.constant(1))
    extended = g.op("Min", every, g.op("Sub", count, one))
    last_row = g.op("Add", past_rows, g.op("Cast", count, to=TensorProto.INT32))
    total = g.op("Add", last_row, g.constant([1], np.int32))
    return extended, last_row, g.op("Squeeze", total, none)
