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
        self._tables = tables
        self._lengths = _lengths(g, embeds)

    def emit(self, name: str, layer: int, x: str) -> str:
        """Attention weights `name`.* on normed rows x [rows, H] to [rows, H], cached as `layer`."""
        g, text = self._g, self._text
        q_size, kv_size = text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
        q_rows = (1 + text.output_gate) * q_size
        sizes = g.constant([q_rows, kv_size, kv_size])
        q, k, v = g.ops("Split", ops.linear(g, x, f"{name}.qkv"), sizes, count=3, axis=-1)
        gate = None
        if text.output_gate:
            q, gate = self._split_gate(q)
        q = self._rotated(q, f"{name}.q_norm.weight", text.num_heads)
        k = self._rotated(k, f"{name}.k_norm.weight", text.num_kv_heads)
        attended = self._attend(layer, (q, k, ops.reshape(g, v, 1, -1, kv_size)))
        attended = ops.reshape(g, attended, -1, q_size)
        if gate is not None:
            attended = g.op("Mul", attended, g.op("Sigmoid", gate))
        return ops.linear(g, attended, f"{name}.o_proj.weight")

    def _split_gate(self, q: str) -> tuple[str, str]:
        """Each head's rows hold its query and then its gate."""
        g, d, heads = self._g, self._text.head_dim, self._text.num_heads
        pairs = ops.reshape(g, q, -1, heads, 2 * d)
        query, gate = g.ops("Split", pairs, g.constant([d, d]), count=2, axis=-1)
        return query, ops.reshape(g, gate, -1, heads * d)

    def _rotated(self, x: str, norm: str, num_heads: int) -> str:
        g, text, d = self._g, self._text, self._text.head_dim
        if text.qk_norm:
            scale = ops.norm_scale(g, norm, text.zero_centred_norms)
            heads = ops.normed_heads(g, x, scale, text.rms_norm_eps, num_heads, d)
        else:
            heads = ops.reshape(g, x, 1, -1, num_heads * d)
        return ops.rotary(g, heads, self._tables, num_heads, d, text.rope.rotary_dim)

    def _attend(self, layer: int, rows: tuple[str, str, str]) -> str:
        g, text = self._g, self._text
        cache: Shape = [1, text.num_kv_heads, "capacity", text.head_dim]
        parts = ("key", "value")
        past = [g.input(f"past_key_values.{layer}.{p}", "float32", cache) for p in parts]
        present = [f"present.{layer}.{p}" for p in parts]
        attended, *_ = g.ops(
            "GroupQueryAttention",
            *(ops.with_extra_row(g, row) for row in rows),
            *past,
            *self._lengths,
            names=[f"attended.{layer}", *present],
            domain=CONTRIB,
            num_heads=text.num_heads,
            kv_num_heads=text.num_kv_heads,
        )
        for output in present:
            g.direct_output(output, cache)
        return ops.slice_axis(g, attended, 0, -1, 1)


def mlp(g: GraphBuilder, text: TextConfig, name: str, hidden: str) -> str:
    """The residual feed-forward half of a layer, with its norm."""
    scale = ops.norm_scale(g, f"{name}.post_attention_layernorm.weight", text.zero_centred_norms)
    normed = ops.rms_norm(g, hidden, scale, text.rms_norm_eps)
    weights = (f"{name}.mlp.gate_up", f"{name}.mlp.down_proj.weight")
    return g.op("Add", hidden, ops.swiglu(g, normed, *weights, text.intermediate_size))


def _lengths(g: GraphBuilder, embeds: str) -> tuple[str, str]:
    """GroupQueryAttention's seqlens_k [1] and total length [], counting the extra row."""
    past_rows = g.input("past_rows", "int32", [1])
    shape = g.op("Cast", g.op("Shape", embeds, start=1, end=2), to=TensorProto.INT32)
    last_row = g.op("Add", past_rows, shape)
    total = g.op("Add", last_row, g.constant([1], np.int32))
    return last_row, g.op("Squeeze", total, g.constant([0]))
