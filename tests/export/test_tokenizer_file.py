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

from dflash_onnx.export.tokenizer_file import compact, read_tokenizer
from dflash_onnx.models.errors import ExportError


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


def written(folder: Path, content: bytes) -> Path:
    path = folder / "tokenizer.json"
    path.write_bytes(content)
    return path


def test_facts_are_what_the_library_says(tmp_path: Path) -> None:
    """Ids with holes and one far out: those that no token has are what the head must not give."""
    plain = json.loads(file_of())["model"]["vocab"]
    far = {piece: (700 if id == 40 else id) for piece, id in plain.items() if id != 41}
    merges = [m for m in json.loads(file_of())["model"]["merges"] if "".join(m) in far]
    kept = [m for m in merges if all(piece in far for piece in m)]
    content = file_of(vocab=far, merges=kept)
    facts = read_tokenizer(written(tmp_path, content))
    library = tokenizers.Tokenizer.from_str(content.decode())
    vocab = library.get_vocab(with_added_tokens=True)
    assert facts.size == len(vocab) and facts.content == compact(content)
    for count in (10, 41, 600, 700, 701, 900):
        assert facts.missing(count) == set(range(count)) - set(vocab.values())
    added = library.get_added_tokens_decoder()
    assert facts.special == {id for id, token in added.items() if token.special}
    assert facts.vision_pad == vocab.get("<|vision_pad|>")
    assert all(facts.spelling(id) == library.id_to_token(id) for id in (0, 40, 41, 700))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"model": {}}', b"\xff", b"null"])
def test_files_that_are_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    """Whatever is wrong with it, it is an error of the user's file."""
    with pytest.raises(ExportError, match="tokenizer.json is not a readable tokenizer"):
        read_tokenizer(written(tmp_path, content))


@pytest.mark.parametrize("merges", [[["a"]], [["a", "b", "c"]], [["a", 1]], ["a b", ["a", "b"]]])
def test_merges_of_no_known_form(tmp_path: Path, merges: list[Any]) -> None:
    """They are the library's to refuse, not ours to repair."""
    vocab = {piece: i for i, piece in enumerate(("a", "b", "c", "ab", "abc"))}
    with pytest.raises(ExportError, match="tokenizer.json is not a readable tokenizer"):
        read_tokenizer(written(tmp_path, file_of(vocab=vocab, merges=merges)))
