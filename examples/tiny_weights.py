"""Tensors of tiny checkpoints: seeded values by name and shape, and the files they are saved to.

Knows Hugging Face's file layout and no network but the decoder layer that Qwen3's kinds share.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, np.ndarray]


class LayerSpec(Protocol):
    """Widths of a decoder layer."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def mlp(self) -> int: ...


def decoder_layer(name: str, spec: LayerSpec, hidden: int) -> Shapes:
    """The Qwen3 decoder layer that target and drafter have in common."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (spec.head_dim,),
        "self_attn.k_norm": (spec.head_dim,),
        "mlp.gate_proj": (spec.mlp, hidden),
        "mlp.up_proj": (spec.mlp, hidden),
        "mlp.down_proj": (hidden, spec.mlp),
    }
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


def fill(shapes: Shapes, seed: int, gain: float, table_std: float = 0.2) -> Tensors:
    """Random values by kind: tables, norms around one, biases, and matrices scaled by fan-in."""
    tensors = {}
    for name, shape in shapes.items():
        mean, std = 0.0, 0.1
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "pos_embed.weight")):
            std = table_std
        elif len(shape) > 1:
            std = gain / float(np.sqrt(np.prod(shape[1:])))
        elif name.endswith(".weight"):
            mean = 1.0
        tensors[name] = random_values(seed, name, shape) * np.float32(std) + np.float32(mean)
    return tensors


def random_values(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Unit-variance float32 numbers that depend on the seed and the name alone.

    Uniform, since the normal generators call the platform's own log and exp.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return ((rng.random(shape) - 0.5) * np.sqrt(12.0)).astype(np.float32)


def save(path: Path, tensors: Tensors, dtype: str, shards: int) -> None:
    """One safetensors file, or several with the index that names them."""
    cast = {
        name: np.ascontiguousarray(value, DTYPES[dtype] if value.dtype == np.float32 else None)
        for name, value in sorted(tensors.items())
    }
    if shards == 1:
        save_file(cast, path / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(np.array_split(list(cast), shards), 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        save_file({str(name): cast[name] for name in names}, path / file, {"format": "pt"})
        weight_map |= {str(name): file for name in names}
    metadata = {
        "total_parameters": sum(value.size for value in cast.values()),
        "total_size": sum(value.nbytes for value in cast.values()),
    }
    index = {"metadata": metadata, "weight_map": weight_map}
    write_json(path / "model.safetensors.index.json", index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")
