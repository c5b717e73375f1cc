"""Changes tiny checkpoints on purpose: a key of a JSON file, a tensor, a whole file.

Knows file formats only; which change must be refused is the tests' business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.errors import DflashOnnxError, ExportError

REMOVED = object()
Tensors = dict[str, np.ndarray]


def changed(raw: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a JSON object with keys set or, with `REMOVED`, deleted; dots go into sections."""
    result: dict[str, Any] = json.loads(json.dumps(raw))
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        if value is REMOVED:
            place.pop(key, None)
        else:
            place[key] = value
    return result


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Apply `changed` to a JSON file."""
    path.write_text(json.dumps(changed(read(path), changes)), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Load model.safetensors, let `change` work on its tensors in place, and save it again."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def export(folder: Path, name: str = "bundle", draft: bool = True, **options: Any) -> Path:
    """Export folder/target, and folder/draft when asked, to folder/name."""
    drafts = (folder / "draft",) if draft else ()
    return export_bundle(ExportOptions(folder / "target", folder / name, drafts, **options))


def leftovers(folder: Path) -> list[str]:
    """Names beside the checkpoints: an unfinished export must add none."""
    return sorted(p.name for p in folder.iterdir() if p.name not in ("target", "draft"))


def refused(pair: Path, *words: str, **options: Any) -> None:
    """Check that the export fails with one line that has all the words, and leaves no file."""
    with pytest.raises(DflashOnnxError) as caught:
        export(pair, **options)
    message = str(caught.value)
    assert type(caught.value) is ExportError and "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    assert leftovers(pair) == []
