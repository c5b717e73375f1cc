"""DFlash and DFlash2 drafters with z-lab's tensor names, and their files.

Knows the layers and config.json. Knows nothing of targets beyond their sizes, or of training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import HIDDEN, TAPS
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BLOCK = 8
WINDOW = 48
CONV, GROUP = 2, 16
RANK, CANDIDATES = 32, 8
THETA = 10000.0
HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 4, 2, 32, 384, 2
CODEBOOKS = ("predecessor_codebook", "successor_codebook")


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=0.5 * inputs**-0.5)
    return linear


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, L, d] of one-dimensional positions [B, L]."""
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)[:, None]
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    half = x.shape[-1] // 2
    return x * rope[0] + torch.cat((-x[..., half:], x[..., :half]), -1) * rope[1]


class Attention(nn.Module):
    """Block rows attend to the context's keys and to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = _linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = _linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = _linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)

    def forward(self, x: Tensor, context: Tensor, ropes: Any, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, HEADS, HEAD_DIM)).transpose(1, 2)
        rows = torch.cat((context, x), 1)
        shape = (batch, rows.shape[1], KV_HEADS, HEAD_DIM)
        k = self.k_norm(self.k_proj(rows).view(shape)).transpose(1, 2)
        v = self.v_proj(rows).view(shape).transpose(1, 2)
        q, k = _rotate(q, ropes[0]), _rotate(k, ropes[1])
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(HIDDEN, MLP), _linear(HIDDEN, MLP)
        self.down_proj = _linear(MLP, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Convolution(nn.Module):
    """DFlash2's grouped dynamic causal convolution around a sublayer; it starts as identity."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.zeros(2, CONV, HIDDEN)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(HIDDEN, 2 * CONV * (HIDDEN // GROUP), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> Tensor:
        """Per row, side, tap and channel: base plus what the row's input adds to its group."""
        groups = self.kernel_projection(x).view(*x.shape[:-1], 2, CONV, HIDDEN // GROUP)
        return self.base_kernel + groups.repeat_interleave(GROUP, -1)

    @staticmethod
    def apply_side(x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """Mix each row with its left neighbours inside its block of BLOCK rows."""
        blocks = x.unflatten(1, (-1, BLOCK))
        kernels = kernels[..., side, :, :].unflatten(1, (-1, BLOCK))
        total = kernels[..., 0, :] * blocks
        for tap in range(1, CONV):
            shifted = F.pad(blocks[:, :, :-tap], (0, 0, tap, 0))
            total = total + kernels[..., tap, :] * shifted
        return total.flatten(1, 2)


class Layer(nn.Module):
    """One decoder layer, with convolutions in DFlash2."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        self.attention_conv = Convolution() if second else None
        self.mlp_conv = Convolution() if second else None

    def forward(self, x: Tensor, context: Tensor, ropes: Any, mask: Tensor) -> Tensor:
        hidden = self.input_layernorm(x)
        x = x + _convolved(
            self.attention_conv, hidden, lambda h: self.self_attn(h, context, ropes, mask)
        )
        return x + _convolved(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def _convolved(conv: Convolution | None, hidden: Tensor, sublayer: Any) -> Tensor:
    if conv is None:
        return sublayer(hidden)
    kernels = conv.kernels(hidden)
    inner = sublayer(conv.apply_side(hidden, kernels, 0))
    return conv.apply_side(inner, kernels, 1)


class Selector(nn.Module):
    """DFlash2's scores of the best candidates given the token before."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocabulary, RANK)
        self.successor_codebook = nn.Embedding(vocabulary, RANK)
        self.hidden_projection = _linear(HIDDEN, RANK)
        for name in CODEBOOKS:
            nn.init.normal_(getattr(self, name).weight, std=0.3)

    def forward(self, hidden: Tensor, unary: Tensor, ids: Tensor, before: Tensor) -> Tensor:
        """Scores [..., K] of the candidates `ids` with logits `unary` after the ids `before`."""
        left = self.predecessor_codebook(before) * self.hidden_projection(hidden)
        return unary + (left[..., None, :] * self.successor_codebook(ids)).sum(-1)


class Draft(nn.Module):
    """A drafter; embeddings and head are the target's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.second = config["architectures"] == ["DFlash2DraftModel"]
        self.window: int | None = config["sliding_window"]
        self.layers = nn.ModuleList(Layer(self.second) for _ in range(LAYERS))
        taps = config["dflash_config"]["target_layer_ids"]
        self.fc = _linear(len(taps) * HIDDEN, HIDDEN)
        self.hidden_norm, self.norm = Norm(HIDDEN), Norm(HIDDEN)
        if self.second:
            self.candidate_selector = Selector(config["vocab_size"])

    def forward(
        self, noise: Tensor, at: Tensor, features: Tensor, context_at: Tensor, mask: Tensor
    ) -> Tensor:
        """States of the block rows; `mask` [B, 1, rows, context + rows] is true where visible."""
        context = self.hidden_norm(self.fc(features))
        ropes = rotary(at), rotary(torch.cat((context_at, at), 1))
        for layer in self.layers:
            noise = layer(noise, context, ropes, mask)
        return self.norm(noise)


def make_config(kind: str, target: nn.Module, mask_id: int) -> dict[str, Any]:
    """config.json of a drafter of the kind `dflash` or `dflash2` for a target."""
    second, text = kind == "dflash2", target.config.text_config
    own: dict[str, Any] = {
        "block_size": BLOCK, "mask_token_id": mask_id, "trained_on_media": True,
        "target_layer_ids": list(TAPS[target.config.model_type]),
    }  # fmt: skip
    if second:
        own |= {"conv_kernel_size": CONV, "conv_group_size": GROUP}
        own |= {"selector_rank": RANK, "selector_top_k": CANDIDATES}
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3", "dtype": "float16", "dflash_config": own,
        "attention_bias": False, "attention_dropout": 0.0, "block_size": BLOCK,
        "head_dim": HEAD_DIM, "hidden_act": "silu", "hidden_size": HIDDEN, "is_causal": False,
        "intermediate_size": MLP, "max_position_embeddings": 8192, "max_window_layers": LAYERS,
        "layer_types": ["sliding_attention" if second else "full_attention"] * LAYERS,
        "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
        "num_target_layers": text.num_hidden_layers, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6, "rope_theta": THETA,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "sliding_window": WINDOW if second else None, "use_sliding_window": second,
        "tie_word_embeddings": False, "vocab_size": text.vocab_size,
    }  # fmt: skip


def save_draft(draft: Draft, folder: Path) -> None:
    """Write config.json and fp16 weights; the codebooks' names end without `.weight`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(draft.config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {
        name.removesuffix(".weight") if "codebook" in name else name: value.half().contiguous()
        for name, value in draft.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load_draft(folder: Path) -> Draft:
    """Read what `save_draft` wrote, in fp32."""
    draft = Draft(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    tensors = load_file(folder / "model.safetensors")
    draft.load_state_dict(
        {f"{n}.weight" if "codebook" in n else n: v.float() for n, v in tensors.items()}
    )
    return draft.eval()
