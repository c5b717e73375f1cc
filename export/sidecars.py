"""The small files beside a target's weights: tokenizer, chat template, processor, stop ids.

Reads them with the errors a user needs; copies nothing and knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer

from ..models.config import TargetConfig
from ..models.errors import ExportError
from ..models.fields import Fields, read_json
from ..models.image_config import ImageConfig
from ..models.prompt_files import byte_of_char, compile_template, unsupported_decoder
from .checkpoint import Checkpoint
from .tokenizer_file import compact

VISION_PAD = "<|vision_pad|>"


@dataclass(frozen=True)
class Sidecars:
    """What the runtime needs beside the networks."""

    tokenizer_json: bytes
    tokenizer_size: int
    chat_template: str
    image: ImageConfig | None
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]


def read_sidecars(checkpoint: Checkpoint, target: TargetConfig, max_pixels: int | None) -> Sidecars:
    """Read and check all side files of a target checkpoint."""
    folder = checkpoint.folder
    path = folder / "tokenizer.json"
    content = _content(path)
    tokenizer = _tokenizer(path, content)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    _check_alphabet(vocab, tokenizer, path)
    size = len(vocab)
    if size > target.text.vocab_size:
        raise ExportError(
            f"{path} has {size} entries but the head has only {target.text.vocab_size} columns; "
            "tokenizer and weights belong to different models."
        )
    _check_placeholders(tokenizer, path, checkpoint, target)
    banned = _banned_ids(vocab, target)
    return Sidecars(
        tokenizer_json=compact(content),
        tokenizer_size=size,
        chat_template=_chat_template(folder),
        image=_image(folder, target, max_pixels),
        stop_ids=_stop_ids(checkpoint, target, banned),
        banned_ids=banned,
    )


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise ExportError(f"{path} is missing; save the tokenizer in its fast format there.")
    return path.read_bytes()


def _tokenizer(path: Path, content: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{path} is not a readable tokenizer: {error}") from None
    decoder = unsupported_decoder(tokenizer)
    if decoder is not None:
        raise ExportError(
            f"{path} has the decoder {decoder}, but only ByteLevel tokenizers are supported; "
            "use the tokenizer.json that belongs to the checkpoint."
        )
    return tokenizer


def _check_alphabet(vocab: Mapping[str, int], tokenizer: Tokenizer, path: Path) -> None:
    """Tokens that are not added ones must be spelled in the byte-level alphabet."""
    added, alphabet = tokenizer.get_added_tokens_decoder(), byte_of_char().keys()
    # Nearly all pieces pass, so the characters are looked at all together first.
    strange = set("".join(vocab)) - alphabet
    for piece in (p for p in vocab if strange and not strange.isdisjoint(p)):
        if vocab[piece] not in added:
            raise ExportError(
                f"{path} spells token {vocab[piece]} as {piece!r}, which is not in the byte-level "
                "alphabet; use the tokenizer.json that belongs to the checkpoint."
            )


def _check_placeholders(
    tokenizer: Tokenizer, path: Path, checkpoint: Checkpoint, target: TargetConfig
) -> None:
    """Placeholders must be special tokens: only those can never come from a user's text."""
    added = tokenizer.get_added_tokens_decoder()
    for name, token in asdict(target.special).items() if target.special else ():
        if token not in added or not added[token].special:
            raise ExportError(
                f"{checkpoint.config_file} says that {name}_token_id is {token}, but in {path} "
                f"that is {tokenizer.id_to_token(token)!r} and no special token; one of the two "
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


def _banned_ids(vocab: Mapping[str, int], target: TargetConfig) -> tuple[int, ...]:
    """Placeholders, which stand for pixels, and head columns that no token belongs to."""
    banned = set(asdict(target.special).values()) if target.special else set()
    if target.special and VISION_PAD in vocab:
        banned.add(vocab[VISION_PAD])
    banned |= set(range(target.text.vocab_size)).difference(vocab.values())
    return tuple(sorted(banned))
