"""The text decoder with explicit caches, taps and DeepStack inputs, and the output head.

Attention and Gated DeltaNet layers in any order. Prefill, verify and plain decoding are the same
graph. Positions arrive as cosines and sines.
"""

from __future__ import annotations

from collections.abc import Collection

from onnx import ModelProto

from ..stored import Tensors
from ..text_config import TextConfig
from . import ops
from .attention import CausalAttention, mlp
from .builder import GraphBuilder
from .deltanet import DeltaNet
from .recurrence import Recurrence


def build_target(
    text: TextConfig,
    num_deepstack: int,
    taps: Collection[int],
    tensors: Tensors,
    recurrence: Recurrence,
) -> ModelProto:
    """The decoder graph: rows in, final-norm hidden rows, taps, grown caches and states out.

    `recurrence` is how Gated DeltaNet layers are emitted; it means nothing without such layers.
    """
    g = GraphBuilder("target", tensors)
    width = text.hidden_size
    embeds = g.input("inputs_embeds", "float32", [1, "rows", width])
    tables = ops.rotary_inputs(g, "rows", text.rope.rotary_dim // 2)
    deepstack = [
        g.input(f"deepstack.{k}", "float32", ["rows", width]) for k in range(num_deepstack)
    ]
    attention = CausalAttention(g, text, embeds, tables)
    deltanet = DeltaNet(g, text, recurrence) if text.linear else None
    hidden = ops.reshape(g, embeds, -1, width)
    for i in range(text.num_layers):
        name = f"layers.{i}"
        scale = ops.norm_scale(g, f"{name}.input_layernorm.weight", text.zero_centred_norms)
        normed = ops.rms_norm(g, hidden, scale, text.rms_norm_eps)
        if deltanet and i in text.linear_layers:
            mixed = deltanet.emit(f"{name}.linear_attn", i, normed)
        else:
            mixed = attention.emit(f"{name}.self_attn", i, normed)
        hidden = mlp(g, text, name, g.op("Add", hidden, mixed))
        if i in taps:
            # Before the DeepStack addition, as transformers' hidden_states records it.
            g.output(hidden, f"tap.{i}", ["rows", width])
        if i < num_deepstack:
            hidden = g.op("Add", hidden, deepstack[i])
    scale = ops.norm_scale(g, "norm.weight", text.zero_centred_norms)
    g.output(ops.rms_norm(g, hidden, scale, text.rms_norm_eps), "hidden", ["rows", width])
    return g.model()


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
