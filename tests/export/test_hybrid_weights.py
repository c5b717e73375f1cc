"""Tensors of hybrid checkpoints: recurrent layers, the MTP head, precisions and shards.

Knows what a bundle must hold of them; that the networks compute the right thing is tested apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file
from support_checkpoint import Tensors, edit_json, edit_tensors, export, refused
from tiny_checkpoint import make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.errors import ExportError
from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.selfcheck import self_check

HYBRID = "Qwen3_5ForConditionalGeneration"
LAYER = "model.language_model.layers.1.linear_attn"
MESSAGE = [{"role": "user", "content": "Compare both."}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid checkpoint with its MTP head, which no test may change."""
    folder = tmp_path_factory.mktemp("hybrid")
    make_target(folder / "target", architecture=HYBRID, mtp=True)
    return folder


@pytest.fixture
def box(made: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(made, tmp_path / "box"))


def answer(bundle: Path, draft: str = "none", **options: Any) -> tuple[int, ...]:
    """Sixteen ids of a greedy answer."""
    model = Model(bundle, **options)
    return tuple(model.generate(MESSAGE, draft=draft, max_new_tokens=16).result().token_ids)


def data_files(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(bundle.glob("*.data"))}


def stored(graph: Path) -> dict[str, tuple[int, tuple[int, ...]]]:
    """ONNX type and shape of every weight that a graph reads from a data file."""
    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    external = (t for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL)
    return {t.name: (t.data_type, tuple(t.dims)) for t in external}


def reshaped(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda t: t.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("mtp.fc.weight"), ("no tensor 'mtp.fc.weight'",)),
        (lambda t: t.pop("mtp.norm.weight"), ("no tensor 'mtp.norm.weight'",)),
        (lambda t: t.pop("mtp.layers.0.self_attn.k_norm.weight"), ("mtp.layers.0.self_attn",)),
        (reshaped("mtp.fc.weight", 64, 64), ("mtp.fc.weight", "[64, 64]", "[64, 128]")),
        (reshaped("mtp.layers.0.self_attn.q_proj.weight", 64, 64), ("q_proj", "[128, 64]")),
        (reshaped("mtp.layers.1.mlp.up_proj.weight", 128, 64), ("'mtp.layers.1.mlp.up",)),
        (reshaped("mtp.embed_tokens.weight", 512, 64), ("'mtp.embed_tokens.weight'",)),
        (lambda t: t.pop(f"{LAYER}.A_log"), (f"no tensor '{LAYER}.A_log'",)),
        (lambda t: t.pop(f"{LAYER}.in_proj_b.weight"), (f"no tensor '{LAYER}.in_proj_b",)),
        (reshaped(f"{LAYER}.A_log", 2), (f"{LAYER}.A_log", "[2]", "[4]")),
        (reshaped(f"{LAYER}.dt_bias", 4, 1), (f"{LAYER}.dt_bias", "[4, 1]", "[4]")),
        (reshaped(f"{LAYER}.conv1d.weight", 96, 4), ("conv1d", "[96, 4]", "[96, 1, 4]")),
        (reshaped(f"{LAYER}.norm.weight", 64), (f"{LAYER}.norm.weight", "[64]", "[16]")),
        (reshaped(f"{LAYER}.conv1d.bias", 96), (f"'{LAYER}.conv1d.bias'", "matches nothing")),
        (reshaped("model.language_model.layers.1.self_attn.q_proj.weight", 4, 4), ("self_attn",)),
        (reshaped("model.visual.deepstack_merger_list.0.norm.weight", 4), ("deepstack_merger",)),
    ],
)
def test_tensors_that_do_not_fit(
    box: Path, change: Callable[[Tensors], Any], words: tuple[str, ...]
) -> None:
    """One tensor is missing, of another shape, or belongs to no network that was described.
    The message names it, and nothing is left behind."""
    edit_tensors(box / "target", change)
    refused(box, *words, draft=False)


def drop_mtp(tensors: Tensors) -> None:
    """What transformers does to a checkpoint that it loads and saves."""
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_a_head_lost_by_transformers(box: Path) -> None:
    """The configuration speaks of an MTP head that is not there: a whole target without one."""
    whole = answer(export(box, "whole", draft=False))
    edit_tensors(box / "target", drop_mtp)
    bundle = export_bundle(ExportOptions(box / "target", box / "lost"), self_check)
    manifest = read_manifest(bundle)
    assert (manifest.target.mtp, manifest.mtp, manifest.draft_names) == (True, False, ())
    assert "mtp.data" not in manifest.data_files and "mtp" not in manifest.graphs
    assert answer(bundle) == whole


