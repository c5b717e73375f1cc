"""A tokenizer.json: checked, described, and in the form of bundles, which loads with least memory.

Newer files spell each merge as a list of two strings. The library holds all those lists before it
makes anything of them, and their memory stays with the process. Imports little, so that a process
of its own can begin with it at once; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ..models.byte_level import byte_of_char, unsupported_decoder
from ..models.errors import ExportError

VISION_PAD = "<|vision_pad|>"


class TokenizerFacts(NamedTuple):
    """What an export needs of a tokenizer that can be used.

    `unused` are the ids below `size` that no token has, `beyond` those from `size` on that one has.
    """

    content: bytes
    size: int
    unused: frozenset[int]
    beyond: frozenset[int]
    special: frozenset[int]
    vision_pad: int | None

    def missing(self, count: int) -> set[int]:
        """The ids below `count` that no token has."""
        return {i for i in self.unused.union(range(self.size, count)) - self.beyond if i < count}

    def spelling(self, token: int) -> str | None:
        """How a token is spelled; None if there is no such token."""
        return Tokenizer.from_buffer(self.content).id_to_token(token)


def require_tokenizer(path: Path) -> None:
    """`ExportError` if there is no such file."""
    if not path.is_file():
        raise ExportError(f"{path} is missing; save the tokenizer in its fast format there.")


def read_tokenizer(path: Path) -> TokenizerFacts:
    """Read and check a tokenizer.json; `ExportError` says what a user must know."""
    require_tokenizer(path)
    try:
        found = _with_short_merges(path.read_bytes())
        content = _written(found)
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{path} is not a readable tokenizer: {error}") from None
    decoder = unsupported_decoder(tokenizer)
    if decoder is not None:
        raise ExportError(
            f"{path} has the decoder {decoder}, but only ByteLevel tokenizers are supported; "
            "use the tokenizer.json that belongs to the checkpoint."
        )
    vocab = _vocabulary(found["model"], tokenizer)
    _check_alphabet(vocab, tokenizer, path)
    return _facts(content, vocab, tokenizer)


def compact(content: bytes) -> bytes:
    """The same content without white space, and with merges in the older form where they fit it."""
    return _written(_with_short_merges(content))


def _written(found: dict[str, Any]) -> bytes:
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _with_short_merges(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    model = found["model"]
    if model.get("merges"):
        model["merges"] = _short(model["merges"])
    return found


def _short(merges: list[Any]) -> list[Any]:
    """Pairs as strings if every pair is found again when its string is read."""
    if {*map(type, merges)} != {list} or {*map(len, merges)} != {2}:
        return merges
    lines = list(map(" ".join, merges))
    text = "\n" + "\n".join(lines)
    # Beside the border of the two a space would be another border, and lines that begin as the
    # first one of the older form did are skipped wherever they stand.
    return merges if text.count(" ") != len(lines) or "\n#version" in text else lines


def _vocabulary(model: Mapping[str, Any], tokenizer: Tokenizer) -> Mapping[str, int]:
    """Every token and its id, as the library has them, which takes long to say so itself."""
    if not isinstance(model["vocab"], dict):
        return tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    return model["vocab"] | {token.content: id for id, token in added.items()}


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


def _facts(content: bytes, vocab: Mapping[str, int], tokenizer: Tokenizer) -> TokenizerFacts:
    added, ids, size = tokenizer.get_added_tokens_decoder(), set(vocab.values()), len(vocab)
    return TokenizerFacts(
        content=content,
        size=size,
        unused=frozenset(range(size)) - ids,
        beyond=frozenset(i for i in ids if i >= size),
        special=frozenset(i for i, token in added.items() if token.special),
        vision_pad=vocab.get(VISION_PAD),
    )
