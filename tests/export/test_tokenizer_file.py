"""The tokenizer file of a bundle: smaller than the checkpoint's, and the same tokenizer.

The library itself says whether two files mean the same: it writes both in one form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support_checkpoint import export, read
from support_tokenizer import small_tokenizer

from dflash_onnx.export.tokenizer_file import compact


def meaning(content: bytes) -> str:
    """The tokenizer of a file as the library writes it."""
    return tokenizers.Tokenizer.from_str(content.decode()).to_str()


def file_of(**model: Any) -> bytes:
    """A tokenizer.json, as readable as checkpoints have it, with changes to its model."""
    found = json.loads(small_tokenizer().to_str())
    found["model"] |= model
    return json.dumps(found, indent=2).encode()


def test_merges_become_strings() -> None:
    """The 151,000 lists of a Qwen tokenizer cost 60 MB at load, of which 20 stay."""
    content = file_of()
    made = compact(content)
    assert len(made) < len(content) / 2
    assert type(json.loads(content)["model"]["merges"][0]) is list
    assert type(json.loads(made)["model"]["merges"][0]) is str
    assert meaning(made) == meaning(content)
    assert compact(made) == made


@pytest.mark.parametrize("pair", [["a b", "c"], ["a", "b c"], ["#version", "c"]])
def test_merges_that_a_string_cannot_hold_stay_lists(pair: list[str]) -> None:
    """A space would be read as the border, and `#version` as a line that is skipped."""
    pieces = [*pair, "".join(pair)]
    content = file_of(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[pair])
    made = compact(content)
    assert json.loads(made)["model"]["merges"] == [pair]
    assert meaning(made) == meaning(content)


@pytest.mark.parametrize("text", ["naïve 🙂\n", "\u2028 and \x7f"])
def test_characters_outside_ascii_survive(text: str) -> None:
    """Added tokens hold any text."""
    library = small_tokenizer()
    library.add_tokens([text])
    content = library.to_str(pretty=True).encode()
    assert meaning(compact(content)) == meaning(content)


def test_bundles_hold_the_compact_file(pair: Path) -> None:
    """The exporter writes it, and what it means is what the checkpoint says."""
    source, made = pair / "target/tokenizer.json", export(pair) / "tokenizer.json"
    assert made.read_bytes() == compact(source.read_bytes())
    assert meaning(made.read_bytes()) == meaning(source.read_bytes())
    assert read(made)["added_tokens"] == read(source)["added_tokens"]
