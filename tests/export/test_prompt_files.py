"""Tokenizers and chat templates that could not be used later are found before or with the weights.

Every message names the checkpoint's own file, with and without the self-check.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import edit_json, export, read, refused

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


@pytest.mark.parametrize("decoder", [METASPACE, None, {"type": "ByteFallback"}])
def test_tokenizer_that_is_not_byte_level(pair: Path, decoder: Any) -> None:
    """SentencePiece-like tokenizers would make wrong text.
    The bundle would be refused at load; the export says it at once."""
    path = pair / "target/tokenizer.json"
    edit_json(path, {"decoder": decoder})
    refused(pair, str(path), decoder["type"] if decoder else "NoneType", "ByteLevel")


def test_vocabulary_outside_the_byte_alphabet(pair: Path) -> None:
    """A byte-level decoder over pieces it cannot have made, as after a bad conversion.
    The first such token is shown."""
    path = pair / "target/tokenizer.json"
    raw = read(path)
    piece = next(p for p, token in raw["model"]["vocab"].items() if token == 40)
    vocabulary = {("▁x" if p == piece else p): i for p, i in raw["model"]["vocab"].items()}
    merges = [m for m in raw["model"]["merges"] if piece not in (*m, "".join(m))]
    edit_json(path, {"model.vocab": vocabulary, "model.merges": merges})
    refused(pair, str(path), "token 40", "'▁x'")


@pytest.mark.parametrize("key", ["image", "video", "vision_start", "vision_end"])
@pytest.mark.parametrize("token", [40, 508])
def test_placeholder_that_is_no_special_token(pair: Path, key: str, token: int) -> None:
    """An id of ordinary text would let a user's words become image rows.
    So would a special token that the tokenizer does not have."""
    edit_json(pair / "target/config.json", {f"{key}_token_id": token})
    refused(pair, "target/config.json", f"{key}_token_id is {token}", "tokenizer.json")


def test_placeholder_that_is_added_but_not_special(pair: Path) -> None:
    """The tokenizer knows the string, yet takes it for text.
    A user who writes it would get image rows."""
    path = pair / "target/tokenizer.json"
    added = read(path)["added_tokens"]
    for token in added:
        token["special"] = token["content"] != "<|image_pad|>"
    edit_json(path, {"added_tokens": added})
    refused(pair, "image_token_id", "'<|image_pad|>'", "no special token")


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _only_in(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        (folder / name).touch()
        (folder / name).write_text('{"chat_template": "{% for m in messages %}"}')

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_write("chat_template.jinja", b"a\n{% if %}"), ("chat_template.jinja", "line 2")),
        (_write("chat_template.jinja", b"{{ x | nothing }}"), ("chat_template.jinja", "nothing")),
        (_write("chat_template.jinja", b"caf\xe9"), ("chat_template.jinja", "UTF-8")),
        (_only_in("chat_template.json"), ("chat_template.json", "not valid Jinja")),
        (_only_in("tokenizer_config.json"), ("tokenizer_config.json", "not valid Jinja")),
    ],
)
def test_template_that_cannot_be_used(
    pair: Path, change: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    """A syntax error, a filter that does not exist, another encoding, in any of the three files.
    The file is the checkpoint's, not one in a temporary folder."""
    change(pair / "target")
    refused(pair, str(pair / "target"), *words)


def test_template_functions_of_transformers_are_known(pair: Path) -> None:
    """raise_exception, strftime_now, tojson, break: what templates use beside plain Jinja.
    None of them is an error."""
    source = (
        "{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y') }}"
        "{{ messages | tojson }}{% if not messages %}{{ raise_exception('no') }}{% endif %}"
    )
    (pair / "target/chat_template.jinja").write_text(source, encoding="utf-8")
    export(pair, draft=False)
