"""Text to token ids and back, with the checkpoint's own tokenizer.json (byte-level BPE).

Knows which token strings are special and that text between them may never become one of them.
Knows no chat format: `encode_chat` puts the template of `chat` and this tokenizer together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..models.byte_level import byte_of_char, unsupported_decoder
from ..models.errors import ManifestError, PromptError
from .chat import ChatTemplate, choose_mark, guard


class Tokenizer:
    """A byte-level tokenizer whose special tokens are only those placed by trusted text."""

    def __init__(self, library: tokenizers.Tokenizer, where: str) -> None:
        """Take over `library`; ManifestError naming `where` if it is not byte-level."""
        decoder = unsupported_decoder(library)
        if decoder is not None:
            raise ManifestError(
                f"The tokenizer {where} has the decoder {decoder}. "
                "Expected ByteLevel, the only kind this version reads; use another model."
            )
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        self._library = library
        added = library.get_added_tokens_decoder()
        self._specials = {token.content: id for id, token in added.items() if token.special}
        self._special_tokens = _longest_first(token for token in added.values() if token.special)
        # Added tokens stand for themselves; only the others are spelled in the byte alphabet.
        self._added = {id: token.content for id, token in added.items()}
        self._byte_of_char = str.maketrans(byte_of_char())
        self.special_ids: frozenset[int] = frozenset(self._specials.values())
        self.special_strings: tuple[str, ...] = tuple(self._specials)

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Tokenizer:
        """Read a tokenizer.json; ManifestError if it is missing, damaged or not byte-level."""
        if not Path(path).is_file():
            raise ManifestError(
                f"The tokenizer file {path} is missing. "
                "Copy it from the checkpoint or export the bundle again."
            )
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        # The library raises bare Exception for every kind of damage.
        except Exception as error:
            raise ManifestError(
                f"The tokenizer file {path} cannot be read: {error}. "
                "Restore it from the checkpoint or export the bundle again."
            ) from error
        return cls(library, str(path))

    @property
    def vocab_size(self) -> int:
        """Number of known tokens, added ones included; a model may have more logits."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Return the id of the token spelled exactly `token`, None if there is none."""
        return self._library.token_to_id(token)

    def token_bytes(self, id: int) -> bytes:
        """Return the UTF-8 bytes (maybe part of a character) of a token; b"" for unknown ids."""
        if id in self._added:
            return self._added[id].encode()
        piece = self._library.id_to_token(id)
        return b"" if piece is None else piece.translate(self._byte_of_char).encode("latin-1")

    def encode(self, text: str, mark: str = "") -> list[int]:
        """Return the ids of `text` less `mark`; a special string broken by it is plain text."""
        ids: list[int] = []
        start = 0
        for match in self._special_pattern(mark).finditer(text):
            ids += self._encode_plain(text[start : match.start()], mark)
            ids.append(self._specials[match[match.lastindex or 0]])
            start = match.end()
        return ids + self._encode_plain(text[start:], mark)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`, with U+FFFD for bytes that are no UTF-8."""
        return self._library.decode(list(ids), skip_special_tokens=skip_special)

    def _encode_plain(self, text: str, mark: str) -> list[int]:
        plain = text.replace(mark, "") if mark else text
        _check_unicode(plain)
        return self._library.encode(plain, add_special_tokens=False).ids

    def _special_pattern(self, mark: str) -> re.Pattern[str]:
        if not self._special_tokens:
            return re.compile("(?!)")
        return re.compile("|".join(_token_pattern(t, mark) for t in self._special_tokens))


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,
    **options: Any,
) -> list[int]:
    """Return the prompt's ids (one placeholder per image) of normalised messages; PromptError."""
    specials = tokenizer.special_strings
    mark = choose_mark(template.source, specials, messages, options)
    safe_messages = guard(messages, specials, mark)
    safe_options = guard(options, specials, mark)
    return tokenizer.encode(template.render(safe_messages, **safe_options), mark)


def _longest_first(tokens: Iterable[AddedToken]) -> list[AddedToken]:
    return sorted(tokens, key=lambda token: len(token.content), reverse=True)


def _token_pattern(token: AddedToken, mark: str) -> str:
    # A mark cannot break a special token of one character; right behind it, it disarms it.
    behind = f"(?!{re.escape(mark)})" if mark else ""
    exact = f"({re.escape(token.content)}){behind}"
    word = rf"(?<!\w){exact}(?!\w)" if token.single_word else exact
    return (r"\s*" if token.lstrip else "") + word + (r"\s*" if token.rstrip else "")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The prompt holds the half character {text[error.start]!r} (a lone surrogate), "
            "which is no Unicode text. Remove it or decode the input as UTF-8."
        ) from error
