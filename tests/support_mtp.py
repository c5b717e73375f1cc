"""The MTP head in float64 NumPy, read from a checkpoint's own tensors; an independent reference.

One row joins E(t[i+1]) and the target's hidden row i; the head's layer attends to its own rows at
the rows' own M-RoPE positions. Beside it a conversation whose drafter's calls are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support_checkpoint import read
from support_prompts import Part, lay_out

from dflash_onnx.runtime.conversation import Conversation
from dflash_onnx.runtime.drafters.base import Observed, Proposal, Request
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.results import Result

Wide = NDArray[np.float64]


@dataclass
class MtpReference:
    """The head of the checkpoint in `folder`."""

    text: dict[str, Any]
    tensors: dict[str, Wide]

    @classmethod
    def load(cls, folder: Path) -> MtpReference:
        """Read configuration and weights, as they are stored."""
        config = read(folder / "config.json")
        tensors = load_file(folder / "model.safetensors")
        wide = {name: value.astype(np.float64) for name, value in tensors.items()}
        return cls(config.get("text_config", config), wide)

    def embed(self, ids: NDArray) -> Wide:
        """Embedding rows [n, H]."""
        return self.tensors[_named(self.tensors, "embed_tokens.weight")][ids]

    def logits(self, hidden: Wide) -> Wide:
        """Logits [n, V] of the head's rows, by the target's own output head."""
        tied = "lm_head.weight" not in self.tensors
        name = _named(self.tensors, "embed_tokens.weight") if tied else "lm_head.weight"
        return hidden @ self.tensors[name].T

    def rows(self, embeds: Wide, hidden: Wide, positions: NDArray) -> Wide:
        """The head's rows [n, H] after its norm, of rows at M-RoPE positions [3, n]."""
        joined = np.concatenate(
            [
                self._norm(embeds, "mtp.pre_fc_norm_embedding"),
                self._norm(hidden, "mtp.pre_fc_norm_hidden"),
            ],
            axis=-1,
        )
        x = joined @ self.tensors["mtp.fc.weight"].T
        layer = "mtp.layers.0"
        x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), positions)
        y = self._norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (self._linear(y, f"mlp.{name}_proj") for name in ("gate", "up"))
        x = x + self._linear(gate * _sigmoid(gate) * up, "mlp.down_proj")
        return self._norm(x, "mtp.norm")

    def _linear(self, x: Wide, name: str) -> Wide:
        return x @ self.tensors[f"mtp.layers.0.{name}.weight"].T

    def _norm(self, x: Wide, name: str) -> Wide:
        """The family's RMSNorm: its weights are what is added to one."""
        root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.text["rms_norm_eps"])
        return x / root * (1 + self.tensors[f"{name}.weight"])

    def _attention(self, x: Wide, positions: NDArray) -> Wide:
        """Causal attention whose query projection also holds a gate, head by head."""
        count, d = len(x), self.text["head_dim"]
        heads, shared = self.text["num_attention_heads"], self.text["num_key_value_heads"]
        query, gate = np.split(self._linear(x, "self_attn.q_proj").reshape(count, heads, -1), 2, -1)
        key, value = (
            self._linear(x, f"self_attn.{name}_proj").reshape(count, shared, d) for name in "kv"
        )
        query = self._rotated(self._norm(query, "mtp.layers.0.self_attn.q_norm"), positions)
        key = self._rotated(self._norm(key, "mtp.layers.0.self_attn.k_norm"), positions)
        output = np.zeros((count, heads, d))
        for i, h in np.ndindex(count, heads):
            kv = h * shared // heads
            scores = key[: i + 1, kv] @ query[i, h] / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            output[i, h] = weights @ value[: i + 1, kv] / weights.sum()
        gated = (output * _sigmoid(gate)).reshape(count, -1)
        return self._linear(gated, "self_attn.o_proj")

    def _rotated(self, x: Wide, positions: NDArray) -> Wide:
        """Partial rotary on halves; frequency i counts time, height or width in turn."""
        rope = self.text["rope_parameters"]
        half = int(self.text["head_dim"] * rope["partial_rotary_factor"]) // 2
        axes = np.zeros(half, np.int64)
        for axis in (1, 2):
            axes[axis : 3 * rope["mrope_section"][axis] : 3] = axis
        angles = positions[axes].T * rope["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = (first * cos - second * sin, second * cos + first * sin)
        return np.concatenate([*turned, rest], axis=-1)


def _named(tensors: dict[str, Wide], end: str) -> str:
    (name,) = (name for name in tensors if name.endswith(end))
    return name


def _sigmoid(x: Wide) -> Wide:
    return 1 / (1 + np.exp(-x))


@dataclass
class Watched:
    """A conversation whose drafter's calls are kept."""

    conversation: Conversation
    observed: list[Observed] = field(default_factory=list)
    proposed: list[tuple[int, Request, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        drafter = self.conversation.draft.drafter
        observe, propose = drafter.observe, drafter.propose

        def watched(rows: Observed) -> None:
            self.observed.append(rows._replace(hidden=rows.hidden.copy()))
            observe(rows)

        def watch(request: Request) -> Proposal:
            proposal = propose(request)
            self.proposed.append((len(self.observed), request, proposal.token_ids))
            return proposal

        drafter.observe, drafter.propose = watched, watch  # type: ignore[method-assign]

    def answer(self, parts: Sequence[Part], **options: Any) -> Result:
        plan = lay_out(self.conversation.model, parts)
        made = make_options(**{"max_new_tokens": 12} | options)
        return self.conversation.generate_plan(plan, made).result()

    def rows(self, count: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Embeddings, hidden rows and positions of the rows that the first calls showed."""
        parts = self.observed[:count]
        kept: dict[int, tuple] = {}
        for part in parts:
            for i in range(len(part.hidden)):
                row = (part.embeds[i], part.hidden[i], part.mrope_positions[:, i])
                kept = {r: v for r, v in kept.items() if r < part.first_row + i}
                kept[part.first_row + i] = row
        embeds, hidden, positions = zip(*kept.values(), strict=True)
        return np.array(embeds), np.array(hidden), np.array(positions).T


def reference_drafts(
    reference: MtpReference,
    watched: Watched,
    call: int,
    banned: Collection[int],
    without: Collection[int] = (),
) -> list[int]:
    """What the head drafts in a call, all its rows computed anew for each draft."""
    count, request, drafts = watched.proposed[call]
    shown, hidden, positions = watched.rows(count)
    embeds = np.concatenate([shown[1:], reference.embed(np.array([request.anchor]))])
    entries = [i for i in range(len(hidden)) if i not in without]
    embeds, hidden, positions = embeds[entries], hidden[entries], positions[:, entries]
    chosen: list[int] = []
    for step in range(len(drafts)):
        output = reference.rows(embeds, hidden, positions)
        logits = reference.logits(output[-1:])[0]
        logits[list(banned)] = -np.inf
        chosen.append(int(logits.argmax()))
        embeds = np.concatenate([embeds, reference.embed(np.array(chosen[-1:]))])
        hidden = np.concatenate([hidden, output[-1:]])
        place = np.full((3, 1), request.position + step)
        positions = np.concatenate([positions, place], axis=1)
    return chosen


def check_drafts(
    reference: MtpReference, watched: Watched, without: Collection[int] = (), first: int = 0
) -> None:
    """All drafts of calls from `first` on; the drafter cannot have entries of rows `without`."""
    assert watched.proposed
    banned = watched.conversation.model.manifest.banned_ids
    for call in range(first, len(watched.proposed)):
        drafts = watched.proposed[call][2]
        assert drafts == reference_drafts(reference, watched, call, banned, without), call
