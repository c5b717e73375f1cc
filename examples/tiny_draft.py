"""The tiny DFlash or DFlash2 drafter: its configuration in two layouts, and its tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tiny_tokenizer import SPARE_COLUMNS
from tiny_weights import Shapes, Tensors, decoder_layer, fill, random_values, save, write_json
from tokenizers import Tokenizer

# All four make a drafter a DFlash2.
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALE_FIELDS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


@dataclass(frozen=True)
class DraftSpec:
    """Arguments of `make_draft`; only `speculators` takes `draft_vocab` and `training_keys`."""

    seed: int = 1
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    mlp: int = 128
    block_size: int = 8
    taps: tuple[int, ...] = (1, 2)
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    theta: float = 1e6
    layout: str = "zlab"
    draft_vocab: int | None = None
    training_keys: bool = False
    prefix: str = ""
    dtype: str = "float32"
    gain: float = 1.0
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None

    @property
    def is_dflash2(self) -> bool:
        """Whether the four DFlash2 fields are given; raises ValueError for a part of them."""
        given = [getattr(self, name) is not None for name in DFLASH2_FIELDS]
        if any(given) and not all(given):
            raise ValueError(f"DFlash2 needs all of {', '.join(DFLASH2_FIELDS)}")
        return all(given)

    @property
    def optional_fields(self) -> dict[str, Any]:
        """The fields that a configuration has only where they are given."""
        values = {name: getattr(self, name) for name in (*DFLASH2_FIELDS, *SCALE_FIELDS)}
        return {name: value for name, value in values.items() if value is not None}


def make_draft(path: str | Path, target: str | Path, **options: Any) -> DraftSpec:
    """Write a DFlash or DFlash2 drafter for the checkpoint `target` into the folder `path`."""
    spec, path = DraftSpec(**options), Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(Path(target) / "tokenizer.json"))
    text, mask_id = config.get("text_config", config), tokenizer.get_vocab()["<|mask|>"]
    body = _draft_body_config(spec, text)
    # Keys without the prefix seed the weights, so layout and prefix never change a value.
    tensors = fill(_draft_shapes(spec, text["hidden_size"]), spec.seed, spec.gain)
    if spec.is_dflash2:
        tensors |= _dflash2_tensors(spec, text["hidden_size"], text["vocab_size"])
    tensors = {spec.prefix + name: value for name, value in tensors.items()}
    if spec.layout == "speculators":
        write_json(path / "config.json", _speculators_config(spec, body, text, mask_id))
        tensors |= _speculators_tensors(spec, text)
    elif spec.layout == "zlab" and spec.draft_vocab is None and not spec.training_keys:
        write_json(path / "config.json", _zlab_config(spec, body, text, mask_id))
    else:
        raise ValueError(f"layout {spec.layout!r} is unknown or lacks draft_vocab / training_keys")
    save(path, tensors, spec.dtype, shards=1)
    return spec


def _draft_shapes(spec: DraftSpec, hidden: int) -> Shapes:
    shapes: Shapes = {"fc.weight": (hidden, len(spec.taps) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(spec.layers):
        shapes |= decoder_layer(f"layers.{i}", spec, hidden)
    return shapes


def _dflash2_tensors(spec: DraftSpec, hidden: int, vocab: int) -> Tensors:
    """Convolutions around the identity and a selector, strong enough to change what is drafted."""
    assert spec.conv_kernel_size and spec.conv_group_size and spec.selector_rank
    selector, taps, rank = "candidate_selector", spec.conv_kernel_size, spec.selector_rank
    convs = [f"layers.{i}.{part}_conv" for i in range(spec.layers) for part in ("attention", "mlp")]
    rows = 2 * taps * (hidden // spec.conv_group_size)
    projections: Shapes = {f"{conv}.kernel_projection.weight": (rows, hidden) for conv in convs}
    tensors = fill(projections, spec.seed, 0.5 * spec.gain)
    tensors |= fill({f"{selector}.hidden_projection.weight": (rank, hidden)}, spec.seed, spec.gain)
    for name in (f"{conv}.base_kernel" for conv in convs):
        kernel = random_values(spec.seed, name, (2, taps, hidden)) * np.float32(0.3)
        kernel[:, 0] += 1
        tensors[name] = kernel
    # Products of two rows then spread by about 1.7, as the logits do, whatever the rank.
    std = np.float32(1.3 / np.sqrt(np.sqrt(rank)))
    for name in (f"{selector}.{kind}_codebook" for kind in ("predecessor", "successor")):
        tensors[name] = random_values(spec.seed, name, (vocab, rank)) * std
    return tensors


def _draft_body_config(spec: DraftSpec, text: dict[str, Any]) -> dict[str, Any]:
    kind = "full_attention" if spec.sliding_window is None else "sliding_attention"
    kinds = list(spec.layer_types or [kind] * spec.layers)
    if len(kinds) != spec.layers or ("sliding_attention" in kinds and spec.sliding_window is None):
        raise ValueError(f"layer_types {kinds} need {spec.layers} entries and a sliding_window")
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "intermediate_size": spec.mlp,
        "layer_types": kinds,
        "max_position_embeddings": text["max_position_embeddings"],
        "max_window_layers": spec.layers,
        "model_type": "qwen3",
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": spec.theta, "rope_type": "default"},
        "rope_theta": spec.theta,
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": False,
        # transformers' Qwen3Config forgets sliding_window unless this is true.
        "use_sliding_window": spec.sliding_window is not None,
        "vocab_size": text["vocab_size"],
    }


def _zlab_config(
    spec: DraftSpec, body: dict[str, Any], text: dict[str, Any], mask_id: int
) -> dict[str, Any]:
    dflash: dict[str, Any] = {"mask_token_id": mask_id, "target_layer_ids": list(spec.taps)}
    if spec.causal is not None:
        dflash["causal"] = spec.causal
    name = "DFlash2DraftModel" if spec.is_dflash2 else "DFlashDraftModel"
    config = body | {
        "architectures": [name],
        "auto_map": {"AutoModel": f"dflash.{name}"},
        "block_size": spec.block_size,
        "dflash_config": dflash | spec.optional_fields,
        "dtype": spec.dtype,
        "num_target_layers": text["num_hidden_layers"],
    }
    return config if spec.is_causal is None else config | {"is_causal": spec.is_causal}


def _speculators_config(
    spec: DraftSpec, body: dict[str, Any], text: dict[str, Any], mask_id: int
) -> dict[str, Any]:
    if spec.is_causal or spec.causal is not None:
        raise ValueError("the speculators layout can only say that sliding layers are not causal")
    proposal = {"proposal_type": "greedy", "speculative_tokens": spec.block_size - 1}
    verifier = {"architectures": ["Qwen3VLForConditionalGeneration"], "name_or_path": "target"}
    algorithm = "dflash2" if spec.is_dflash2 else "dflash"
    return spec.optional_fields | {
        "architectures": ["DFlash2DraftModel" if spec.is_dflash2 else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.taps],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab or text["vocab_size"],
        "dtype": spec.dtype,
        "mask_token_id": mask_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": spec.is_causal is False,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "speculators_model_type": algorithm,
        "target_hidden_size": text["hidden_size"],
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
    }


def _speculators_tensors(spec: DraftSpec, text: dict[str, Any]) -> Tensors:
    """The reduced vocabulary and its head, and the keys that only training uses."""
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    tensors: Tensors = {}
    if spec.training_keys:
        shapes: Shapes = {"verifier_lm_head.weight": (vocab, hidden)}
        tensors |= fill(shapes | {"verifier_norm.weight": (hidden,)}, spec.seed, spec.gain)
    if spec.draft_vocab is not None:
        order = np.argsort(random_values(spec.seed, "d2t", (vocab - SPARE_COLUMNS,)), kind="stable")
        ids = np.sort(order[: spec.draft_vocab])
        tensors |= fill({"lm_head.weight": (len(ids), hidden)}, spec.seed, spec.gain)
        tensors["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    return tensors
