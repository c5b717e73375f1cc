"""The self-check finds what a file check cannot, by running every graph once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export import drafts
from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.errors import ExportError
from dflash_onnx.models.graphs.dflash import build_append
from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime import mapped_runtime
from dflash_onnx.runtime.binding import Binding
from dflash_onnx.runtime.mapped_runtime import PACKED_BYTES
from dflash_onnx.runtime.selfcheck import self_check
from dflash_onnx.runtime.session import Graph
from dflash_onnx.runtime.target import Target


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


@pytest.mark.parametrize("name", ["head", "target"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("packed_bytes", [0, PACKED_BYTES])
def test_damaged_scales_are_found(
    make_bundle: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    packed_bytes: int,
    value: float,
) -> None:
    """Packed weights run in other kernels than those of a large target, which are only mapped.
    Both must let scales through that are not finite."""
    monkeypatch.setattr(mapped_runtime, "PACKED_BYTES", packed_bytes)
    bundle = tmp_path / "bundle"
    shutil.copytree(make_bundle(precision="int4"), bundle)
    graph = onnx.load(bundle / f"{name}.onnx", load_external_data=False).graph
    scales = next(t for t in graph.initializer if t.name.endswith(".scales"))
    place = {entry.key: entry.value for entry in scales.external_data}
    offset, size = int(place["offset"]), int(place["length"]) // 4
    np.memmap(bundle / place["location"], np.float32, "r+", offset, (size,))[:] = value
    with pytest.raises(ExportError, match=f"self-check: {name}.*not finite"):
        self_check(bundle)


DFLASH2 = {
    "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 6,
}  # fmt: skip
REDUCED = {"layout": "speculators", "draft_vocab": 96}


def test_every_graph_is_run(
    make_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is never run is never found wrong.
    With a plain, a DFlash2 and a reduced-vocabulary drafter, all graphs take part."""
    bundle = make_bundle(drafts=[{}, DFLASH2, REDUCED])
    bind, ran = Graph.bind, set()

    def note(graph: Graph) -> Binding:
        ran.add(graph._spec.file)
        return bind(graph)

    monkeypatch.setattr(Graph, "bind", note)
    self_check(bundle)
    assert ran == {graph.file for graph in read_manifest(bundle).graphs.values()}


def test_target_gets_deepstack_rows(
    make_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text alone feeds zeros there, which hide an input that overflows.
    The check feeds an image's own rows."""
    forward, seen = Target.forward, []

    def note(target: Target, *arguments: Any, **options: Any) -> Any:
        seen.append(arguments[3])
        return forward(target, *arguments, **options)

    monkeypatch.setattr(Target, "forward", note)
    self_check(make_bundle())
    assert len(seen[0]) == 2 and all((layer != 0).any() for layer in seen[0])


@pytest.mark.parametrize(
    ("draft", "tensor", "value", "where"),
    [
        ({}, "layers.1.mlp.down_proj.weight", np.inf, r"\(block\) .* not finite"),
        ({}, "norm.weight", 0, r"\(block\) gives rows .* equal"),
        (DFLASH2, "candidate_selector.hidden_projection.weight", np.nan, "candidates.*not finite"),
        (DFLASH2, "candidate_selector.successor_codebook", np.nan, "selector.*not finite"),
        (REDUCED, "lm_head.weight", np.nan, r"\(head\) .* not finite"),
    ],
)
def test_damaged_drafter_is_found(
    make_bundle: Callable[..., Path],
    tmp_path: Path,
    draft: dict[str, Any],
    tensor: str,
    value: float,
    where: str,
) -> None:
    """The best of a row of NaN is id 0, a fine token id, so ids alone say nothing.
    The numbers behind them are looked at."""
    bundle = tmp_path / "bundle"
    shutil.copytree(make_bundle(drafts=[draft]), bundle)
    ((name, spec),) = read_manifest(bundle).drafts.items()
    if "codebook" in tensor:
        assert spec.selector is not None
        offset, shape = spec.selector.successor.offset, spec.selector.successor.shape
    else:
        offset, shape = _place(bundle, name, tensor)
    np.memmap(bundle / f"{name}.data", np.float32, "r+", offset, shape)[:] = value
    with pytest.raises(ExportError, match=f"self-check: drafter {name}.*{where}"):
        self_check(bundle)


def _place(bundle: Path, name: str, tensor: str) -> tuple[int, tuple[int, ...]]:
    """Offset and shape of a tensor that one of a drafter's graphs reads from its data file."""
    for path in bundle.glob(f"{name}.*.onnx"):
        for stored in onnx.load(path, load_external_data=False).graph.initializer:
            if stored.name == tensor:
                entries = {e.key: e.value for e in stored.external_data}
                return int(entries["offset"]), tuple(stored.dims)
    raise AssertionError(f"no graph of {name} reads {tensor}")


def test_append_graph_must_write_what_numpy_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append graph that adds to what was there looks right in a fresh cache of zeros.
    The check writes over other numbers."""

    def adding(*arguments: Any) -> onnx.ModelProto:
        model = build_append(*arguments)
        (node,) = (n for n in model.graph.node if n.op_type == "ScatterND")
        node.attribute.append(onnx.helper.make_attribute("reduction", "add"))
        return model

    monkeypatch.setattr(drafts, "build_append", adding)
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft", tmp_path / "target")
    options = ExportOptions(tmp_path / "target", tmp_path / "bundle", (tmp_path / "draft",))
    with pytest.raises(ExportError, match="drafter dflash's append graph"):
        export_bundle(options, self_check)


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
