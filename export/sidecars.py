"""The small files beside a target's weights: tokenizer, chat template, processor, stop ids.

Reads them with the errors a user needs; copies nothing and knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ..models.config import TargetConfig
from ..models.errors import ExportError
from ..models.fields import Fields, read_json
from ..models.image_config import ImageConfig
from .checkpoint import Checkpoint

VISION_PAD = "<|vision_pad|>"


@dataclass(frozen=True)
class Sidecars:
    """What the runtime needs beside the networks."""

    tokenizer_json: bytes
    tokenizer_size: int
    chat_template: str
    image: ImageConfig
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]


def read_sidecars(checkpoint: Checkpoint, target: TargetConfig, max_pixels: int | None) -> Sidecars:
    """Read and check all side files of a target checkpoint."""
    folder = checkpoint.folder
    path = folder / "tokenizer.json"
    tokenizer = _tokenizer(path)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > target.text.vocab_size:
        raise ExportError(
            f"{path} has {size} entries but the head has only {target.text.vocab_size} columns; "
            "tokenizer and weights belong to different models."
        )
    return Sidecars(
        tokenizer_json=path.read_bytes(),
        tokenizer_size=size,
        chat_template=_chat_template(folder),
        image=_image(folder, target, max_pixels),
        stop_ids=_stop_ids(checkpoint, target),
        banned_ids=_banned_ids(tokenizer, target),
    )


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ExportError(f"{path} is missing; save the tokenizer in its fast format there.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{path} is not a readable tokenizer: {error}") from None


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        template = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(template, str):
            return template
    raise ExportError(
        f"{folder} has no chat template (looked in chat_template.jinja, chat_template.json and "
        "tokenizer_config.json); prompts cannot be built without it."
    )


def _image(folder: Path, target: TargetConfig, max_pixels: int | None) -> ImageConfig:
    path = folder / "preprocessor_config.json"
    image = ImageConfig.from_preprocessor(read_json(path), str(path))
    vision = target.vision
    ours = (image.patch_size, image.merge_size, image.temporal_patch_size)
    theirs = (vision.patch_size, vision.merge_size, vision.temporal_patch_size)
    if ours != theirs:
        raise ExportError(
            f"{path}: patch, merge and temporal sizes are {ours}, config.json says {theirs}."
        )
    return image.with_max_pixels(max_pixels)


def _stop_ids(checkpoint: Checkpoint, target: TargetConfig) -> tuple[int, ...]:
    generation = checkpoint.optional_json("generation_config.json") or {}
    text = checkpoint.config.get("text_config") or {}
    fields = Fields(checkpoint.config_file, generation, text, checkpoint.config)
    value = fields.require("eos_token_id")
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not ids or not all(type(i) is int and 0 <= i < target.text.vocab_size for i in ids):
        raise fields.bad("eos_token_id", f"token ids below {target.text.vocab_size}", value)
    return ids


def _banned_ids(tokenizer: Tokenizer, target: TargetConfig) -> tuple[int, ...]:
    """Placeholders, which stand for pixels, and head columns that no token belongs to."""
    special = target.special
    banned = {special.image, special.video, special.vision_start, special.vision_end}
    pad = tokenizer.token_to_id(VISION_PAD)
    banned |= set() if pad is None else {pad}
    columns = range(target.text.vocab_size)
    banned |= {i for i in columns if tokenizer.id_to_token(i) is None}
    return tuple(sorted(banned))