def test_a_head_of_which_the_configuration_says_nothing(box: Path) -> None:
    """Its tensors would be left out without a word, so the first of them is named."""
    edit_json(box / "target/config.json", {"text_config.mtp_num_hidden_layers": 0})
    refused(box, "'mtp.fc.weight' matches nothing", draft=False)


def test_a_head_in_another_shard(box: Path, tmp_path: Path) -> None:
    """Released checkpoints keep it in a shard of its own; the files are the same as from one."""
    whole = data_files(export(box, draft=False))
    make_target(tmp_path / "shards/target", architecture=HYBRID, mtp=True, shards=5)
    assert len(list((tmp_path / "shards/target").glob("*.safetensors"))) == 5
    assert data_files(export(tmp_path / "shards", draft=False)) == whole


@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", False), ("float16", True)])
def test_half_precision_checkpoints(tmp_path: Path, dtype: str, tied: bool) -> None:
    """Read as they are, and with the MTP head the answer is the plain run's."""
    options: dict[str, Any] = {"architecture": HYBRID, "mtp": True, "dtype": dtype, "tied": tied}
    make_target(tmp_path / "target", **options)
    bundle = export(tmp_path, draft=False)
    plain = answer(bundle)
    assert len(set(plain)) > 4 and answer(bundle, "mtp") == plain


def test_fp16_bundle(box: Path) -> None:
    """Matrices are halved; vectors are not, among them what makes a state's decay.
    Both forms of the recurrent layers and the MTP head give the same answer."""
    bundle = export_bundle(
        ExportOptions(box / "target", box / "half", precision="fp16"), self_check
    )
    weights = stored(bundle / "target.onnx") | stored(bundle / "mtp.onnx")
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    for kind, shape in weights.values():
        assert kind == (half if len(shape) > 1 else single)
    assert weights["mtp.fc.weight"][0] == weights["layers.0.linear_attn.in_proj"][0] == half
    assert weights["layers.0.linear_attn.A_log"] == (single, (4,))
    plain = answer(bundle)
    assert len(set(plain)) > 4
    assert answer(bundle, "mtp") == answer(bundle, portable=True) == plain


def test_both_forms_share_their_weights(box: Path) -> None:
    """The fused and the portable graph name the same tensors; fused projections are one matrix."""
    bundle = export(box, draft=False)
    fused, portable = (stored(bundle / f"{n}.onnx") for n in ("target", "target.portable"))
    assert fused == portable
    assert fused["layers.0.linear_attn.in_proj"][1] == (96 + 64 + 4 + 4, 64)
    values = sum(v.size for v in load_file(box / "target/model.safetensors").values())
    assert sum(f.num_bytes for f in read_manifest(bundle).data_files.values()) >= 4 * values


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (f"{LAYER}.in_proj_qkv.weight", np.nan, f"{LAYER}.in_proj_qkv.weight is not finite"),
        (f"{LAYER}.dt_bias", np.inf, f"{LAYER}.dt_bias is not finite"),
        ("mtp.layers.0.mlp.up_proj.weight", np.nan, "mtp.layers.0.mlp.up_proj.weight is not"),
        ("mtp.fc.weight", 0.0, "self-check: mtp gives rows in which all values are equal"),
        ("mtp.norm.weight", -1.0, "self-check: mtp gives rows in which all values are equal"),
        (f"{LAYER}.A_log", 1e4, "self-check: "),
        ("model.language_model.norm.weight", -1.0, "self-check: target gives rows"),
    ],
)
def test_damaged_weights_are_found(box: Path, name: str, value: float, words: str) -> None:
    """Values that are no numbers, or make others so, or let a network say one thing only.
    The export fails with one line and leaves nothing behind."""
    edit_tensors(box / "target", lambda t: t[name].fill(value))
    with pytest.raises(ExportError, match=words) as caught:
        export_bundle(ExportOptions(box / "target", box / "bundle"), self_check)
    assert "\n" not in str(caught.value) and [p.name for p in box.iterdir()] == ["target"]


def test_an_interrupt_right_after_the_folder_is_made(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's name is known before it exists, so that nothing can come in between."""
    make = Path.mkdir

    def interrupted(path: Path, *arguments: Any, **options: Any) -> None:
        make(path, *arguments, **options)
        if ".partial-" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(box, draft=False)
    assert [p.name for p in box.iterdir()] == ["target"]
