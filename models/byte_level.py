"""Byte-level tokenizers, the only kind there is here: which ones are, and how they spell bytes.

Imports the tokenizer library alone; knows no ids, no prompts and no templates.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders


def unsupported_decoder(tokenizer: Tokenizer) -> str | None:
    """The name of a decoder that is not byte-level; None for a tokenizer that can be used."""
    decoder = tokenizer.decoder
    return None if isinstance(decoder, decoders.ByteLevel) else type(decoder).__name__


def byte_of_char() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for."""
    # It writes printable bytes as themselves and the others, in order, from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
