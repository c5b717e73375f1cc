"""An export is there in full or not at all, and its memory does not grow with the checkpoint.

Knows the ways an export can stop in the middle; every one must leave the folder as it was.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support_checkpoint import export, leftovers
from tiny_checkpoint import make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.export.graphs import GraphWriter
from dflash_onnx.export.store import DataWriter
from dflash_onnx.models.errors import ExportError
from dflash_onnx.runtime import Model


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def after(calls: int, error: BaseException, wrapped: Callable) -> Callable:
    """A function that works `calls` times and then raises."""
    left = iter(range(calls))

    def call(*arguments: object) -> object:
        if next(left, None) is None:
            raise error
        return wrapped(*arguments)

    return call


def test_existing_output_needs_force(pair: Path) -> None:
    """A bundle is replaced only when asked, and then completely.
    A file of the old one that the new one lacks is gone."""
    bundle = export(pair)
    before = contents(bundle)
    with pytest.raises(ExportError, match="exists already.*--force"):
        export(pair, draft=False)
    assert contents(bundle) == before
    export(pair, draft=False, force=True)
    assert "dflash.data" not in contents(bundle)
    assert leftovers(pair) == ["bundle"]
    Model(bundle)


@pytest.mark.parametrize("kind", ["folder", "file", "checkpoint"])
def test_what_is_no_bundle_is_never_replaced(pair: Path, kind: str) -> None:
    """--force with a mistyped path must not delete a home folder, a file or the checkpoint.
    Only a folder with a manifest is replaced."""
    output = pair / "target" if kind == "checkpoint" else pair / "output"
    if kind == "folder":
        output.mkdir()
        (output / "thesis.tex").write_text("years of work")
    elif kind == "file":
        output.write_text("years of work")
    before = contents(output) if output.is_dir() else output.read_bytes()
    for force, message in ((False, "exists already"), (True, "not a bundle")):
        with pytest.raises(ExportError, match=message):
            export(pair, output.name, force=force)
    assert (contents(output) if output.is_dir() else output.read_bytes()) == before


@pytest.mark.parametrize(
    "error", [ExportError("no"), KeyboardInterrupt(), RuntimeError("bug"), SystemExit(1)]
)
@pytest.mark.parametrize("place", ["weights", "graphs", "check"])
@pytest.mark.parametrize("replacing", [False, True])
def test_failure_in_the_middle_leaves_nothing(
    pair: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, place: str, replacing: bool
) -> None:
    """Errors, bugs, Ctrl-C and exits while weights or graphs are written or while checking.
    No output and no temporary folder; an old bundle stays as it was."""
    before = contents(export(pair)) if replacing else None
    check = raising(error) if place == "check" else None
    if place == "weights":
        monkeypatch.setattr(DataWriter, "_write", after(30, error, DataWriter._write))
    if place == "graphs":
        monkeypatch.setattr(GraphWriter, "write", after(4, error, GraphWriter.write))
    drafts = (pair / "draft",)
    options = ExportOptions(pair / "target", pair / "bundle", drafts, force=replacing)
    with pytest.raises(type(error)):
        export_bundle(options, check)
    assert leftovers(pair) == (["bundle"] if replacing else [])
    assert before is None or contents(pair / "bundle") == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EACCES, "denied")])
@pytest.mark.parametrize("renames", [0, 1])
def test_interrupted_replacement_keeps_the_old_bundle(
    pair: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, renames: int
) -> None:
    """The moment between moving the old bundle away and naming the new one.
    Whatever comes then, the old one has its name again."""
    bundle = export(pair)
    before = contents(bundle)
    rename, calls = Path.rename, iter(range(9))

    def interrupted(path: Path, goal: Path) -> Path:
        if next(calls) == renames:
            raise error
        return rename(path, goal)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises((KeyboardInterrupt, ExportError)):
        export(pair, draft=False, force=True)
    assert contents(bundle) == before
    assert leftovers(pair) == ["bundle"]


def test_check_sees_the_finished_files(pair: Path) -> None:
    """The self-check runs before the bundle has its name, on the very files that will have it.
    What it saw is what is there afterwards."""
    seen = {}
    options = ExportOptions(pair / "target", pair / "bundle", (pair / "draft",))

    def check(folder: Path) -> None:
        assert not options.output.exists() and folder.parent == options.output.parent
        Model(folder)
        seen.update(contents(folder))

    assert export_bundle(options, check) == options.output
    assert contents(options.output) == seen


def test_destination_that_cannot_be_written(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that is a file, and a disk that fills up half way.
    Both are one line about the output, and the disk is as empty as before."""
    (pair / "file").write_text("in the way")
    with pytest.raises(ExportError, match="file/bundle cannot be written"):
        export(pair, "file/bundle")
    (pair / "file").unlink()
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(DataWriter, "_write", after(20, full, DataWriter._write))
    with pytest.raises(ExportError, match="bundle cannot be written.*No space left"):
        export(pair)
    assert leftovers(pair) == []


def test_missing_parents_are_made(pair: Path) -> None:
    """The output may lie in folders that do not exist yet, and be given relative to here.
    They are made; the bundle has ordinary permissions, unlike a temporary folder."""
    bundle = export(pair, "deep/down/bundle")
    assert bundle.stat().st_mode & 0o777 == 0o755
    assert leftovers(pair / "deep/down") == ["bundle"]


MEASURE = """
import sys
from pathlib import Path
from dflash_onnx.export.bundle import ExportOptions, export_bundle
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
tiny, large, output = map(Path, sys.argv[1:])
export_bundle(ExportOptions(tiny, output / "first"))
before = peak()
export_bundle(ExportOptions(large, output / "second"))
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 119 MiB checkpoint of bf16 tensors of at most 8 MiB, in two shards."""
    folder = tmp_path_factory.mktemp("large")
    make_target(
        folder, hidden=1024, mlp=4096, heads=16, kv_heads=8, head_dim=64, layers=4,
        mrope_section=(12, 10, 10), dtype="bfloat16", shards=2,
    )  # fmt: skip
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_one_tensor_not_the_checkpoint(
    pristine: Path, large: Path, tmp_path: Path
) -> None:
    """119 MiB of bf16 become 238 MiB of fp32 files, in a process that has exported a tiny one.
    Its peak grows by four of the largest tensors and 64 MiB at most."""
    size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert 110 << 20 < size < 130 << 20
    arguments = [str(pristine / "target"), str(large), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    print(f"[export] peak grew by {grown / 2**20:.0f} MiB")
    assert grown < 4 * (8 << 20) + (64 << 20)


@pytest.mark.skipif(os.name == "nt", reason="Windows ends processes without a signal")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_killed_command_leaves_nothing(
    large: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A service manager ends the command, or the user does, while weights are being written.
    The command cleans up and says so by its exit code."""
    command = "import sys; from dflash_onnx.runtime.cli import main; sys.exit(main())"
    arguments = ["export", str(large), "-o", str(tmp_path / "bundle")]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*partial*/*.data")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert list(tmp_path.iterdir()) == []
