"""The ONNX files themselves: valid, portable, described by the manifest, fused by ONNX Runtime.

Knows the graph contracts by name and shape; what the numbers must be is the golden files' part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from dflash_onnx.models.manifest import GraphSpec, Manifest, TensorSpec, read_manifest

BundleMaker = Callable[..., Path]
MIXED = ("sliding_attention", "full_attention", "sliding_attention")
DRAFTS: list[dict[str, Any]] = [
    {"layers": 3, "layer_types": MIXED, "sliding_window": 16},
    {"layout": "speculators", "draft_vocab": 96},
]
NAMES = (
    ["target", "vision", "head"]
    + [f"dflash.{part}" for part in ("inject", "block", "append")]
    + [f"dflash-2.{part}" for part in ("inject", "block", "append", "head")]
)
# RMSNorms: four per decoder layer (two of them per head) and the final one.
NORMS = {"target": 4 * 4 + 1, "dflash.block": 4 * 3 + 1, "dflash.inject": 1 + 3}


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def bundle(request: pytest.FixtureRequest, make_bundle: BundleMaker) -> Path:
    return make_bundle(drafts=DRAFTS, precision=request.param)


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


def load(bundle: Path, name: str) -> onnx.ModelProto:
    return onnx.load(bundle / f"{name}.onnx", load_external_data=False)


def test_manifest_lists_exactly_the_graphs(bundle: Path, manifest: Manifest) -> None:
    """One file per graph and no other.
    A bundle is these, the data files, tokenizer, template and manifest."""
    assert set(manifest.graphs) == set(NAMES)
    expected = {f"{name}.onnx" for name in NAMES} | set(manifest.data_files)
    expected |= {"bundle.json", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in bundle.iterdir()} == expected
    assert all(path.is_file() and not path.is_symlink() for path in bundle.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_graph_is_valid_and_portable(bundle: Path, name: str) -> None:
    """Checker and shape inference, the agreed opset and IR version, no paths in weight locations.
    A path would break as soon as the folder is moved."""
    path = bundle / f"{name}.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = load(bundle, name)
    assert model.ir_version == 8
    assert {o.domain: o.version for o in model.opset_import} == {"": 17, "com.microsoft": 1}
    for tensor in model.graph.initializer:
        location = {e.key: e.value for e in tensor.external_data}.get("location")
        if location is not None:
            assert location == Path(location).name and (bundle / location).is_file()
        else:
            assert len(tensor.raw_data) < 1024, f"{tensor.name} is a weight inside the graph"


@pytest.mark.parametrize("name", NAMES)
def test_manifest_states_the_interface(bundle: Path, manifest: Manifest, name: str) -> None:
    """Every input and output with name, type and symbolic shape, as the file has them.
    The runtime trusts the manifest alone."""
    model = load(bundle, name)
    for stated, found in (
        (manifest.graphs[name].inputs, model.graph.input),
        (manifest.graphs[name].outputs, model.graph.output),
    ):
        types = [v.type.tensor_type for v in found]
        shapes = [tuple(d.dim_param or d.dim_value for d in t.shape.dim) for t in types]
        dtypes = [onnx.helper.tensor_dtype_to_np_dtype(t.elem_type).name for t in types]
        names = [v.name for v in found]
        assert list(stated) == list(map(TensorSpec, names, dtypes, shapes))


def test_dimensions_that_vary_are_symbolic(manifest: Manifest) -> None:
    """Rows, cache capacities, patches and block lengths have names, widths have numbers.
    A number where a name belongs is a graph for one prompt."""
    shapes = {
        f"{name}:{tensor.name}": tensor.shape
        for name, graph in manifest.graphs.items()
        for tensor in graph.inputs
    }
    assert shapes["target:inputs_embeds"] == (1, "rows", 64)
    assert shapes["target:past_key_values.3.value"] == (1, 2, "capacity", 16)
    assert shapes["target:deepstack.1"] == ("rows", 64)
    assert shapes["vision:patches"] == ("patches", 1536)
    assert shapes["head:hidden"] == ("rows", 64)
    assert shapes["dflash.inject:tap.1"] == ("rows", 64)
    assert shapes["dflash.block:embeds"] == ("block", 64)
    assert shapes["dflash.block:mask.0"] == ("block", "rows_0_block")
    assert shapes["dflash.block:past_key_values.1.key"] == (1, 1, "rows_1", 32)


def test_projections_are_stacked(bundle: Path) -> None:
    """Matrices that read the same rows are stored as one: q, k, v of the target, k and v of the
    drafter, gate and up. Gate and up are multiplied apart: no rows to take apart afterwards."""
    target = {t.name: tuple(t.dims) for t in load(bundle, "target").graph.initializer}
    block = {t.name: tuple(t.dims) for t in load(bundle, "dflash.block").graph.initializer}
    for i in range(4):
        assert target[f"layers.{i}.self_attn.qkv"] == (64 + 2 * 32, 64)
        for part in ("0:128", "128:256"):
            assert target[f"layers.{i}.mlp.gate_up[{part}]"] == (128, 64)
    assert block["layers.2.self_attn.kv"] == (2 * 32, 64)
    assert block["layers.2.mlp.gate_up[128:256]"] == (128, 64)
    assert not [n for n in (*target, *block) if "k_proj" in n or "gate_proj" in n]


def test_block_returns_no_keys_of_mask_rows(manifest: Manifest) -> None:
    """Mask rows in a cache poison the next block.
    The block graph has the hidden rows as its only output."""
    assert [t.name for t in manifest.graphs["dflash.block"].outputs] == ["hidden"]


def optimised(bundle: Path, name: str, folder: Path) -> Counter[str]:
    """Operator counts after ONNX Runtime's own optimisation at the level the runtime uses."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    session = ort.InferenceSession(bundle / f"{name}.onnx", options, ["CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]
    model = onnx.load(folder / "optimised.onnx", load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_fused_at_load(bundle: Path, name: str, tmp_path: Path) -> None:
    """RMSNorm is written in five primitives because no checker knows the fused form.
    ONNX Runtime finds every one of them and leaves no primitive behind."""
    counts = optimised(bundle, name, tmp_path)
    fused = counts["SimplifiedLayerNormalization"] + counts["SkipSimplifiedLayerNormalization"]
    assert fused == NORMS[name]
    assert not counts["ReduceMean"] and not counts["Pow"]


def test_half_precision_weights_are_cast_at_load(make_bundle: BundleMaker, tmp_path: Path) -> None:
    """fp16 files hold matrices in half precision and everything else in single.
    The casts are folded when the session is built, not run for every token."""
    bundle = make_bundle(drafts=DRAFTS, precision="fp16")
    types = {t.name: t.data_type for t in load(bundle, "target").graph.initializer}
    assert types["layers.0.self_attn.qkv"] == onnx.TensorProto.FLOAT16
    assert types["layers.0.input_layernorm.weight"] == onnx.TensorProto.FLOAT
    counts = optimised(bundle, "target", tmp_path)
    assert counts["Cast"] <= 1


SIZES: list[dict[str, int]] = [
    {"rows": 1, "chosen": 1, "capacity": 9, "block": 2, "rows_0": 1, "rows_1": 1, "patches": 4},
    {"rows": 3, "chosen": 2, "capacity": 64, "block": 8, "rows_0": 15, "rows_1": 40, "patches": 16},
    {"rows": 50, "chosen": 50, "capacity": 90, "block": 9, "rows_0": 0, "rows_1": 0, "patches": 96},
]  # fmt: skip


def feed(spec: TensorSpec, sizes: dict[str, int]) -> np.ndarray:
    """Random numbers of a tensor's shape; small ids where it holds ids."""
    shape = [sizes[d] if isinstance(d, str) else d for d in spec.shape]
    if spec.name == "row_numbers":
        return np.arange(sizes["rows"])
    values = np.random.default_rng(len(spec.name)).random(shape)
    if spec.dtype == "float32":
        return values.astype(np.float32)
    return np.zeros(shape, spec.dtype)


def run(bundle: Path, graph: GraphSpec, sizes: dict[str, int]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(bundle / graph.file, options, ["CPUExecutionProvider"])
    return session.run(None, {spec.name: feed(spec, sizes) for spec in graph.inputs})


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_graph_runs_at_other_sizes(
    bundle: Path, manifest: Manifest, name: str, sizes: dict[str, int]
) -> None:
    """One row, a few and many, empty draft caches, small and larger images.
    Outputs have the shapes and types the manifest states and finite values."""
    sizes = {**sizes, **{f"rows_{i}_block": sizes[f"rows_{i}"] + sizes["block"] for i in (0, 1)}}
    graph = manifest.graphs[name]
    if name == "vision":
        sizes["rows"] = sizes["patches"] // 4
    for spec, output in zip(graph.outputs, run(bundle, graph, sizes), strict=True):
        assert output.shape == tuple(sizes.get(d, d) for d in spec.shape), spec.name
        assert output.dtype == spec.dtype
        assert np.isfinite(output).all()
