"""Write the target as a checkpoint folder in Hugging Face layout, weights in fp16.

Knows the configuration files. The tokenizer's files and MTP tensors are written elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model import special_ids
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

MAX_PIXELS = 96 * 32 * 32


def save_target(target: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Configurations and weights; the tokenizer's files are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _without(target.config.to_dict(), _NOISE)
    config |= {"architectures": [type(target).__name__], "dtype": "float16"}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", _generation(tokenizer))
    _write(folder / "preprocessor_config.json", _PREPROCESSOR)
    tensors = {
        name: value.half().contiguous()
        for name, value in target.state_dict().items()
        if name != "lm_head.weight"  # tied
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _without(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {
        key: _without(value, names) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in names
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = special_ids(tokenizer)
    return {
        "bos_token_id": ids.pad,
        "do_sample": False,
        "eos_token_id": [ids.stop, ids.pad],
        "pad_token_id": ids.pad,
    }


# What transformers adds to every configuration and no Qwen3-VL file says.
_NOISE = frozenset(
    "_name_or_path architectures chunk_size_feed_forward dtype id2label is_encoder_decoder "
    "label2id output_attentions output_hidden_states problem_type return_dict".split()
)
_PREPROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "merge_size": 2,
    "patch_size": 16, "temporal_patch_size": 2, "resample": 3,
    "rescale_factor": 0.00392156862745098, "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"longest_edge": MAX_PIXELS, "shortest_edge": 32 * 32},
}  # fmt: skip
