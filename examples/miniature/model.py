"""The target, a small Qwen3-VL, and a forward pass made for training on one CPU core.

The modules and weights are transformers' own. The forward pass does the same sums as theirs (the
evaluation checks it) but takes a batch of equal-sized gray pages as one dense tensor. It also runs
the hybrid (hybrid.py): the layers' own modules say which mixer they need.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mixers import full_attention, linear_attention, norm, rotate
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_vl import modeling_qwen3_vl as hf

# Layers whose output the drafters see, by model type.
TAPS = {"qwen3_vl": (2, 3, 4), "qwen3_5": (3, 4, 5)}
HIDDEN = 128
VISION = {
    "depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "in_channels": 3,
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN, "num_position_embeddings": 256,
}  # fmt: skip
Canvas = tuple[int, int]


class Ids(NamedTuple):
    """Ids of the special tokens that the scripts use."""

    pad: int
    stop: int
    image: int
    mask: int


def special_ids(tokenizer: Tokenizer) -> Ids:
    """Look the special tokens up."""
    names = ("endoftext", "im_end", "image_pad", "mask")
    return Ids(*(tokenizer.token_to_id(f"<|{name}|>") for name in names))


def make_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """Configuration of the target."""
    ids = special_ids(tokenizer)
    text = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": HIDDEN, "intermediate_size": 384,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "bos_token_id": ids.pad, "eos_token_id": ids.stop, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    }  # fmt: skip
    vision = VISION | {"deepstack_visual_indexes": [0, 1]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **shared_config(tokenizer))


def shared_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """What both architectures say beside the text and vision configurations."""
    find = tokenizer.token_to_id
    return {
        "image_token_id": find("<|image_pad|>"),
        "video_token_id": find("<|video_pad|>"),
        "vision_start_token_id": find("<|vision_start|>"),
        "vision_end_token_id": find("<|vision_end|>"),
        "tie_word_embeddings": True,
    }


def make_target(tokenizer: Tokenizer, weights: Path | None = None) -> nn.Module:
    """A fresh target, or the one saved in the folder `weights`, in fp32."""
    if weights is not None:
        return AutoModelForImageTextToText.from_pretrained(weights, dtype=torch.float32)
    target = Qwen3VLForConditionalGeneration(make_config(tokenizer))
    nn.init.normal_(target.model.language_model.embed_tokens.weight, std=0.05)
    return target


@lru_cache(maxsize=64)
def _grid(canvas: Canvas, visual: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Position indices and weights, and rotary cosines and sines, of one page."""
    grid = torch.tensor([[1, 2 * canvas[0], 2 * canvas[1]]])
    indices, weights = hf.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=visual.num_grid_per_side,
        mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners,
        spatial_merge_size=visual.spatial_merge_size,
        kwargs={},
    )
    positions = hf.get_vision_position_ids(grid, visual.spatial_merge_size, kwargs={})
    cos, sin = visual.rotary_pos_emb(torch.zeros(1), positions)
    return indices, weights, cos, sin


def _vision_block(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attention, (batch, length, width) = block.attn, x.shape
    qkv = attention.qkv(block.norm1(x)).view(batch, length, 3, attention.num_heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
    x = x + attention.proj(mixed)
    return x + block.mlp(block.norm2(x))


def encode_pages(target: nn.Module, patches: Tensor, canvas: Canvas) -> list[Tensor]:
    """Image rows and DeepStack rows, each [B, cells, H], of gray patches [B, 4 * cells, 256].

    The hybrid's family has no DeepStack.
    """
    visual, batch = target.model.visual, patches.shape[0]
    states = _vision_states(visual, patches, canvas)
    deep = [states[index] for index in getattr(visual, "deepstack_visual_indexes", ())]
    mergers = [visual.merger, *getattr(visual, "deepstack_merger_list", ())]
    pairs = zip(mergers, [states[-1], *deep], strict=True)
    return [merger(x).view(batch, -1, HIDDEN) for merger, x in pairs]


def _vision_states(visual: nn.Module, patches: Tensor, canvas: Canvas) -> list[Tensor]:
    """Output of every block."""
    indices, weights, cos, sin = _grid(canvas, visual)
    kernel = visual.patch_embed.proj.weight.sum((1, 2)).flatten(1)  # all channels are equal
    x = F.linear(patches, kernel, visual.patch_embed.proj.bias)
    x = x + (visual.pos_embed(indices) * weights[:, :, None]).sum(1)
    states = []
    for block in visual.blocks:
        x = _vision_block(block, x, cos, sin)
        states.append(x)
    return states


def text_layer(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One decoder layer of either architecture."""
    hidden = norm(layer.input_layernorm, x)
    if hasattr(layer, "linear_attn"):
        x = x + linear_attention(layer.linear_attn, hidden)
    else:
        x = x + full_attention(layer.self_attn, hidden, cos, sin)
    return x + layer.mlp(norm(layer.post_attention_layernorm, x))


def embed(target: nn.Module, ids: Tensor, rows: Tensor, images: list[Tensor]) -> Tensor:
    """Input rows [B, L, H]; the first of `images` goes to the columns `rows`."""
    x = target.model.language_model.embed_tokens(ids)
    return x.index_copy(1, rows, images[0].to(x.dtype)) if images else x


def rope(target: nn.Module, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, L, d] of M-RoPE positions [3, B, L]."""
    cos, sin = target.model.language_model.rotary_emb(x, positions)
    return cos[:, None], sin[:, None]


def layer_states(
    target: nn.Module, ids: Tensor, positions: Tensor, rows: Tensor, images: list[Tensor]
) -> list[Tensor]:
    """Output [B, L, H] of every decoder layer."""
    x = embed(target, ids, rows, images)
    cos, sin = rope(target, x, positions)
    states = []
    for index, layer in enumerate(target.model.language_model.layers):
        x = text_layer(layer, x, cos, sin)
        if index + 1 < len(images):
            x = x.index_add(1, rows, images[index + 1].to(x.dtype))
        states.append(x)
    return states


def run_text(
    target: nn.Module, ids: Tensor, positions: Tensor, rows: Tensor, images: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Normed last states [B, L, H] and concatenated taps; `images` go to the columns `rows`."""
    states = layer_states(target, ids, positions, rows, images)
    taps = torch.cat([states[index] for index in TAPS[target.config.model_type]], -1)
    return norm(target.model.language_model.norm, states[-1]), taps
