"""The export command's options and what it says on stderr while it works."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_checkpoint import edit_json
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime.cli import main

# The command where ONNX Runtime is not installed; its arguments are this program's.
WITHOUT_ONNXRUNTIME = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'onnxruntime':
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Blocked())
from dflash_onnx.runtime import providers
providers.installed_distributions = list
from dflash_onnx.runtime.cli import main
sys.exit(main(sys.argv[1:]))
"""


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


def without_onnxruntime(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command on a machine that lacks ONNX Runtime."""
    program = [sys.executable, "-c", WITHOUT_ONNXRUNTIME, *command]
    return subprocess.run(program, capture_output=True, text=True)


def test_without_the_check_no_runtime_is_needed(command: list[str], tmp_path: Path) -> None:
    """A build machine makes bundles that others run; what rounds to fp16 there is NumPy."""
    done = without_onnxruntime([*command, "--precision", "fp16"])
    assert done.returncode == 0, done.stderr
    assert read_manifest(tmp_path / "bundle").precision.target == "fp16"


def test_a_runtime_that_is_missing_is_found_before_the_weights(
    command: list[str], tmp_path: Path
) -> None:
    """A large export must not end, after all its weights, with the check that cannot run."""
    command.remove("--skip-check")
    done = without_onnxruntime(command)
    assert done.returncode == 1
    assert done.stderr.startswith("dflash-onnx: ONNX Runtime is not installed.")
    assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"target", "draft"}


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_is_collected_as_before(
    command: list[str], was_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports go without it. What a caller in the same process chose holds after the export, also
    after one that failed and one that was interrupted while it imported."""
    failed, interrupted = [*command, "--precision", "fp15"], [*command]
    interrupted.remove("--skip-check")
    monkeypatch.setattr("dflash_onnx.runtime.cli_export._with_onnxruntime", interrupt)
    chosen = gc.isenabled()
    try:
        for one, code in ((command, 0), (failed, 1), (interrupted, 130)):
            (gc.enable if was_on else gc.disable)()
            assert main(one) == code
            assert gc.isenabled() is was_on
    finally:
        (gc.enable if chosen else gc.disable)()


def interrupt() -> None:
    raise KeyboardInterrupt
