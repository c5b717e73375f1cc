"""The tiny target, of any supported architecture: its configuration files and its tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny_hybrid import (
    MODEL_TYPES,
    TEXT_ONLY,
    centre_norms,
    is_hybrid,
    layer_types,
    mtp_shapes,
    rope_config,
    text_config,
    text_layer,
)
from tiny_tokenizer import CHAT_TEMPLATE, SPARE_COLUMNS, SPECIALS, train_tokenizer
from tiny_weights import Shapes, fill, save, write_json


@dataclass(frozen=True)
class TargetSpec:
    """Arguments of `make_target`; with this `gain` greedy text varies instead of looping."""

    architecture: str = "Qwen3VLForConditionalGeneration"
    mtp: bool = False
    interval: int = 4
    seed: int = 0
    tied: bool = True
    vocab: int = 512
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    mrope_section: tuple[int, int, int] = (3, 3, 2)
    theta: float = 5e6
    vision_hidden: int = 32
    vision_depth: int = 3
    vision_heads: int = 2
    vision_mlp: int = 64
    vision_positions: int = 64
    deepstack: tuple[int, ...] = (0, 1)
    dtype: str = "float32"
    shards: int = 1
    min_pixels: int = 1024
    max_pixels: int = 262144
    context: int = 4096
    close_logits: bool = False
    logit_scale: float = 1.0
    gain: float = 1.5
    table_std: float = 0.2

    @property
    def root(self) -> str:
        """Where the text decoder's tensors lie."""
        return "model" if self.architecture in TEXT_ONLY else "model.language_model"


def make_target(path: str | Path, **options: Any) -> TargetSpec:
    """Write a complete checkpoint into the folder `path`; hybrids rotate half of each head."""
    spec, path = TargetSpec(**options), Path(path)
    if is_hybrid(spec):
        section = spec.mrope_section if "mrope_section" in options else (2, 1, 1)
        spec = replace(spec, mrope_section=section, deepstack=())
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(spec.vocab - SPARE_COLUMNS)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ids = {token: tokenizer.get_vocab()[token] for token in SPECIALS}
    write_json(path / "config.json", _target_config(spec, ids))
    write_json(path / "generation_config.json", _generation_config(ids))
    if spec.architecture not in TEXT_ONLY:
        write_json(path / "preprocessor_config.json", _preprocessor_config(spec))
    write_json(path / "tokenizer_config.json", _tokenizer_config(spec))
    tensors = fill(_target_shapes(spec), spec.seed, spec.gain, spec.table_std)
    tensors[f"{spec.root}.norm.weight"] *= np.float32(spec.logit_scale)
    if spec.close_logits:  # near ties: each odd id's column almost equals its left neighbour's
        head = tensors[f"{spec.root}.embed_tokens.weight" if spec.tied else "lm_head.weight"]
        head[1::2] = head[0::2][: len(head[1::2])] + np.float32(1e-4) * head[1::2]
    if is_hybrid(spec):
        centre_norms(tensors)
    save(path, tensors, spec.dtype, spec.shards)
    return spec


def _target_config(spec: TargetSpec, ids: dict[str, int]) -> dict[str, Any]:
    rope = rope_config(spec, spec.mrope_section)
    text = (
        _BASE_TEXT
        | text_config(spec)
        | {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "head_dim": spec.head_dim,
            "hidden_size": spec.hidden,
            "intermediate_size": spec.mlp,
            "max_position_embeddings": spec.context,
            "num_attention_heads": spec.heads,
            "num_hidden_layers": spec.layers,
            "num_key_value_heads": spec.kv_heads,
            "rope_parameters": rope | {"rope_theta": spec.theta, "rope_type": "default"},
            "tie_word_embeddings": spec.tied,
            "vocab_size": spec.vocab,
        }
    )
    config: dict[str, Any] = {"architectures": [spec.architecture]}
    config |= {"dtype": spec.dtype, "transformers_version": "5.24.0"}
    kind = MODEL_TYPES[spec.architecture]
    if spec.architecture in TEXT_ONLY:
        return text | config | {"model_type": kind}
    text["model_type"] = f"{kind}_text"
    sections = {"text_config": text, "vision_config": _vision_config(spec)}
    placeholders = {f"{name}_token_id": ids[token] for name, token in _PLACEHOLDERS.items()}
    tied = {"tie_word_embeddings": spec.tied, "model_type": kind}
    return config | sections | placeholders | tied


