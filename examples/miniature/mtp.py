"""Qwen3.5's multi-token prediction head: one more full-attention layer that drafts in a chain.

Knows the layer, its place in a target's model.safetensors (`mtp.*`, which transformers leaves
alone) and how a chain sees the rows before it. Knows nothing of losses or of accepting drafts.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Batch
from blocks import Features
from mixers import attention_output, norm, query_key_value
from model import HIDDEN, rope
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

PREFIX = "mtp."
DRAFTS = 3


class Mtp(nn.Module):
    """The head; it begins with the target's last full-attention layer and last norm."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        config, text = target.config.text_config, target.model.language_model
        last = len(text.layers) - 1 - config.layer_types[::-1].index("full_attention")
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(HIDDEN)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(HIDDEN)
        self.norm = Qwen3_5RMSNorm(HIDDEN)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, last)])
        self.norm.load_state_dict(text.norm.state_dict())
        self.layers[0].load_state_dict(text.layers[last].state_dict())

    def inputs(self, rows: Tensor, hidden: Tensor) -> Tensor:
        """Rows of the layer: the next token's embedding beside the state that said it."""
        rows = norm(self.pre_fc_norm_embedding, rows)
        return self.fc(torch.cat((rows, norm(self.pre_fc_norm_hidden, hidden)), -1))

    def forward(
        self, x: Tensor, ropes: tuple[Tensor, Tensor], seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """States of one link of the chain; adds its keys and values to those `seen`.

        Row i sees the rows up to i of the first link and its own row of the later ones.
        """
        layer, length = self.layers[0], x.shape[1]
        hidden = norm(layer.input_layernorm, x)
        q, k, v, gate = query_key_value(layer.self_attn, hidden, *ropes)
        seen.append((k, v))
        past, own = torch.ones(length, length).tril(), torch.eye(length)
        mask = torch.cat([past, *[own] * (len(seen) - 1)], -1).bool()
        keys, values = (torch.cat(parts, 2) for parts in zip(*seen, strict=True))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + attention_output(layer.self_attn, mixed, gate)
        return norm(self.norm, x + layer.mlp(norm(layer.post_attention_layernorm, x)))


def chain(mtp: Mtp, target: nn.Module, batch: Batch, features: Features) -> Tensor:
    """States [B, L, DRAFTS, H]: link d at column i says the token of column i + d + 2.

    The chain is fed the sequence's own tokens. A wrong draft ends a call, so what follows one does
    not matter.
    """
    hidden, states = features.states, []
    seen: list[tuple[Tensor, Tensor]] = []
    length = batch.ids.shape[1]
    inputs = F.pad(features.inputs, (0, 0, 0, DRAFTS))
    positions = F.pad(batch.positions, (0, DRAFTS))
    for link in range(DRAFTS):
        x = mtp.inputs(inputs[:, link + 1 : link + 1 + length], hidden)
        ropes = rope(target, x, positions[..., link : link + length])
        hidden = mtp(x, ropes, seen)
        states.append(hidden)
    return torch.stack(states, 2)


def save_mtp(mtp: Mtp, folder: Path) -> None:
    """Add the head to the target's weights in fp16."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors |= {PREFIX + name: t.half().contiguous() for name, t in mtp.state_dict().items()}
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o644)


def load_mtp(target: nn.Module, folder: Path) -> Mtp | None:
    """The head beside the target's weights, in fp32, if there is one."""
    tensors = load_file(folder / "model.safetensors")
    own = {n.removeprefix(PREFIX): t.float() for n, t in tensors.items() if n.startswith(PREFIX)}
    if not own:
        return None
    mtp = Mtp(target)
    mtp.load_state_dict(own)
    return mtp.eval()
