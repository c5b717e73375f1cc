"""The hybrid target: a small Qwen3.5 with Gated DeltaNet layers, begun from the Qwen3-VL one.

Knows its configuration, which tensors the finished pure-attention miniature can give it, and what
its layers are compared with at first. Knows nothing of data, losses' weights or files.
"""

from __future__ import annotations

import torch
from model import HIDDEN, VISION, shared_config, special_ids
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

LAYERS, INTERVAL, HEAD_DIM, ROTARY = 8, 4, 64, 0.5
# Layers of the hybrid that begin with a layer of the other; two of its attention layers, which do
# most of the looking, come along. Layers 2 and 6 begin as nothing.
SAME = {0: 0, 1: 1, 3: 2, 4: 3, 5: 4, 7: 5}


def make_hybrid_config(tokenizer: Tokenizer) -> Qwen3_5Config:
    """Configuration of the hybrid target."""
    ids = special_ids(tokenizer)
    text = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": HIDDEN, "intermediate_size": 384,
        "num_hidden_layers": LAYERS, "full_attention_interval": INTERVAL, "attn_output_gate": True,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "bos_token_id": ids.pad, "eos_token_id": ids.stop, "pad_token_id": None,
        "partial_rotary_factor": ROTARY,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "partial_rotary_factor": ROTARY,
                            "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    }  # fmt: skip
    return Qwen3_5Config(text_config=text, vision_config=VISION, **shared_config(tokenizer))


@torch.no_grad()
def make_hybrid(tokenizer: Tokenizer, source: nn.Module) -> nn.Module:
    """A hybrid that holds what it can of `source`, a trained Qwen3-VL with the same tokenizer."""
    target = Qwen3_5ForConditionalGeneration(make_hybrid_config(tokenizer))
    target.model.visual.load_state_dict(source.model.visual.state_dict(), strict=False)
    text, given = target.model.language_model, source.model.language_model
    text.embed_tokens.load_state_dict(given.embed_tokens.state_dict())
    _copy_norm(text.norm, given.norm)
    for index, layer in enumerate(text.layers):
        _begin(layer)
        if index in SAME:
            other = given.layers[SAME[index]]
            layer.mlp.load_state_dict(other.mlp.state_dict())
            _copy_norm(layer.input_layernorm, other.input_layernorm)
            _copy_norm(layer.post_attention_layernorm, other.post_attention_layernorm)
            if hasattr(layer, "self_attn"):
                _copy_attention(layer.self_attn, other.self_attn)
    return target


def _copy_norm(norm: nn.Module, other: nn.Module, factor: float = 1.0) -> None:
    """The hybrid's norms store how far a weight is from one."""
    norm.weight[: other.weight.shape[0]] = other.weight * factor - 1


def _begin(layer: nn.Module) -> None:
    """A layer that changes nothing yet but lets gradients in."""
    for name, param in layer.named_parameters():
        if param.ndim == 2:
            nn.init.normal_(param, std=0.5 * param.shape[1] ** -0.5)
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(param)
    if hasattr(layer, "linear_attn"):
        # Heads forget within some 3 to 300 rows; the library's start forgets at once.
        steps = torch.logspace(-2.5, -0.5, layer.linear_attn.num_v_heads)
        layer.linear_attn.dt_bias.copy_(steps.expm1().log())
        layer.linear_attn.A_log.zero_()
        nn.init.normal_(layer.linear_attn.conv1d.weight, std=0.2)
        layer.linear_attn.conv1d.weight[..., -1] += 1


def _copy_attention(attention: nn.Module, other: nn.Module) -> None:
    """Old heads fill the rotated half of the new, wider ones; open gates at a half are made up for.

    The norms run over twice the width and the scores are divided by more: a factor of 2**-0.25 on
    queries and keys makes up for both.
    """
    half = other.head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        new, old = (getattr(part, name).weight for part in (attention, other))
        heads = old.shape[0] // half
        rows = new.view(heads, -1, HEAD_DIM, HIDDEN)  # of a query head: query, gate
        rows[:, 0, half:] *= 0.1 if name != "v_proj" else 1.0
        rows[:, 0, :half] = old.view(heads, half, HIDDEN)
        rows[:, 1:] = 0
    old = other.o_proj.weight.view(HIDDEN, -1, half)
    attention.o_proj.weight.view(HIDDEN, -1, HEAD_DIM)[..., :half] = 2 * old
    for name in ("q_norm", "k_norm"):
        _copy_norm(getattr(attention, name), getattr(other, name), 2**-0.25)


def distance(states: list[Tensor], others: list[Tensor]) -> Tensor:
    """How far the layers are from the other model's, as a share of the latter's variance."""
    parts = [
        (states[index] - others[other]).square().mean() / others[other].var()
        for index, other in SAME.items()
    ]
    return torch.stack(parts).mean()
