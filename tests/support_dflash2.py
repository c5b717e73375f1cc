"""DFlash2's convolution and selector in plain NumPy, from the tensors of a checkpoint file.

Written from the formulas and in double precision; knows nothing of the package's graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_onnx.runtime.drafters.base import BlockRows

Array = NDArray[np.float64]
Tensors = dict[str, np.ndarray]


def convolve(rows: Array, base: Array, dynamic: Array) -> Array:
    """Rows [B, H] by taps base [c, H] + dynamic [B, c, groups]; nothing lies before row 0."""
    result, width = np.zeros_like(rows), rows.shape[1] // dynamic.shape[2]
    for t, h, tap in np.ndindex(*rows.shape, base.shape[0]):
        if t >= tap:
            coefficient = base[tap, h] + dynamic[t, tap, h // width]
            result[t, h] += coefficient * rows[t - tap, h]
    return result


def rms_norm(rows: Array, weight: np.ndarray, eps: float = 1e-6) -> Array:
    return rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps) * weight


class Block:
    """A DFlash2 drafter whose query weights are zero: attention is the mean of all values.

    Keys, positions and head layout then have no part, and what is left fits into a few lines.
    """

    def __init__(self, tensors: Tensors, num_heads: int, num_kv_heads: int) -> None:
        self._tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
        self._repeats = num_heads // num_kv_heads
        self._kv_heads = num_kv_heads
        self._num_layers = 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("layers."))

    def hidden(self, features: np.ndarray, embeds: np.ndarray) -> Array:
        """Hidden rows [B, H] of embeddings [B, H] after context features [n, T*H]."""
        w = self._tensors
        context = rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"])
        rows = embeds.astype(np.float64)
        for i in range(self._num_layers):
            rows = self._layer(f"layers.{i}", rows, context)
        return rms_norm(rows, w["norm.weight"])

    def _layer(self, name: str, rows: Array, context: Array) -> Array:
        w = self._tensors
        normed = rms_norm(rows, w[f"{name}.input_layernorm.weight"])
        before, after = self._kernels(f"{name}.attention_conv", normed)
        attended = self._attend(f"{name}.self_attn", convolve(normed, *before), context)
        rows = rows + convolve(attended, *after)
        normed = rms_norm(rows, w[f"{name}.post_attention_layernorm.weight"])
        before, after = self._kernels(f"{name}.mlp_conv", normed)
        return rows + convolve(self._mlp(f"{name}.mlp", convolve(normed, *before)), *after)

    def _kernels(self, name: str, normed: Array) -> list[tuple[Array, Array]]:
        """Base and dynamic part of either side; both come from the unconvolved rows."""
        base = self._tensors[f"{name}.base_kernel"]
        dynamic = normed @ self._tensors[f"{name}.kernel_projection.weight"].T
        dynamic = dynamic.reshape(len(normed), 2, base.shape[1], -1)
        return [(base[side], dynamic[:, side]) for side in (0, 1)]

    def _attend(self, name: str, rows: Array, context: Array) -> Array:
        value, out = self._tensors[f"{name}.v_proj.weight"], self._tensors[f"{name}.o_proj.weight"]
        mean = (np.concatenate([context, rows]) @ value.T).mean(axis=0)
        heads = np.repeat(mean.reshape(self._kv_heads, -1), self._repeats, axis=0)
        return np.tile(out @ heads.reshape(-1), (len(rows), 1))

    def _mlp(self, name: str, rows: Array) -> Array:
        gate, up, down = (
            self._tensors[f"{name}.{k}_proj.weight"].T for k in ("gate", "up", "down")
        )
        gated = rows @ gate
        return (gated / (1 + np.exp(-gated)) * (rows @ up)) @ down


@dataclass(frozen=True)
class Lattice:
    """All scores of a block: `first` [K] after the anchor, `rest` [n-1, K, K] from row to row.

    Candidates `ids` [n, K] ascend within a row.
    """

    ids: NDArray[np.int64]
    first: Array
    rest: Array

    def scores(self, path: Sequence[int]) -> list[Array]:
        """The scores [K] that each id of a path was chosen by."""
        rows = [self.first]
        for t, token in enumerate(path[:-1]):
            rows.append(self.rest[t, np.flatnonzero(self.ids[t] == token)[0]])
        return rows

    def greedy(self) -> tuple[list[int], float]:
        """The best walk, and the smallest lead that any of its choices had."""
        path: list[int] = []
        leads = []
        for t in range(len(self.ids)):
            scores = self.scores([*path, -1])[t]
            path.append(int(self.ids[t, scores.argmax()]))
            leads.append(-np.diff(np.sort(scores)[-2:][::-1])[0])
        return path, float(min(leads))


def block_rows(tensors: Tensors, hidden: np.ndarray) -> BlockRows:
    """Hidden rows [n, H] as a block's, with the selector's projections of them."""
    weight = tensors["candidate_selector.hidden_projection.weight"].astype(np.float32)
    return BlockRows(hidden, hidden @ weight.T)


def lattice(
    tensors: Tensors,
    head: np.ndarray,
    hidden: np.ndarray,
    anchor: int,
    top_k: int,
    banned: Collection[int] = (),
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> Lattice:
    """The selector's scores for hidden rows [n, H], from the head [V, H] and the two codebooks."""
    before, after = (
        tensors[f"candidate_selector.{kind}_codebook"].astype(np.float64)
        for kind in ("predecessor", "successor")
    )
    rows = hidden.astype(np.float64)
    projected = rows @ tensors["candidate_selector.hidden_projection.weight"].T.astype(np.float64)
    logits = rows @ head.T.astype(np.float64) * multiplier
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits[:, list(banned)] = -np.inf
    ids = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :top_k], axis=1)
    values = np.take_along_axis(logits, ids, axis=1)
    first = values[0] + after[ids[0]] @ (before[anchor] * projected[0])
    rest = [
        values[t] + (before[ids[t - 1]] * projected[t]) @ after[ids[t]].T
        for t in range(1, len(ids))
    ]
    return Lattice(ids, first, np.array(rest))
