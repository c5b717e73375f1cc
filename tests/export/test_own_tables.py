"""A drafter borrows the target's embedding and head; one that ships other tables is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.errors import ExportError

TABLE = "model.language_model.embed_tokens.weight"


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("change", [0.0, 1.0])
def test_tables_of_its_own(tmp_path: Path, name: str, change: float) -> None:
    """Dropping a table that differs would draft badly in silence; an equal copy is harmless."""
    make_target(tmp_path / "target", tied=True)
    make_draft(tmp_path / "draft", tmp_path / "target")
    file = tmp_path / "draft" / "model.safetensors"
    table = load_file(tmp_path / "target" / "model.safetensors")[TABLE]
    table[3, 5] += np.float32(change)
    save_file({**load_file(file), name: table}, file)
    options = ExportOptions(tmp_path / "target", tmp_path / "bundle", (tmp_path / "draft",))
    if not change:
        assert export_bundle(options).is_dir()
        return
    with pytest.raises(ExportError, match=f"ships an {name} of its own"):
        export_bundle(options)
