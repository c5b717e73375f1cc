"""The small files beside a target's weights: chat template, processor, stop ids.

Reads them with the errors a user needs, and holds them against the tokenizer; copies nothing and
knows no tensors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError

from ..models.config import TargetConfig
from ..models.errors import ExportError
from ..models.fields import Fields, read_json
from ..models.image_config import ImageConfig
from ..models.prompt_files import compile_template
from .checkpoint import Checkpoint
from .tokenizer_file import TokenizerFacts, require_tokenizer

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class PromptFiles:
    """What is read beside the tokenizer, which takes longer."""

    chat_template: str
    image: ImageConfig | None


@dataclass(frozen=True)
class Sidecars:
    """What the runtime needs beside the networks."""

    tokenizer_json: bytes
    tokenizer_size: int
    chat_template: str
    image: ImageConfig | None
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]


def read_prompt_files(folder: Path, target: TargetConfig, max_pixels: int | None) -> PromptFiles:
    """Read and check the small files of a target checkpoint; the tokenizer must only be there."""
    require_tokenizer(folder / TOKENIZER)
    return PromptFiles(_chat_template(folder), _image(folder, target, max_pixels))


def make_sidecars(
    checkpoint: Checkpoint, target: TargetConfig, files: PromptFiles, tokenizer: TokenizerFacts
) -> Sidecars:
    """All side files of a target checkpoint, which must fit its tokenizer."""
    path = checkpoint.folder / TOKENIZER
    if tokenizer.size > target.text.vocab_size:
        raise ExportError(
            f"{path} has {tokenizer.size} entries but the head has only {target.text.vocab_size} "
            "columns; tokenizer and weights belong to different models."
        )
    _check_placeholders(tokenizer, path, checkpoint, target)
    banned = _banned_ids(tokenizer, target)
    return Sidecars(
        tokenizer_json=tokenizer.content,
        tokenizer_size=tokenizer.size,
        chat_template=files.chat_template,
        image=files.image,
        stop_ids=_stop_ids(checkpoint, target, banned),
        banned_ids=banned,
    )


def _check_placeholders(
    tokenizer: TokenizerFacts, path: Path, checkpoint: Checkpoint, target: TargetConfig
) -> None:
    """Placeholders must be special tokens: only those can never come from a user's text."""
    for name, token in asdict(target.special).items() if target.special else ():
        if token not in tokenizer.special:
            raise ExportError(
                f"{checkpoint.config_file} says that {name}_token_id is {token}, but in {path} "
                f"that is {tokenizer.spelling(token)!r} and no special token; one of the two "
                "files belongs to another model."
            )


def _chat_template(folder: Path) -> str:
    path, source = _template_source(folder)
    try:
        compile_template(source)
    except TemplateSyntaxError as error:
        raise ExportError(
            f"{path} has a chat template that is not valid Jinja at line {error.lineno}: "
            f"{error.message}; restore the file from the original checkpoint."
        ) from None
    return source


def _template_source(folder: Path) -> tuple[Path, str]:
    """The template and the file it comes from."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path, path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ExportError(f"{path} is not UTF-8 text: {error}; save it as UTF-8.") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        template = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(template, str):
            return path, template
    raise ExportError(
        f"{folder} has no chat template (looked in chat_template.jinja, chat_template.json and "
        "tokenizer_config.json); prompts cannot be built without it."
    )


def _image(folder: Path, target: TargetConfig, max_pixels: int | None) -> ImageConfig | None:
    if target.vision is None:
        if max_pixels is not None:
            raise ExportError("--max-pixels has no meaning for a target that reads no images.")
        return None
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


def _stop_ids(
    checkpoint: Checkpoint, target: TargetConfig, banned: tuple[int, ...]
) -> tuple[int, ...]:
    fields = _stop_fields(checkpoint)
    value = fields.require("eos_token_id")
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not ids or not all(type(i) is int and 0 <= i < target.text.vocab_size for i in ids):
        raise fields.bad("eos_token_id", f"token ids below {target.text.vocab_size}", value)
    impossible = sorted(set(ids) & set(banned))
    if impossible:
        # Such an id is never chosen, so an answer would run to its budget.
        expected = "ids of the tokenizer that an answer may hold"
        raise fields.bad("eos_token_id", expected, impossible)
    return ids


def _stop_fields(checkpoint: Checkpoint) -> Fields:
    """Where stop ids stand: generation_config.json, then the two levels of config.json."""
    top = Fields(checkpoint.config_file, checkpoint.config)
    name = "generation_config.json"
    generation = checkpoint.optional_json(name)
    first = [] if generation is None else [Fields(str(checkpoint.folder / name), generation)]
    places = (*first, *top.sections("text_config"), top)
    return places[0].otherwise(*places[1:])


def _banned_ids(tokenizer: TokenizerFacts, target: TargetConfig) -> tuple[int, ...]:
    """Placeholders, which stand for pixels, and head columns that no token belongs to."""
    banned = set(asdict(target.special).values()) if target.special else set()
    if target.special and tokenizer.vision_pad is not None:
        banned.add(tokenizer.vision_pad)
    return tuple(sorted(banned | tokenizer.missing(target.text.vocab_size)))
