"""Tiny checkpoints that may be damaged, and the configs of a drafter in both layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import read
from tiny_checkpoint import make_draft, make_target


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/ and draft/ that no test may change."""
    folder = tmp_path_factory.mktemp("pristine")
    make_target(folder / "target")
    make_draft(folder / "draft", folder / "target")
    return folder


@pytest.fixture
def pair(pristine: Path, tmp_path: Path) -> Path:
    """A copy of `pristine` to damage."""
    shutil.copytree(pristine, tmp_path / "pair")
    return tmp_path / "pair"


@pytest.fixture(scope="session")
def zlab(pristine: Path) -> dict[str, Any]:
    return read(pristine / "draft/config.json")


@pytest.fixture(scope="session")
def speculators(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("speculators")
    make_draft(folder, pristine / "target", layout="speculators")
    return read(folder / "config.json")
