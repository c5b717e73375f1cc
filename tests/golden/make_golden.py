"""Write the golden files from the reference implementations: transformers and z-lab's dflash.

    python tests/golden/make_golden.py [--dflash FOLDER] [--out FOLDER]

FOLDER holds the `dflash` package (default: an installed one). Needs torch and transformers 5.24.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import Qwen3VLForConditionalGeneration

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "examples"), str(HERE.parent)]
import draft_goldens  # noqa: E402
from support_images import grid_of, make_image, make_patches  # noqa: E402
from tiny_checkpoint import make_draft, make_target  # noqa: E402

# Of seeds 0-29 the one whose closest greedy decision is clearest: text must not hang on rounding.
TARGET: dict[str, Any] = {"seed": 5}
DRAFTS, DRAFTS2 = draft_goldens.DRAFTS, draft_goldens.DRAFTS2
ALL_DRAFTS = DRAFTS | DRAFTS2
IMAGE_KEYS = ("height", "width", "seed")
IMAGES = {"wide": (96, 160, 1), "square": (64, 64, 2)}
PROMPTS: dict[str, list[list[str]]] = {
    "text": [["text", "Describe the old stone bridge near the river."]],
    "image": [["image", "wide"], ["text", "Read the text in the image."]],
    "two_images": [["image", "wide"], ["image", "square"], ["text", "Compare both pictures."]],
    "middle": [["text", "The first page:"], ["image", "square"], ["text", "What is the total?"]],
}
TOKENS, LAST_ROWS, SPREAD_ROWS = 64, 8, 4
# Columns that may never be chosen, besides those the tokenizer has no entry for.
BANNED = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
Arrays = dict[str, np.ndarray]


def prompt_ids(tokenizer: Tokenizer, parts: list[list[str]]) -> tuple[list[int], list[str]]:
    """The chat prompt's ids with every placeholder expanded, and the images it shows."""
    text, images = "<|im_start|>user\n", []
    for kind, value in parts:
        if kind == "image":
            height, width, _ = IMAGES[value]
            pads = "<|image_pad|>" * (height // 32 * (width // 32))
            value, images = f"<|vision_start|>{pads}<|vision_end|>", [*images, value]
        text += value
    text += "<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text, add_special_tokens=False).ids, images


def model_inputs(model: Any, ids: list[int], images: list[str]) -> dict[str, torch.Tensor]:
    input_ids = torch.tensor([ids])
    inputs = {"input_ids": input_ids}
    if images:
        pictures = [make_image(*IMAGES[name]) for name in images]
        inputs["pixel_values"] = torch.from_numpy(np.concatenate(list(map(make_patches, pictures))))
        inputs["image_grid_thw"] = torch.tensor([grid_of(picture) for picture in pictures])
    if hasattr(model.config, "image_token_id"):
        # transformers 5.24 takes the image spans from here, not from the ids.
        inputs["mm_token_type_ids"] = (input_ids == model.config.image_token_id).int()
    return inputs


def banned_ids(tokenizer: Tokenizer, columns: int) -> list[int]:
    named = [tokenizer.token_to_id(f"<|{name}|>") for name in BANNED]
    return [*named, *range(tokenizer.get_vocab_size(), columns)]


def record_layers(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[Any, dict, dict]:
    """One call, and every decoder layer's input and output: before and after DeepStack is added.

    `hidden_states` would do for all taps but the last layer's: there it holds the final norm's.
    """
    entered: dict[int, torch.Tensor] = {}
    left: dict[int, torch.Tensor] = {}

    def hook(layer: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        index = layer.self_attn.layer_idx
        entered[index], left[index] = args[0][0], output[0]

    layers = model.model.language_model.layers
    handles = [layer.register_forward_hook(hook) for layer in layers]
    output = model(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    return output, entered, left


def vision_arrays(model: Any) -> Arrays:
    arrays = {}
    for name in IMAGES:
        image = make_image(*IMAGES[name])
        patches = torch.from_numpy(make_patches(image))
        output = model.model.visual(patches, grid_thw=torch.tensor([grid_of(image)]))
        arrays[f"vision.{name}.pooler"] = output.pooler_output.numpy()
        for index, feature in enumerate(output.deepstack_features):
            arrays[f"vision.{name}.deepstack.{index}"] = feature.numpy()
    return arrays


def prefill_arrays(model: Any, inputs: dict[str, torch.Tensor]) -> Arrays:
    """Positions, taps, final hidden rows and chosen logits rows of one prompt."""
    output, entered, left = record_layers(model, inputs)
    positions, delta = model.model.get_rope_index(**inputs)
    length = inputs["input_ids"].shape[1]
    spread = np.linspace(0, length - LAST_ROWS, SPREAD_ROWS, endpoint=False).astype(np.int64)
    rows = np.concatenate([spread, np.arange(length - LAST_ROWS, length)])
    arrays = {
        "input_ids": inputs["input_ids"][0].numpy(),
        "position_ids": positions[:, 0].numpy(),
        "rope_delta": delta[0].numpy(),
        "logit_rows": rows,
        "logits": output.logits[0].numpy()[rows],
        "final": output.hidden_states[-1][0].numpy(),
    }
    arrays |= {f"tap.{index}": tap.numpy() for index, tap in left.items()}
    for index in range(len(left) - 1):
        if not torch.equal(left[index], output.hidden_states[index + 1][0]):
            raise RuntimeError(f"hidden_states[{index + 1}] is not layer {index}'s output")
        if not torch.equal(left[index], entered[index + 1]):
            arrays[f"tap_after_deepstack.{index}"] = entered[index + 1].numpy()
    return arrays


def greedy_arrays(model: Any, inputs: dict[str, torch.Tensor], banned: list[int]) -> Arrays:
    """Greedy tokens without a stop, and each one's lead over the second best."""
    output = model.generate(
        **inputs,
        max_new_tokens=TOKENS,
        do_sample=False,
        suppress_tokens=banned,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, -TOKENS:]
    best = torch.stack(output.scores)[:, 0].topk(2).values
    check_teacher_forced(model, inputs, tokens, banned)
    return {"tokens": tokens[0].numpy(), "margins": (best[:, 0] - best[:, 1]).numpy()}


def check_teacher_forced(
    model: Any, inputs: dict[str, torch.Tensor], tokens: torch.Tensor, banned: list[int]
) -> None:
    """One cache-free call over prompt and answer must choose the tokens that decoding chose."""
    ids = torch.cat([inputs["input_ids"], tokens], dim=1)
    inputs = inputs | {"input_ids": ids}
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(**inputs).logits[0, -TOKENS - 1 : -1]
    logits[:, banned] = -torch.inf
    if not torch.equal(logits.argmax(-1), tokens[0]):
        raise RuntimeError("cached and cache-free decoding disagree: a near tie, change the seed")


def make_target_golden(folder: Path) -> tuple[Any, Arrays, dict[str, Any]]:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    banned = banned_ids(tokenizer, model.config.text_config.vocab_size)
    arrays, prompts = vision_arrays(model), {}
    for name, parts in PROMPTS.items():
        ids, images = prompt_ids(tokenizer, parts)
        inputs = model_inputs(model, ids, images)
        own = prefill_arrays(model, inputs) | greedy_arrays(model, inputs, banned)
        arrays |= {f"{name}.{key}": value for key, value in own.items()}
        prompts[name] = {
            "parts": parts,
            "images": images,
            "prompt_tokens": len(ids),
            "pos_next": int(own["position_ids"].max()) + 1,
            "min_margin": float(own["margins"].min()),
            "distinct_tokens": len(set(own["tokens"].tolist())),
        }
    return model, arrays, {"banned_ids": banned, "prompts": prompts}


def describe(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes())
    return {"options": options, "sha256": digest.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dflash", type=Path, help="folder that holds the package `dflash`")
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    sys.path[:0] = [str(args.dflash)] if args.dflash else []
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        write_golden(Path(scratch), args.out)


def write_golden(scratch: Path, out: Path) -> None:
    make_target(scratch / "target", **TARGET)
    for name, options in ALL_DRAFTS.items():
        make_draft(scratch / name, scratch / "target", **options)
    model, arrays, meta = make_target_golden(scratch / "target")
    np.savez_compressed(out / "target.npz", **arrays)
    np.savez_compressed(out / "draft.npz", **draft_goldens.make_dflash(model, scratch))
    arrays, closest = draft_goldens.make_dflash2(model, scratch, meta["banned_ids"])
    np.savez_compressed(out / "draft2.npz", **arrays)
    meta |= {
        "versions": {lib.__name__: str(lib.__version__) for lib in (np, torch, transformers)},
        "target": describe(scratch / "target", TARGET),
        "drafts": {name: describe(scratch / name, DRAFTS[name]) for name in DRAFTS},
        "drafts2": {
            name: describe(scratch / name, DRAFTS2[name]) | closest[name] for name in DRAFTS2
        },
        "images": {name: dict(zip(IMAGE_KEYS, IMAGES[name], strict=True)) for name in IMAGES},
        "draft_anchor_id": draft_goldens.ANCHOR,
        "draft_contexts": draft_goldens.CONTEXTS,
        "draft2_blocks": draft_goldens.BLOCKS,
        "draft2_temperature": draft_goldens.TEMPERATURE,
    }
    (out / "golden.json").write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
