"""The DFlash drafter's three graphs: inject (features to K/V), block (draft), append (in place).

Context rows are a pure function of one feature row and its position, so any chunking and order
gives the same K/V. The block graph reads the cache and never returns the K/V of mask rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import ModelProto

from ..draft_config import DraftConfig, DraftLayer
from ..stored import Tensors
from . import ops
from .builder import GraphBuilder, Shape
from .dflash2 import DynamicConv


def build_inject(draft: DraftConfig, tap_width: int, tensors: Tensors) -> ModelProto:
    """tap.{i} [n, H] in the draft's order to key.{l} and value.{l} [1, kv heads, n, d]."""
    g = GraphBuilder("inject", tensors)
    taps = [g.input(f"tap.{i}", "float32", ["rows", tap_width]) for i in draft.target_layer_ids]
    tables = ops.rotary_inputs(g, "rows", draft.rope.rotary_dim // 2)
    features = g.op("Concat", *taps, axis=-1)
    fused = ops.linear(g, features, "fc.weight")
    context = ops.rms_norm(g, fused, g.weight("hidden_norm.weight"), draft.rms_norm_eps)
    for layer in range(len(draft.layers)):
        key, value = _key_value(g, draft, layer, context, tables)
        shape: Shape = [1, draft.num_kv_heads, "rows", draft.head_dim]
        g.output(key, f"key.{layer}", shape)
        g.output(value, f"value.{layer}", shape)
    return g.model()


def build_block(
    draft: DraftConfig, kinds: tuple[DraftLayer, ...], selector: str, tensors: Tensors
) -> ModelProto:
    """Embeddings of [anchor, masks] and read-only caches to hidden rows [B, H].

    DFlash2's also come projected [B, r], by the weight named `selector`, for its walk.
    """
    g = GraphBuilder("block", tensors)
    hidden = g.input("embeds", "float32", ["block", draft.hidden_size])
    tables = ops.rotary_inputs(g, "block", draft.rope.rotary_dim // 2)
    masks = [
        g.input(f"mask.{i}", "float32", ["block", f"rows_{i}_block"]) for i in range(len(kinds))
    ]
    for i, layer in enumerate(draft.layers):
        kind = kinds.index(layer)
        hidden = _layer(g, draft, i, hidden, tables, masks[kind], f"rows_{kind}")
    normed = ops.rms_norm(g, hidden, g.weight("norm.weight"), draft.rms_norm_eps)
    g.output(normed, "hidden", ["block", draft.hidden_size])
    if draft.selector is not None:
        g.output(ops.linear(g, normed, selector), "projected", ["block", draft.selector.rank])
    return g.model()


def build_append(draft: DraftConfig, tensors: Tensors) -> ModelProto:
    """Write new rows [1, kv heads, n, d] at the given row numbers of a cache, in place if bound so.

    Serves key and value of any layer; host-memory caches are written by NumPy instead.
    """
    g = GraphBuilder("append", tensors)
    heads, d = draft.num_kv_heads, draft.head_dim
    cache = g.input("cache", "float32", [1, heads, "capacity", d])
    new = g.input("new", "float32", [1, heads, "rows", d])
    rows = g.input("row_numbers", "int64", ["rows"])
    count = g.op("Shape", rows)
    shape = g.op("Concat", g.constant([1, heads]), count, g.constant([1]), axis=0)
    head_ids = g.op("Expand", g.constant(np.arange(heads).reshape(1, heads, 1, 1)), shape)
    row_ids = g.op("Expand", ops.reshape(g, rows, 1, 1, -1, 1), shape)
    batch_ids = g.op("Expand", g.constant([[[[0]]]]), shape)
    indices = g.op("Concat", batch_ids, head_ids, row_ids, axis=-1)
    g.ops("ScatterND", cache, indices, new, names=["present"])
    g.direct_output("present", [1, heads, "capacity", d])
    return g.model()


def _key_value(
    g: GraphBuilder, draft: DraftConfig, layer: int, x: str, tables: ops.Tables
) -> tuple[str, str]:
    """Rotated keys and values [1, kv heads, n, d] of context or block rows x [n, H]."""
    name, size = f"layers.{layer}.self_attn", draft.num_kv_heads * draft.head_dim
    key, value = g.ops(
        "Split", ops.linear(g, x, f"{name}.kv"), g.constant([size, size]), count=2, axis=-1
    )
    key = _rotated(g, draft, key, f"{name}.k_norm.weight", tables, draft.num_kv_heads)
    return _heads_first(g, key, draft.num_kv_heads, draft.head_dim), _heads_first(
        g, value, draft.num_kv_heads, draft.head_dim
    )


def _rotated(
    g: GraphBuilder, draft: DraftConfig, x: str, norm: str, tables: ops.Tables, num_heads: int
) -> str:
    """Normed and rotated heads [1, n, heads * d]."""
    d = draft.head_dim
    heads = ops.normed_heads(g, x, g.weight(norm), draft.rms_norm_eps, num_heads, d)
    return ops.rotary(g, heads, tables, num_heads, d, draft.rope.rotary_dim)


def _heads_first(g: GraphBuilder, x: str, num_heads: int, head_dim: int) -> str:
    """[n, heads * d] or [1, n, heads * d] to [1, heads, n, d]."""
    return g.op("Transpose", ops.reshape(g, x, 1, -1, num_heads, head_dim), perm=[0, 2, 1, 3])


def _layer(
    g: GraphBuilder,
    draft: DraftConfig,
    i: int,
    hidden: str,
    tables: ops.Tables,
    mask: str,
    rows: str,
) -> str:
    name = f"layers.{i}"

    def attend(x: str) -> str:
        attended = _attention(g, draft, i, x, tables, mask, rows)
        return ops.linear(g, attended, f"{name}.self_attn.o_proj.weight")

    def mlp(x: str) -> str:
        weights = (f"{name}.mlp.gate_up", f"{name}.mlp.down_proj.weight")
        return ops.swiglu(g, x, *weights, draft.intermediate_size)

    hidden = _sublayer(
        g, draft, hidden, f"{name}.input_layernorm", f"{name}.attention_conv", attend
    )
    return _sublayer(g, draft, hidden, f"{name}.post_attention_layernorm", f"{name}.mlp_conv", mlp)


def _sublayer(
    g: GraphBuilder,
    draft: DraftConfig,
    hidden: str,
    norm: str,
    conv: str,
    sublayer: Callable[[str], str],
) -> str:
    """Residual sublayer on the normed rows, between DFlash2's convolutions if it has them."""
    normed = ops.rms_norm(g, hidden, g.weight(f"{norm}.weight"), draft.rms_norm_eps)
    if draft.conv is None:
        return g.op("Add", hidden, sublayer(normed))
    pair = DynamicConv(g, draft, conv, normed)
    return g.op("Add", hidden, pair.after(sublayer(pair.before(normed))))


def _attention(
    g: GraphBuilder,
    draft: DraftConfig,
    i: int,
    x: str,
    tables: ops.Tables,
    mask: str,
    rows: str,
) -> str:
    """Attention over cache and block with one softmax, the cache being read only.

    The query heads of one K/V head are stacked as rows, so keys are never expanded.
    """
    name, d, kv = f"layers.{i}.self_attn", draft.head_dim, draft.num_kv_heads
    groups = draft.num_heads // kv
    cache: Shape = [1, kv, rows, d]
    past_key = g.input(f"past_key_values.{i}.key", "float32", cache)
    past_value = g.input(f"past_key_values.{i}.value", "float32", cache)
    key, value = _key_value(g, draft, i, x, tables)
    query = _query(g, draft, name, x, tables)
    scores = g.op("Concat", _scores(g, query, past_key), _scores(g, query, key), axis=-1)
    split_rows = g.op("Concat", _rows(g, past_key), _rows(g, key), axis=0)
    scaled = g.op("Mul", scores, g.constant(d**-0.5, np.float32))
    grouped = _regroup(g, scaled, mask, [kv, groups])
    weights = g.op("Softmax", g.op("Add", grouped, mask), axis=-1)
    weights = g.op("Reshape", weights, g.op("Shape", scores))
    past_part, block_part = g.ops("Split", weights, split_rows, count=2, axis=-1)
    mixed = g.op("Add", g.op("MatMul", past_part, past_value), g.op("MatMul", block_part, value))
    heads = ops.reshape(g, mixed, draft.num_heads, -1, d)
    return ops.reshape(g, g.op("Transpose", heads, perm=[1, 0, 2]), -1, draft.num_heads * d)


def _query(g: GraphBuilder, draft: DraftConfig, name: str, x: str, tables: ops.Tables) -> str:
    """Rotated queries [1, kv heads, groups * B, d]."""
    q = ops.linear(g, x, f"{name}.q_proj.weight")
    q = _rotated(g, draft, q, f"{name}.q_norm.weight", tables, draft.num_heads)
    q = _heads_first(g, q, draft.num_heads, draft.head_dim)
    return ops.reshape(g, q, 1, draft.num_kv_heads, -1, draft.head_dim)


def _scores(g: GraphBuilder, query: str, key: str) -> str:
    return g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))


def _rows(g: GraphBuilder, cache: str) -> str:
    return g.op("Shape", cache, start=2, end=3)


def _regroup(g: GraphBuilder, scores: str, mask: str, heads: list[int]) -> str:
    """[1, kv, groups * B, T] to [kv, groups, B, T], so that mask [B, T] broadcasts."""
    shape = g.op("Concat", g.constant(heads), g.op("Shape", mask), axis=0)
    return g.op("Reshape", scores, shape)
