"""The MTP head of Qwen3.5-family checkpoints: one attention layer that predicts a token further.

A row joins the embedding of the next token with the hidden row before it (after the final norm);
the output feeds the target's head, and the next row of a chain. Keeps K/V of its own.
"""

from __future__ import annotations

from onnx import ModelProto

from ..stored import Tensors
from ..text_config import TextConfig
from . import ops
from .attention import CausalAttention, mlp
from .builder import GraphBuilder


def build_mtp(text: TextConfig, tensors: Tensors) -> ModelProto:
    """Rows of (next embedding, hidden) [rows, H] to hidden rows [rows, H] after the head's norm."""
    g, width = GraphBuilder("mtp", tensors), text.hidden_size
    embeds = g.input("inputs_embeds", "float32", [1, "rows", width])
    before = g.input("past_hidden", "float32", ["rows", width])
    tables = ops.rotary_inputs(g, "rows", text.rope.rotary_dim // 2)
    attention = CausalAttention(g, text, embeds, tables)

    def norm(x: str, name: str) -> str:
        scale = ops.norm_scale(g, f"mtp.{name}.weight", text.zero_centred_norms)
        return ops.rms_norm(g, x, scale, text.rms_norm_eps)

    joined = g.op(
        "Concat",
        norm(ops.reshape(g, embeds, -1, width), "pre_fc_norm_embedding"),
        norm(before, "pre_fc_norm_hidden"),
        axis=-1,
    )
    hidden = ops.linear(g, joined, "mtp.fc.weight")
    normed = norm(hidden, "layers.0.input_layernorm")
    mixed = attention.emit("mtp.layers.0.self_attn", 0, normed)
    hidden = g.op("Add", *mlp(g, text, "mtp.layers.0", hidden, mixed))
    g.output(norm(hidden, "norm"), "hidden", ["rows", width])
    return g.model()
