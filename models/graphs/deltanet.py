"""The Gated DeltaNet layer with deferred commit: replay what was accepted, then run new rows.

State that cannot be cropped is never advanced by a row that may be rejected: the layer gives the
state after the replay, the state after everything, and what is needed to replay the new rows.
"""

from __future__ import annotations

import numpy as np

from ..text_config import TextConfig
from . import ops, recurrence
from .builder import GraphBuilder
from .recurrence import GatedRows, Recurrence

# Fixed in the architecture's code, not in any config.json.
L2_EPS = 1e-6


class DeltaNet:
    """Emits the recurrent layers of a decoder graph."""

    def __init__(self, g: GraphBuilder, text: TextConfig, how: Recurrence) -> None:
        assert text.linear is not None
        self._g = g
        self._eps = text.rms_norm_eps
        self._linear = text.linear
        self._how = how
        mask = g.input("replay_mask", "float32", ["replay"])
        self._mask = g.op("Unsqueeze", mask, g.constant([1]))

    def emit(self, name: str, layer: int, x: str) -> str:
        """Layer weights `name`.* on normed rows x [rows, H] to [rows, H]."""
        g, linear = self._g, self._linear
        state = [1, linear.num_value_heads, linear.key_dim, linear.value_dim]
        heads, gates = linear.num_value_heads, [linear.conv_width, linear.value_width]
        sizes = g.constant([*gates, heads, heads])
        mixed, z, beta, decay = g.ops(
            "Split", ops.linear(g, x, f"{name}.in_proj"), sizes, count=4, axis=-1
        )
        query, key, value = self._convolved(name, layer, mixed)
        gate_shape = (1, -1, heads)
        decay = ops.reshape(g, self._decay(name, decay), *gate_shape)
        beta = ops.reshape(g, g.op("Sigmoid", beta), *gate_shape)
        rows = GatedRows(query, key, value, decay, beta)
        past = g.input(f"state.{layer}", "float32", state)
        committed, after = f"state_committed.{layer}", f"state_all.{layer}"
        recurrence.emit(g, linear, self._how, self._replayed(layer), past, committed)
        output = recurrence.emit(g, linear, self._how, rows, committed, after)
        kept = g.op("Concat", rows.key, rows.value, rows.decay, rows.beta, axis=-1)
        kept = ops.reshape(g, kept, -1, linear.replay_width)
        g.output(kept, f"replay_rows.{layer}", ["rows", linear.replay_width])
        return ops.linear(g, self._gated_norm(name, output, z), f"{name}.out_proj.weight")

    def _convolved(self, name: str, layer: int, mixed: str) -> list[str]:
        """Normed queries and keys, and values, each [1, rows, width], after the convolution."""
        g, linear = self._g, self._linear
        shape = [linear.conv_kernel - 1, linear.conv_width]
        window = g.input(f"conv_window.{layer}", "float32", shape)
        rows = g.op("Concat", window, mixed, axis=0)
        g.output(rows, f"conv_rows.{layer}", ["window_and_rows", linear.conv_width])
        last = ops.slice_axis(g, rows, 1 - linear.conv_kernel, ops.FULL_STOP, 0)
        g.output(last, f"conv_last.{layer}", shape)
        mixed = ops.causal_conv(g, rows, f"{name}.conv1d.weight", linear.conv_kernel)
        sizes = g.constant([linear.key_width, linear.key_width, linear.value_width])
        mixed = ops.reshape(g, ops.silu(g, mixed), 1, -1, linear.conv_width)
        query, key, value = g.ops("Split", mixed, sizes, count=3, axis=-1)
        return [self._l2_normed(query), self._l2_normed(key), value]

    def _l2_normed(self, x: str) -> str:
        """x / sqrt(sum x^2 + eps) per key head, as the RMSNorm that has the same values."""
        g, heads, d = self._g, self._linear.num_key_heads, self._linear.key_dim
        scale = g.constant(np.full(d, d**-0.5), np.float32)
        normed = ops.rms_norm(g, ops.reshape(g, x, -1, heads, d), scale, L2_EPS / d)
        return ops.reshape(g, normed, 1, -1, heads * d)

    def _decay(self, name: str, a: str) -> str:
        """Log-decay -exp(A_log) softplus(a + dt_bias) [rows, value heads]."""
        g = self._g
        rate = g.op("Neg", g.op("Exp", g.weight(f"{name}.A_log")))
        steps = g.op("Softplus", g.op("Add", a, g.weight(f"{name}.dt_bias")))
        return g.op("Mul", steps, rate)

    def _replayed(self, layer: int) -> GatedRows:
        """The kept rows of the block before; a masked one has decay and beta zero: identity."""
        g, linear = self._g, self._linear
        rows = g.input(f"replay.{layer}", "float32", ["replay", linear.replay_width])
        rows = ops.reshape(g, rows, 1, -1, linear.replay_width)
        heads = linear.num_value_heads
        sizes = g.constant([linear.key_width, linear.value_width, heads, heads])
        key, value, decay, beta = g.ops("Split", rows, sizes, count=4, axis=-1)
        decay, beta = (g.op("Mul", gate, self._mask) for gate in (decay, beta))
        return GatedRows(None, key, value, decay, beta)

    def _gated_norm(self, name: str, output: str, z: str) -> str:
        """RMSNorm per value head, times silu(z)."""
        g, heads, d = self._g, self._linear.num_value_heads, self._linear.value_dim
        per_head = ops.reshape(g, output, -1, heads, d)
        normed = ops.rms_norm(g, per_head, g.weight(f"{name}.norm.weight"), self._eps)
        return g.op("Mul", ops.reshape(g, normed, -1, heads * d), ops.silu(g, z))
