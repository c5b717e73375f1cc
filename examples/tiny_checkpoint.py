"""Write small random-weight checkpoints in Hugging Face layout: a Qwen3-VL target and its drafter.

    python examples/tiny_checkpoint.py OUT        writes OUT/target and OUT/draft

They have every file and tensor of the released ones and answer nonsense. Needs neither torch nor
transformers; the same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

SPECIALS = tuple(
    f"<|{name}|>"
    for name in "endoftext im_start im_end vision_start vision_end vision_pad image_pad video_pad "
    "mask".split()
)
# The head is wider than the tokenizer, as in released models: these columns must never win.
SPARE_COLUMNS = 8
# Qwen's own word splitter.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = """Read the text in the image and describe what you see. Answer in one short sentence.
The page shows a table with three columns: name, price and date. The total is 42.50 euro.
A small red house stands near the river, and two people walk over the old stone bridge.
Compare both pictures. Which one is larger, and what has changed between the first and the second?
user assistant system picture document invoice number street city country
"""
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class TargetSpec:
    """Arguments of `make_target`; with this `gain` greedy text varies instead of looping."""

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


def make_target(path: str | Path, **options: Any) -> TargetSpec:
    """Write a complete `Qwen3VLForConditionalGeneration` checkpoint into the folder `path`."""
    spec, path = TargetSpec(**options), Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(spec.vocab - SPARE_COLUMNS)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ids = {token: tokenizer.get_vocab()[token] for token in SPECIALS}
    _write_json(path / "config.json", _target_config(spec, ids))
    _write_json(path / "generation_config.json", _generation_config(ids))
    _write_json(path / "preprocessor_config.json", _preprocessor_config(spec))
    _write_json(path / "tokenizer_config.json", _tokenizer_config(spec))
    tensors = _fill(_target_shapes(spec), spec.seed, spec.gain, spec.table_std)
    tensors["model.language_model.norm.weight"] *= np.float32(spec.logit_scale)
    if spec.close_logits:  # near ties: each odd id's column almost equals its left neighbour's
        head = tensors[
            "model.language_model.embed_tokens.weight" if spec.tied else "lm_head.weight"
        ]
        head[1::2] = head[0::2][: len(head[1::2])] + np.float32(1e-4) * head[1::2]
    _save(path, tensors, spec.dtype, spec.shards)
    return spec


def make_draft(path: str | Path, target: str | Path, **options: Any) -> DraftSpec:
    """Write a DFlash drafter for the checkpoint folder `target` into the folder `path`."""
    spec, path = DraftSpec(**options), Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(Path(target) / "tokenizer.json"))
    text, mask_id = config["text_config"], tokenizer.get_vocab()["<|mask|>"]
    body = _draft_body_config(spec, text)
    # Keys without the prefix seed the weights, so layout and prefix never change a value.
    tensors = _fill(_draft_shapes(spec, text["hidden_size"]), spec.seed, spec.gain)
    tensors = {spec.prefix + name: value for name, value in tensors.items()}
    if spec.layout == "speculators":
        _write_json(path / "config.json", _speculators_config(spec, body, text, mask_id))
        tensors |= _speculators_tensors(spec, text)
    elif spec.layout == "zlab" and spec.draft_vocab is None and not spec.training_keys:
        _write_json(path / "config.json", _zlab_config(spec, body, text, mask_id))
    else:
        raise ValueError(f"layout {spec.layout!r} is unknown or lacks draft_vocab / training_keys")
    _save(path, tensors, spec.dtype, shards=1)
    return spec


def train_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `size` entries, special tokens last."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [first + last for first in syllables for last in syllables]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=size - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The made-up words only fill what the text cannot, hence the weight on the text.
    tokenizer.train_from_iterator([TEXT] * 100 + words[: 2 * size], trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"cannot train {size} entries, got {tokenizer.get_vocab_size()}")
    return tokenizer


def _target_config(spec: TargetSpec, ids: dict[str, int]) -> dict[str, Any]:
    rope = {"mrope_interleaved": True, "mrope_section": list(spec.mrope_section)}
    text = _BASE_TEXT | {
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
    vision = _BASE_VISION | {
        "deepstack_visual_indexes": list(spec.deepstack),
        "depth": spec.vision_depth,
        "hidden_size": spec.vision_hidden,
        "intermediate_size": spec.vision_mlp,
        "num_heads": spec.vision_heads,
        "num_position_embeddings": spec.vision_positions,
        "out_hidden_size": spec.hidden,
    }
    config: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    config |= {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    config |= {"dtype": spec.dtype, "transformers_version": "5.24.0"}
    config |= {"text_config": text, "vision_config": vision, "tie_word_embeddings": spec.tied}
    return config


_BASE_TEXT = json.loads("""{
    "attention_bias": false, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "model_type": "qwen3_vl_text", "pad_token_id": null,
    "rms_norm_eps": 1e-06, "use_cache": true
}""")
_BASE_VISION = json.loads("""{
    "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "initializer_range": 0.02,
    "model_type": "qwen3_vl_vision", "patch_size": 16, "spatial_merge_size": 2,
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


def _decoder_layer(name: str, spec: TargetSpec | DraftSpec, hidden: int) -> Shapes:
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
    root, table = "model.language_model", (spec.vocab, spec.hidden)
    shapes: Shapes = {f"{root}.embed_tokens.weight": table, f"{root}.norm.weight": (spec.hidden,)}
    for i in range(spec.layers):
        shapes |= _decoder_layer(f"{root}.layers.{i}", spec, spec.hidden)
    if not spec.tied:
        shapes["lm_head.weight"] = table
    return shapes | _vision_shapes(spec)


def _draft_shapes(spec: DraftSpec, hidden: int) -> Shapes:
    shapes: Shapes = {"fc.weight": (hidden, len(spec.taps) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(spec.layers):
        shapes |= _decoder_layer(f"layers.{i}", spec, hidden)
    return shapes


def _fill(shapes: Shapes, seed: int, gain: float, table_std: float = 0.2) -> Tensors:
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
        tensors[name] = _random(seed, name, shape) * np.float32(std) + np.float32(mean)
    return tensors


def _random(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Unit-variance float32 numbers that depend on the seed and the name alone.

    Uniform, since the normal generators call the platform's own log and exp.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return ((rng.random(shape) - 0.5) * np.sqrt(12.0)).astype(np.float32)


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
    config = body | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": spec.block_size,
        "dflash_config": dflash,
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
    return {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.taps],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab or text["vocab_size"],
        "dtype": spec.dtype,
        "mask_token_id": mask_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": spec.is_causal is False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "speculators_model_type": "dflash",
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
        tensors |= _fill(shapes | {"verifier_norm.weight": (hidden,)}, spec.seed, spec.gain)
    if spec.draft_vocab is not None:
        order = np.argsort(_random(spec.seed, "d2t", (vocab - SPARE_COLUMNS,)), kind="stable")
        ids = np.sort(order[: spec.draft_vocab])
        tensors |= _fill({"lm_head.weight": (len(ids), hidden)}, spec.seed, spec.gain)
        tensors["d2t"] = (ids - np.arange(len(ids))).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    return tensors


def _save(path: Path, tensors: Tensors, dtype: str, shards: int) -> None:
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
    _write_json(path / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder that gets target/ and draft/")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_target(args.out / "target", seed=args.seed)
    make_draft(args.out / "draft", args.out / "target", seed=args.seed + 1)
    print(f"wrote {args.out / 'target'} and {args.out / 'draft'}")


if __name__ == "__main__":
    main()
