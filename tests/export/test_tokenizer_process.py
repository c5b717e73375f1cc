"""A tokenizer read by a process of its own is the one that would be read here, and so are errors.

Knows what can happen to that process; what is read and checked is `test_tokenizer_file`'s.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_checkpoint import edit_json

from dflash_onnx.export import tokenizer_process
from dflash_onnx.export.tokenizer_file import read_tokenizer
from dflash_onnx.export.tokenizer_process import reading
from dflash_onnx.models.errors import ExportError
from dflash_onnx.runtime.cli import main


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen]]:
    """Every process that is begun, for files of any size; none may be left in the end."""
    processes: list[subprocess.Popen] = []

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(tokenizer_process, "SMALL", 0)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    yield processes
    assert all(process.returncode is not None for process in processes)


def test_the_same_facts(pair: Path, started: list[subprocess.Popen]) -> None:
    """Bytes for the bundle, ids, special tokens."""
    path = pair / "target/tokenizer.json"
    with reading(path) as answer:
        assert answer() == read_tokenizer(path)
    assert len(started) == 1


def test_the_same_error(pair: Path, started: list[subprocess.Popen]) -> None:
    """One line that names the file, whoever has read it."""
    path = pair / "target/tokenizer.json"
    edit_json(path, {"decoder": {"type": "ByteFallback"}})
    with pytest.raises(ExportError) as here:
        read_tokenizer(path)
    with reading(path) as answer, pytest.raises(ExportError) as there:
        answer()
    assert str(here.value) == str(there.value) and len(started) == 1


def test_a_process_that_is_killed(pair: Path, started: list[subprocess.Popen]) -> None:
    """A system short of memory may end it; then the file is read here."""
    path = pair / "target/tokenizer.json"
    with reading(path) as answer:
        started[0].kill()
        started[0].wait()
        assert answer() == read_tokenizer(path)


def test_no_process_outlives_an_error(pair: Path, started: list[subprocess.Popen]) -> None:
    """An export that fails elsewhere does not wait for the tokenizer."""
    with pytest.raises(KeyboardInterrupt), reading(pair / "target/tokenizer.json"):
        raise KeyboardInterrupt
    assert len(started) == 1


@pytest.mark.parametrize("change", ["missing", "small", "no interpreter"])
def test_when_no_process_is_started(
    pair: Path, started: list[subprocess.Popen], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A small file is read sooner than an interpreter starts, and some programs have none."""
    path = pair / "target/tokenizer.json"
    if change == "small":
        monkeypatch.setattr(tokenizer_process, "SMALL", path.stat().st_size + 1)
    if change == "no interpreter":
        monkeypatch.setattr(sys, "executable", "")
    if change == "missing":
        path.unlink()
        with reading(path) as answer, pytest.raises(ExportError, match="json is missing"):
            answer()
    else:
        with reading(path) as answer:
            assert answer() == read_tokenizer(path)
    assert not started


def test_the_command_uses_it(
    pair: Path, started: list[subprocess.Popen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder with a module that would come before the library's."""
    (pair / "elsewhere").mkdir()
    (pair / "elsewhere/tokenizers.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(pair / "elsewhere")
    command = ["export", str(pair / "target"), "-o", str(pair / "bundle"), "--skip-check"]
    assert main(command) == 0
    expected = read_tokenizer(pair / "target/tokenizer.json").content
    assert (pair / "bundle/tokenizer.json").read_bytes() == expected
    assert [process.returncode for process in started] == [0]
