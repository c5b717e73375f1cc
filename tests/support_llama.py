"""Tiny Llama checkpoints, made from tiny Qwen3 ones, and their network in float64 NumPy.

The same decoder but for the norms of queries and keys, which it does not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from support_checkpoint import REMOVED, edit_json, read
from tiny_checkpoint import make_target

Wide = NDArray[np.float64]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    "head_dim": REMOVED,
}


def make_llama(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> None:
    """Write a checkpoint; `changes` edit its configuration, options are those of `make_target`."""
    make_target(folder, architecture="Qwen3ForCausalLM", **options)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys() if _kept(name)}
        save_file(tensors, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = read(index)["weight_map"]
        edit_json(index, {"weight_map": {k: v for k, v in places.items() if _kept(k)}})
    edit_json(folder / "config.json", LLAMA | (changes or {}))


def _kept(name: str) -> bool:
    return not name.endswith(("q_norm.weight", "k_norm.weight"))


def llama_logits(folder: Path, ids: NDArray) -> Wide:
    """Logits [n, V] of ids [n], of a checkpoint in one float32 file."""
    config = read(folder / "config.json")
    with safe_open(folder / "model.safetensors", "numpy") as handle:
        w = {name: handle.get_tensor(name).astype(np.float64) for name in handle.keys()}
    x, eps = w["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        layer = {k.split(f"layers.{i}.")[1]: v for k, v in w.items() if f"layers.{i}." in k}
        x = x + _attention(config, layer, _norm(x, layer["input_layernorm.weight"], eps))
        y = _norm(x, layer["post_attention_layernorm.weight"], eps)
        gate, up = (y @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _norm(x, w["model.norm.weight"], eps) @ head.T


def _norm(x: Wide, weight: Wide, eps: float) -> Wide:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _attention(config: dict[str, Any], layer: dict[str, Wide], x: Wide) -> Wide:
    count, heads = len(x), config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T).reshape(count, -1, width) for name in "qkv"
    )
    q, k = (_rotated(rows, config["rope_parameters"]["rope_theta"]) for rows in (q, k))
    k, v = (np.repeat(rows, heads // rows.shape[1], axis=1) for rows in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
    scores += np.triu(np.full((count, count), -np.inf), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    rows = np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
    return rows @ layer["self_attn.o_proj.weight"].T


def _rotated(x: Wide, theta: float) -> Wide:
    """Halves of every head rotate against each other."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
