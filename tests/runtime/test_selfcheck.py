"""The self-check finds what a file check cannot, by running every graph once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.errors import ExportError
from dflash_onnx.runtime.selfcheck import self_check


def test_good_bundles_pass(make_bundle: Callable[..., Path]) -> None:
    """fp32 and fp16, with and without drafters, full and sliding."""
    self_check(make_bundle())
    self_check(make_bundle(precision="fp16"))
    self_check(make_bundle(drafts=[]))
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
    self_check(make_bundle(drafts=[{}, sliding]))


@pytest.mark.parametrize(
    ("file", "where"),
    [("target.data", "target"), ("vision.data", "vision"), ("dflash.data", "drafter dflash")],
)
def test_values_that_are_not_finite_are_found(
    make_bundle: Callable[..., Path], tmp_path: Path, file: str, where: str
) -> None:
    """A damaged weight file has the right size and gives NaN."""
    bundle = tmp_path / "bundle"
    shutil.copytree(make_bundle(), bundle)
    values = np.memmap(bundle / file, np.float32, "r+")
    values[:] = np.inf
    values.flush()
    with pytest.raises(ExportError, match=f"self-check: {where}.*not finite"):
        self_check(bundle)


def test_taps_that_repeat_each_other_are_found(tmp_path: Path) -> None:
    """A layer that does nothing makes two taps equal, as wrong wiring would (genai#2460)."""
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft", tmp_path / "target", taps=(1, 2))
    weights = load_file(tmp_path / "target" / "model.safetensors")
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        weights[f"model.language_model.layers.2.{name}"][:] = 0
    save_file(weights, tmp_path / "target" / "model.safetensors")
    # Layer 1 gets a DeepStack addition, which is zero for the text rows of the check.
    with pytest.raises(ExportError, match="taps 1 and 2 are identical"):
        export_bundle(
            ExportOptions(tmp_path / "target", tmp_path / "bundle", (tmp_path / "draft",)),
            self_check,
        )
    assert not (tmp_path / "bundle").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"target", "draft"}


def test_a_wrong_pair_is_refused_at_export(tmp_path: Path) -> None:
    """A drafter of another target must not draft badly in silence (vllm-mlx#502)."""
    make_target(tmp_path / "target")
    make_target(tmp_path / "other", hidden=96, heads=6, kv_heads=2)
    make_draft(tmp_path / "draft", tmp_path / "other")
    options = ExportOptions(tmp_path / "target", tmp_path / "bundle", (tmp_path / "draft",))
    with pytest.raises(ExportError, match="hidden_size is 96, the target's is 64"):
        export_bundle(options, self_check)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["hidden_size"] == 96
