"""The Qwen3-VL text decoder with explicit caches, taps and DeepStack inputs, and the head.

Prefill, verify and plain decoding are the same graph. Positions arrive as cosines and sines.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from onnx import ModelProto, TensorProto

from ..config import TextConfig
from ..stored import Tensors
from . import ops
from .builder import CONTRIB, GraphBuilder, Shape


def build_target(
    text: TextConfig, num_deepstack: int, taps: Collection[int], tensors: Tensors
) -> ModelProto:
    """The decoder graph: rows in, final-norm hidden rows, taps and grown caches out."""
    g = GraphBuilder("target", tensors)
    width = text.hidden_size
    embeds = g.input("inputs_embeds", "float32", [1, "rows", width])
    tables = ops.rotary_inputs(g, "rows", text.rope.rotary_dim // 2)
    past_rows = g.input("past_rows", "int32", [1])
    deepstack = [
        g.input(f"deepstack.{k}", "float32", ["rows", width]) for k in range(num_deepstack)
    ]
    lengths = _lengths(g, embeds, past_rows)
    hidden = ops.reshape(g, embeds, -1, width)
    for i in range(text.num_layers):
        hidden = _layer(g, text, i, hidden, tables, lengths)
        if i in taps:
            # Before the DeepStack addition, as transformers' hidden_states records it.
            g.output(hidden, f"tap.{i}", ["rows", width])
        if i < num_deepstack:
            hidden = g.op("Add", hidden, deepstack[i])
    g.output(ops.rms_norm(g, hidden, "norm.weight", text.rms_norm_eps), "hidden", ["rows", width])
    return g.model()


def _lengths(g: GraphBuilder, embeds: str, past_rows: str) -> tuple[str, str]:
    """GroupQueryAttention's seqlens_k [1] and total length [], counting the extra row."""
    shape = g.op("Cast", g.op("Shape", embeds, start=1, end=2), to=TensorProto.INT32)
    last_row = g.op("Add", past_rows, shape)
    total = g.op("Add", last_row, g.constant([1], np.int32))
    return last_row, g.op("Squeeze", total, g.constant([0]))


def _layer(
    g: GraphBuilder,
    text: TextConfig,
    i: int,
    hidden: str,
    tables: ops.Tables,
    lengths: tuple[str, str],
) -> str:
    name, eps = f"layers.{i}", text.rms_norm_eps
    normed = ops.rms_norm(g, hidden, f"{name}.input_layernorm.weight", eps)
    attended = _attention(g, text, i, normed, tables, lengths)
    hidden = g.op("Add", hidden, ops.linear(g, attended, f"{name}.self_attn.o_proj.weight"))
    normed = ops.rms_norm(g, hidden, f"{name}.post_attention_layernorm.weight", eps)
    mlp = ops.swiglu(
        g, normed, f"{name}.mlp.gate_up", f"{name}.mlp.down_proj.weight", text.intermediate_size
    )
    return g.op("Add", hidden, mlp)


def _attention(
    g: GraphBuilder,
    text: TextConfig,
    i: int,
    x: str,
    tables: ops.Tables,
    lengths: tuple[str, str],
) -> str:
    """Causal grouped-query attention over the cache; returns [rows, heads * d]."""
    name = f"layers.{i}.self_attn"
    d, eps = text.head_dim, text.rms_norm_eps
    q_size, kv_size = text.num_heads * d, text.num_kv_heads * d
    sizes = g.constant([q_size, kv_size, kv_size])
    q, k, v = g.ops("Split", ops.linear(g, x, f"{name}.qkv"), sizes, count=3, axis=-1)
    q = ops.normed_heads(g, q, f"{name}.q_norm.weight", eps, text.num_heads, d)
    k = ops.normed_heads(g, k, f"{name}.k_norm.weight", eps, text.num_kv_heads, d)
    rows = (
        ops.rotary(g, q, tables, text.num_heads),
        ops.rotary(g, k, tables, text.num_kv_heads),
        ops.reshape(g, v, 1, -1, kv_size),
    )
    cache: Shape = [1, text.num_kv_heads, "capacity", d]
    past = [g.input(f"past_key_values.{i}.{n}", "float32", cache) for n in ("key", "value")]
    present = [f"present.{i}.key", f"present.{i}.value"]
    attended, *_ = g.ops(
        "GroupQueryAttention",
        *(ops.with_extra_row(g, row) for row in rows),
        *past,
        *lengths,
        names=[f"attended.{i}", *present],
        domain=CONTRIB,
        num_heads=text.num_heads,
        kv_num_heads=text.num_kv_heads,
    )
    for output in present:
        g.direct_output(output, cache)
    return ops.reshape(g, ops.slice_axis(g, attended, 0, -1, 1), -1, q_size)


def build_head(
    name: str, weight: str, width: int, vocab_size: int, num_top: int, tensors: Tensors
) -> ModelProto:
    """The output head: chosen hidden rows to argmax, top-k and (when fetched) full logits.

    `bias` [V] carries the ban list, so banned ids can never be chosen.
    """
    g = GraphBuilder(name, tensors)
    hidden = g.input("hidden", "float32", ["rows", width])
    rows = g.input("rows", "int64", ["chosen"])
    bias = g.input("bias", "float32", [vocab_size])
    logits = g.op("Add", ops.linear(g, g.op("Gather", hidden, rows, axis=0), weight), bias)
    best = g.op("ArgMax", logits, axis=-1, keepdims=0, select_last_index=0)
    values, ids = g.ops("TopK", logits, g.constant([num_top]), count=2, axis=-1, sorted=1)
    g.output(best, "argmax", ["chosen"], "int64")
    g.output(values, "top_values", ["chosen", num_top])
    g.output(ids, "top_ids", ["chosen", num_top], "int64")
    g.output(logits, "logits", ["chosen", vocab_size])
    return g.model()
