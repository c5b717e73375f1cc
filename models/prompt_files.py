"""Which chat templates and tokenizers can be used: export asks before it writes, runtime at load.

Knows Jinja as chat templates use it and the byte-level alphabet; knows no prompts and no ids.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders


def compile_template(source: str) -> Template:
    """A chat template with the filters and functions templates rely on; `TemplateSyntaxError`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


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


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for HTML pages; models were trained on plain JSON.
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
