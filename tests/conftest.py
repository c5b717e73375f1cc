"""Shared fixtures: tiny seeded checkpoints, their bundles and loaded models, made once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model

BundleMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_bundle(tmp_path_factory: pytest.TempPathFactory) -> BundleMaker:
    """`make_bundle(target={...}, drafts=[{...}], **export options)`; equal calls share a bundle."""
    made: dict[str, Path] = {}

    def make(
        target: dict[str, Any] | None = None,
        drafts: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> Path:
        drafts = [{}] if drafts is None else drafts
        key = repr((target, drafts, options))
        if key not in made:
            folder = tmp_path_factory.mktemp("bundle")
            make_target(folder / "target", **(target or {}))
            names = [folder / f"draft{i}" for i in range(len(drafts))]
            for name, draft in zip(names, drafts, strict=True):
                make_draft(name, folder / "target", **draft)
            made[key] = export_bundle(
                ExportOptions(folder / "target", folder / "bundle", tuple(names), **options)
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_bundle: BundleMaker) -> Model:
    """A loaded tiny bundle: target of 4 layers, one DFlash drafter with full attention."""
    return Model(make_bundle())
