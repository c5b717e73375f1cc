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
    residual = _Residual(g, text, ops.reshape(g, embeds, -1, width))
    for i in range(text.num_layers):
        name = f"layers.{i}"
        normed = residual.normed(f"{name}.input_layernorm.weight")
        if deltanet and i in text.linear_layers:
            mixed = deltanet.emit(f"{name}.linear_attn", i, normed)
        else:
            mixed = attention.emit(f"{name}.self_attn", i, normed)
        residual.add(*mlp(g, text, name, residual.rows, mixed))
        if i in taps:
            # Before the DeepStack addition, as transformers' hidden_states records it.
            g.output(residual.total(), f"tap.{i}", ["rows", width])
        if i < num_deepstack:
            residual.add(residual.total(), deepstack[i])
    g.output(residual.normed("norm.weight"), "hidden", ["rows", width])
    return g.model()


class _Residual:
    """The residual rows [rows, H] and what is still to be added; a norm does both at once."""

    def __init__(self, g: GraphBuilder, text: TextConfig, rows: str) -> None:
        self._g = g
        self._text = text
        self.rows = rows
        self._added: str | None = None

    def add(self, rows: str, added: str) -> None:
        """Go on with the sum of `rows` and `added`."""
        self.rows, self._added = rows, added

    def total(self) -> str:
        """The sum, where it is wanted by itself."""
        if self._added is not None:
            self.rows, self._added = self._g.op("Add", self.rows, self._added), None
        return self.rows

    def normed(self, weight: str) -> str:
        """The sum after the RMSNorm `weight`."""
        g, text = self._g, self._text
        scale = ops.norm_scale(g, weight, text.zero_centred_norms)
        if self._added is None:
            return ops.rms_norm(g, self.rows, scale, text.rms_norm_eps)
        normed, self.rows = ops.add_and_norm(g, self.rows, self._added, scale, text.rms_norm_eps)
        self._added = None
        return normed


def build_head(
    name: str, weight: str, width: int, vocab_size: int, num_top: int, tensors: Tensors
) -> ModelProto:
    """The output head: chosen hidden rows to the top-k and (when fetched) full logits.

    `bias` [V] carries the ban list, so banned ids can never be chosen.
    """
    g = GraphBuilder(name, tensors)
    hidden = g.input("hidden", "float32", ["rows", width])
    rows = g.input("rows", "int64", ["chosen"])
    bias = g.input("bias", "float32", [vocab_size])
    chosen = g.op("Gather", hidden, rows, axis=0)
    g.ops("Add", ops.linear(g, chosen, weight), bias, names=["logits"])
    k = g.constant([num_top])
    # Of equal logits the lowest id comes first, as with ArgMax.
    g.ops("TopK", "logits", k, names=["top_values", "top_ids"], axis=-1, sorted=1)
    g.direct_output("top_values", ["chosen", num_top])
    g.direct_output("top_ids", ["chosen", num_top], "int64")
    g.direct_output("logits", ["chosen", vocab_size])
    return g.model()
