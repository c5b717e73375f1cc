"""The export command's options and what it says on stderr while it works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support_checkpoint import edit_json
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime.cli import main


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """An export of a tiny pair to tmp_path/bundle, the drafter's config saying media: true."""
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft", tmp_path / "target")
    edit_json(tmp_path / "draft/config.json", {"dflash_config.trained_on_media": True})
    paths = ["--draft", str(tmp_path / "draft"), "-o", str(tmp_path / "bundle")]
    return ["export", str(tmp_path / "target"), *paths, "--skip-check"]


def test_a_log_gets_a_line_per_file(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long export under a service manager must not look dead.
    Every data file is a plain line before it is written; stdout stays empty."""
    assert main(command) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    files = [re.fullmatch(r"writing (\S+) \.\.\. \d+\.\d MB", line) for line in lines[:-1]]
    assert [m and m[1] for m in files] == list(read_manifest(tmp_path / "bundle").data_files)
    assert out == "" and lines[-1].startswith("wrote ")


def test_a_terminal_gets_a_bar(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that moves; the plain lines would tear it."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "weights:" in err and "writing" not in err


def test_an_error_before_the_weights_is_the_only_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress begins with the first weights, so what is wrong before stands alone."""
    edit_json(tmp_path / "draft/config.json", {"vocab_size": 99, "dflash_config.mask_token_id": 5})
    assert main(command) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "media"), [(None, True), ("yes", True), ("no", False), ("unknown", None)]
)
def test_draft_media_has_three_answers(
    command: list[str], tmp_path: Path, option: str | None, media: bool | None
) -> None:
    """Without the option the checkpoint's word holds; each answer replaces it, unknown too."""
    assert main(command + (["--draft-media", option] if option else [])) == 0
    assert read_manifest(tmp_path / "bundle").drafts["dflash"].trained_on_media is media
