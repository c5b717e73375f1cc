"""Taking the output's name at the end of an export, with others after the same name.

Nothing is deleted that is not a bundle, and no bundle before another one has its name.
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from support_checkpoint import export, leftovers

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.errors import ExportError
from dflash_onnx.models.manifest import read_manifest


def options(pair: Path, force: bool = False) -> ExportOptions:
    return ExportOptions(pair / "target", pair / "bundle", (pair / "draft",), force=force)


def test_second_of_two_parallel_exports_fails(pair: Path) -> None:
    """Both have seen that the name is free and both get to the end.
    One has the name, the other one line and no leftovers."""
    both, results = threading.Barrier(2), []

    def run() -> None:
        try:
            results.append(export_bundle(options(pair), lambda _: both.wait(60) and None))
        except ExportError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = (r for r in results if isinstance(r, ExportError))
    assert pair / "bundle" in results and str(pair / "bundle") in str(error)
    assert leftovers(pair) == ["bundle"]
    read_manifest(pair / "bundle")


@pytest.mark.parametrize(("force", "message"), [(False, "exists already"), (True, "not a bundle")])
def test_name_that_was_taken_meanwhile(pair: Path, force: bool, message: str) -> None:
    """The name was free, or a bundle's, when the export began, and now somebody works there.
    It is looked at again right before the end."""
    if force:
        export(pair)

    def check(_: Path) -> None:
        if force:
            (pair / "bundle").rename(pair / "draft/elsewhere")
        (pair / "bundle").mkdir()
        (pair / "bundle/thesis.tex").write_text("years of work")

    with pytest.raises(ExportError, match=message):
        export_bundle(options(pair, force), check)
    assert [p.name for p in (pair / "bundle").iterdir()] == ["thesis.tex"]
    assert leftovers(pair) == ["bundle"]


@pytest.mark.parametrize("force", [False, True])
def test_name_that_is_taken_between_look_and_rename(
    pair: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """The last moment: the look found the name free, the rename does not.
    What got there first stays, and the message says so."""
    if force:
        export(pair)
    rename = Path.rename

    def late(path: Path, goal: Path) -> Path:
        if goal == pair / "bundle":
            goal.mkdir()
            (goal / "bundle.json").write_text("{}")
        return rename(path, goal)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(ExportError, match="made by another program"):
        export_bundle(options(pair, force))
    assert (pair / "bundle/bundle.json").read_text() == "{}"
    assert leftovers(pair) == ["bundle"]


def test_old_bundle_is_kept_when_it_cannot_be_put_back(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails between the two renames and again when the old bundle is to come back.
    Then its hidden copy is all there is; it stays and the message says where."""
    before = (export(pair) / "bundle.json").read_bytes()
    rename = Path.rename

    def failing(path: Path, goal: Path) -> Path:
        if goal == pair / "bundle":
            raise OSError(errno.EIO, "I/O error")
        return rename(path, goal)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ExportError, match="neither be replaced nor put back.*kept in") as caught:
        export(pair, force=True)
    (kept,) = pair.glob(".bundle.old-*/bundle")
    assert (kept / "bundle.json").read_bytes() == before and str(kept) in str(caught.value)


def test_something_else_under_the_name_is_put_back(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look saw a bundle, but what was moved away is none.
    It gets its name back."""
    export(pair)
    rename = Path.rename

    def swapped(path: Path, goal: Path) -> Path:
        if path == pair / "bundle":
            (path / "bundle.json").rename(path / "thesis.tex")
        return rename(path, goal)

    monkeypatch.setattr(Path, "rename", swapped)
    with pytest.raises(ExportError, match="not a bundle"):
        export_bundle(options(pair, force=True))
    assert (pair / "bundle/thesis.tex").is_file()
    assert leftovers(pair) == ["bundle"]


def test_a_name_taken_after_the_last_look(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another export gets there between the last look and the rename; without --force it stays."""
    made = export_bundle(options(pair))
    before = (made / "bundle.json").read_bytes()
    monkeypatch.setattr("dflash_onnx.export.bundle._refuse_existing", lambda options: None)
    with pytest.raises(ExportError, match="made by another program"):
        export_bundle(options(pair))
    assert (made / "bundle.json").read_bytes() == before and leftovers(pair) == ["bundle"]
