"""Write the golden files of hybrid and text-only targets from transformers.

    python tests/golden/hybrid_goldens.py [--out FOLDER]

Rows, logits and greedy tokens of prompts, and the recurrent layers' states after some tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import make_golden as common
import numpy as np
import torch
import transformers
from make_golden import Arrays
from tiny_checkpoint import make_target
from tokenizers import Tokenizer

# Of seeds 0-19 those whose greedy decisions are clear and where float32 matters least: for some,
# transformers' own taps move by 5e-4 when its recurrence is run in float64.
VISION, SOFT = {"architecture": "Qwen3_5ForConditionalGeneration"}, {"gain": 1.0}
TARGETS: dict[str, dict[str, Any]] = {
    "tied": VISION | SOFT | {"seed": 17},
    "untied": VISION | SOFT | {"seed": 2, "tied": False},
    "text": SOFT | {"architecture": "Qwen3_5ForCausalLM", "seed": 7},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "seed": 14, "tied": False},
}
PROMPTS = ("text", "middle")
COUNTS = (1, 7, 200)
# Ids of the rows after which states are kept.
IDS = np.random.default_rng(0).integers(20, 480, COUNTS[-1])


def load(folder: Path, architecture: str) -> Any:
    """transformers' own model, which never stops by itself."""
    kind = getattr(transformers, architecture)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def decoder_layers(model: Any) -> Any:
    """The text decoder's layers, with or without a vision tower beside it."""
    return getattr(model.model, "language_model", model.model).layers


def record_taps(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """One call, and every decoder layer's output; `hidden_states` has all but the last one's."""
    left: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _layer, _args, output: left.append(output[0]))
        for layer in decoder_layers(model)
    ]
    output = model(**inputs, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    for index, tap in enumerate(left[:-1]):
        if not torch.equal(tap, output.hidden_states[index + 1][0]):
            raise RuntimeError(f"hidden_states[{index + 1}] is not layer {index}'s output")
    return output, left


def prefill_arrays(model: Any, inputs: dict[str, torch.Tensor]) -> Arrays:
    """Taps, final hidden rows and logits of chosen rows, and what identifies all rows."""
    output, taps = record_taps(model, inputs)
    length = inputs["input_ids"].shape[1]
    rows = np.unique(np.linspace(0, length - 1, 12).astype(np.int64))
    arrays = {
        "input_ids": inputs["input_ids"][0].numpy(),
        "rows": rows,
        "logits": output.logits[0].numpy()[rows],
        "final": output.hidden_states[-1][0].numpy()[rows],
    }
    if "mm_token_type_ids" in inputs:
        arrays["position_ids"] = model.model.get_rope_index(**inputs)[0][:, 0].numpy()
    return arrays | {f"tap.{i}": tap.numpy()[rows] for i, tap in enumerate(taps)}


def state_arrays(model: Any) -> Arrays:
    """Recurrent states [1, heads, dk, dv], convolution inputs [1, C, kernel] and the last row."""
    arrays = {}
    kinds = model.config.get_text_config().layer_types
    for count in COUNTS:
        output = model(input_ids=torch.from_numpy(IDS[:count])[None], use_cache=True)
        cache = output.past_key_values
        for i, kind in enumerate(kinds):
            if kind == "linear_attention":
                arrays[f"after{count}.state.{i}"] = cache.get_recurrent_state(i).numpy()
                arrays[f"after{count}.conv.{i}"] = cache.get_conv_state(i).numpy()
        arrays[f"after{count}.logits"] = output.logits[0, -1:].numpy()
    return arrays


def make_arrays(folder: Path, options: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """All arrays of one target, and what the comparison must know of them."""
    model = load(folder, options["architecture"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    has_vision = hasattr(model.config, "image_token_id")
    vocab_size = model.config.get_text_config().vocab_size
    # A text-only target has no placeholders, so only columns without an entry are banned.
    banned = common.banned_ids(tokenizer, vocab_size)[0 if has_vision else len(common.BANNED) :]
    arrays, prompts = state_arrays(model), {}
    for name in PROMPTS if has_vision else PROMPTS[:1]:
        ids, images = common.prompt_ids(tokenizer, common.PROMPTS[name])
        inputs = common.model_inputs(model, ids, images)
        own = prefill_arrays(model, inputs) | common.greedy_arrays(model, inputs, banned)
        arrays |= {f"{name}.{key}": value for key, value in own.items()}
        prompts[name] = {
            "images": images,
            "min_margin": float(own["margins"].min()),
            "distinct_tokens": len(set(own["tokens"].tolist())),
        }
    return arrays, {"banned_ids": banned, "prompts": prompts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=common.HERE)
    out = parser.parse_args().out
    transformers.utils.logging.set_verbosity_error()
    versions = {lib.__name__: str(lib.__version__) for lib in (np, torch, transformers)}
    meta: dict[str, Any] = {"versions": versions, "counts": COUNTS, "ids": IDS.tolist()}
    meta |= {"targets": {}, "parts": {name: common.PROMPTS[name] for name in PROMPTS}}
    meta["images"] = {
        name: dict(zip(common.IMAGE_KEYS, common.IMAGES[name], strict=True))
        for name in common.IMAGES
    }
    for name, options in TARGETS.items():
        with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
            folder = Path(scratch)
            make_target(folder, **options)
            arrays, own = make_arrays(folder, options)
            np.savez_compressed(out / f"hybrid_{name}.npz", **arrays)
            meta["targets"][name] = common.describe(folder, options) | own
    (out / "hybrid.json").write_text(json.dumps(meta, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