_PLACEHOLDERS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}


def _vision_config(spec: TargetSpec) -> dict[str, Any]:
    vision = _BASE_VISION | {
        "deepstack_visual_indexes": list(spec.deepstack),
        "depth": spec.vision_depth,
        "hidden_size": spec.vision_hidden,
        "intermediate_size": spec.vision_mlp,
        "num_heads": spec.vision_heads,
        "num_position_embeddings": spec.vision_positions,
        "out_hidden_size": spec.hidden,
    }
    if is_hybrid(spec):
        vision.pop("deepstack_visual_indexes")
    return vision | {"model_type": f"{MODEL_TYPES[spec.architecture]}_vision"}


_BASE_TEXT = json.loads("""{
    "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "pad_token_id": null,
    "rms_norm_eps": 1e-06, "use_cache": true
}""")
_BASE_VISION = json.loads("""{
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02,
    "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}
}""")
_BASE_PREPROCESSOR = json.loads("""{
    "do_convert_rgb": true, "do_normalize": true, "do_rescale": true, "do_resize": true,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "merge_size": 2, "patch_size": 16,
    "temporal_patch_size": 2, "resample": 3, "rescale_factor": 0.00392156862745098,
    "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"
}""")


def _generation_config(ids: dict[str, int]) -> dict[str, Any]:
    stops = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": False,
        "eos_token_id": stops,
        "pad_token_id": ids["<|endoftext|>"],
        "transformers_version": "5.24.0",
    }


def _preprocessor_config(spec: TargetSpec) -> dict[str, Any]:
    size = {"longest_edge": spec.max_pixels, "shortest_edge": spec.min_pixels}
    return _BASE_PREPROCESSOR | {"size": size}


def _tokenizer_config(spec: TargetSpec) -> dict[str, Any]:
    return {
        "add_prefix_space": False,
        "additional_special_tokens": list(SPECIALS),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": spec.context,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }


def _with_bias(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _vision_shapes(spec: TargetSpec) -> Shapes:
    width, mlp, merged = spec.vision_hidden, spec.vision_mlp, 4 * spec.vision_hidden
    shapes = _with_bias("patch_embed.proj", width, 3, 2, 16, 16)
    shapes["pos_embed.weight"] = (spec.vision_positions, width)
    for i in range(spec.vision_depth):
        shapes |= _with_bias(f"blocks.{i}.norm1", width) | _with_bias(f"blocks.{i}.norm2", width)
        shapes |= _with_bias(f"blocks.{i}.attn.qkv", 3 * width, width)
        shapes |= _with_bias(f"blocks.{i}.attn.proj", width, width)
        shapes |= _with_bias(f"blocks.{i}.mlp.linear_fc1", mlp, width)
        shapes |= _with_bias(f"blocks.{i}.mlp.linear_fc2", width, mlp)
    # The main merger norms each patch, the deepstack ones the four patches they join.
    mergers = {"merger": width}
    mergers |= {f"deepstack_merger_list.{i}": merged for i in range(len(spec.deepstack))}
    for name, normed in mergers.items():
        shapes |= _with_bias(f"{name}.norm", normed)
        shapes |= _with_bias(f"{name}.linear_fc1", merged, merged)
        shapes |= _with_bias(f"{name}.linear_fc2", spec.hidden, merged)
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def _target_shapes(spec: TargetSpec) -> Shapes:
    root, table = spec.root, (spec.vocab, spec.hidden)
    shapes: Shapes = {f"{root}.embed_tokens.weight": table, f"{root}.norm.weight": (spec.hidden,)}
    for i, kind in enumerate(layer_types(spec)):
        shapes |= text_layer(f"{root}.layers.{i}", spec, kind)
    if not spec.tied:
        shapes["lm_head.weight"] = table
    if spec.mtp:
        shapes |= mtp_shapes(spec)
    return shapes if spec.architecture in TEXT_ONLY else shapes | _vision_shapes(spec)
