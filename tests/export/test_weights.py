"""Which tensors reach a bundle: drafters that fit their target, one copy of each, the same values.

Knows checkpoints and data files; the graphs that read them are in test_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file
from support_checkpoint import REMOVED, Tensors, edit_json, edit_tensors, export, refused
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export import checkpoint
from dflash_onnx.export.store import ALIGNMENT
from dflash_onnx.models.manifest import Manifest, read_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.bundle_files import map_table


def data_files(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(bundle.glob("*.data"))}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"vocab": 520}, ("vocab_size is 520", "512")),
        ({"hidden": 48}, ("hidden_size is 48", "64")),
        ({"layers": 6}, ("num_target_layers is 6", "4")),
    ],
)
def test_drafter_of_another_target(
    pair: Path, target: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A drafter made for a target of another vocabulary, width or depth.
    Both numbers are in the message, before a weight is read."""
    make_target(pair.parent / "other", **target)
    make_draft(pair / "draft", pair.parent / "other")
    refused(pair, "draft/config.json", "another target", *words)


def test_taps_beyond_the_target(pair: Path) -> None:
    """Without num_target_layers only the tap ids tell that the target is too shallow.
    The ids and the target's depth are named."""
    changes = {"num_target_layers": REMOVED, "dflash_config.target_layer_ids": [1, 4]}
    edit_json(pair / "draft/config.json", changes)
    refused(pair, "target_layer_ids [1, 4]", "it has 4")


def test_features_of_another_width(pair: Path) -> None:
    """A drafter may read features of a width of its own, as long as it is the target's.
    Otherwise both widths are named."""
    edit_json(pair / "draft/config.json", {"target_hidden_size": 32})
    refused(pair, "target_hidden_size is 32", "64")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.update({"candidate_selector.predecessor_codebook": np.ones((4, 2))}), "codeb"),
        (lambda t: t.update({"layers.2.mlp.down_proj.weight": np.ones((4, 2))}), "layers.2"),
        (lambda t: t.update({"model.norm.weight": t["norm.weight"]}), "norm.weight"),
        (lambda t: t.pop("hidden_norm.weight"), "hidden_norm.weight"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].copy()}), "[64, 64]"),
    ],
)
def test_draft_tensors_that_do_not_fit(
    pair: Path, change: Callable[[Tensors], Any], word: str
) -> None:
    """Codebooks of DFlash2, a layer too many, a twin under another prefix, none, fc too slim.
    Loaders that skip what they do not know draft noise; this one stops."""
    edit_tensors(pair / "draft", change)
    refused(pair, word)


def test_prefix_training_keys_and_a_copied_head_change_nothing(pair: Path) -> None:
    """Savers add `model.`, leave training copies in, or store the target's head once more.
    The drafter's data file is the same byte for byte."""
    plain = data_files(export(pair, "plain"))["dflash.data"]
    make_draft(pair / "draft", pair / "target", prefix="model.")
    assert data_files(export(pair, "prefixed"))["dflash.data"] == plain
    make_draft(pair / "draft", pair / "target", layout="speculators", training_keys=True)
    assert data_files(export(pair, "training"))["dflash.data"] == plain
    table = load_file(pair / "target" / "model.safetensors")
    head = {"lm_head.weight": table["model.language_model.embed_tokens.weight"]}
    edit_tensors(pair / "draft", lambda t: t.update(head))
    assert data_files(export(pair, "head"))["dflash.data"] == plain


def exact_values(folder: Path, dtype: Any, file: str = "model.safetensors") -> None:
    """Round every weight to multiples of 1/32 below 4, which all source types hold, and cast."""
    tensors = load_file(folder / "model.safetensors")
    rounded = {n: np.clip(np.round(v * 32) / 32, -3.9375, 3.9375) for n, v in tensors.items()}
    save_file({n: v.astype(dtype) for n, v in rounded.items()}, folder / file)


def test_source_type_and_shards_do_not_matter(pair: Path) -> None:
    """The same values saved as fp32, fp16 and bf16, and a checkpoint saved whole and in shards.
    The data files are equal byte for byte."""
    made = []
    for name, dtype in (("a", np.float32), ("b", np.float16), ("c", ml_dtypes.bfloat16)):
        make_target(pair / "target")
        make_draft(pair / "draft", pair / "target")
        exact_values(pair / "target", dtype)
        exact_values(pair / "draft", dtype)
        made.append(data_files(export(pair, name)))
    assert made[0] == made[1] == made[2]
    make_target(pair / "whole/target")
    make_target(pair / "shards/target", shards=4)
    whole, shards = (export(pair / name, draft=False) for name in ("whole", "shards"))
    assert data_files(whole) == data_files(shards)


@pytest.mark.parametrize("size", [1, 700, 5000])
def test_tensors_in_many_blocks(pair: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Released tensors are longer than a block, these are not, so blocks shrink to a row or a few.
    The files are the same however a tensor is cut."""
    whole = data_files(export(pair, "whole"))
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", size)
    assert data_files(export(pair, "cut")) == whole


def stored_ranges(bundle: Path) -> dict[str, set[tuple[int, int]]]:
    """File -> (offset, length) of every tensor that a graph or the manifest names."""
    ranges: dict[str, set[tuple[int, int]]] = {}
    for path in bundle.glob("*.onnx"):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entry = {item.key: item.value for item in tensor.external_data}
                span = (int(entry["offset"]), int(entry["length"]))
                ranges.setdefault(entry["location"], set()).add(span)
    manifest = read_manifest(bundle)
    tables = [manifest.embedding, *(d.d2t for d in manifest.drafts.values() if d.d2t)]
    for table in tables:
        length = int(np.prod(table.shape)) * np.dtype(table.dtype).itemsize
        ranges.setdefault(table.file, set()).add((table.offset, length))
    return ranges


def num_values(folder: Path) -> int:
    return sum(v.size for v in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_stored_once(tmp_path: Path, tied: bool) -> None:
    """Inject and block share K/V weights, a tied head is the embedding, and an untied one is not.
    Named ranges fill the data files without overlap, and the sum is the checkpoints' own."""
    make_target(tmp_path / "target", tied=tied)
    make_draft(tmp_path / "draft", tmp_path / "target")
    bundle = export(tmp_path)
    ranges, files = stored_ranges(bundle), data_files(bundle)
    assert ranges.keys() == files.keys() == read_manifest(bundle).data_files.keys()
    assert ("head.data" in files) is not tied
    for name, spans in ranges.items():
        stop = 0
        for offset, length in sorted(spans):
            assert stop <= offset < stop + ALIGNMENT and offset % ALIGNMENT == 0
            stop = offset + length
        assert stop == len(files[name])
    stored = sum(length for spans in ranges.values() for _, length in spans)
    assert stored == 4 * (num_values(tmp_path / "target") + num_values(tmp_path / "draft"))


def test_untied_head_is_the_head(tmp_path: Path) -> None:
    """The head's own matrix, not the table.
    Its bytes are in head.data."""
    make_target(tmp_path / "target", tied=False)
    bundle = export(tmp_path, draft=False)
    expected = load_file(tmp_path / "target/model.safetensors")["lm_head.weight"]
    assert (bundle / "head.data").read_bytes() == expected.tobytes()


def test_tied_checkpoint_with_a_second_copy(pair: Path) -> None:
    """Some savers write the tied head as a tensor of its own.
    The configuration says tied, so it is dropped."""
    plain = data_files(export(pair, "plain", draft=False))
    table = load_file(pair / "target" / "model.safetensors")
    head = {"lm_head.weight": table["model.language_model.embed_tokens.weight"]}
    edit_tensors(pair / "target", lambda t: t.update(head))
    assert data_files(export(pair, "copied", draft=False)) == plain


def reduced(pair: Path, **options: Any) -> tuple[Path, Manifest]:
    make_draft(pair / "draft", pair / "target", layout="speculators", draft_vocab=96, **options)
    bundle = export(pair)
    return bundle, read_manifest(bundle)


def test_reduced_vocabulary(pair: Path) -> None:
    """d2t holds offsets (target id = draft id + d2t[draft id]); the head has a row per draft id.
    Everything the drafter proposes is an id of the target's."""
    bundle, manifest = reduced(pair)
    tensors = load_file(pair / "draft/model.safetensors")
    ids = np.flatnonzero(tensors["t2d"])
    head = {t.name: t.shape for t in manifest.graphs["dflash.head"].outputs}
    assert head["logits"] == ("chosen", 96)
    model = Model(bundle)
    table = map_table(bundle, manifest.drafts["dflash"].d2t)
    np.testing.assert_array_equal(table, ids)
    generation = model.generate([{"role": "user", "content": "Compare both."}], max_new_tokens=40)
    generation.result()
    drafted = {token for record in generation.rounds for token in record.drafted}
    assert len(drafted) > 3 and drafted <= set(ids.tolist()) - set(manifest.banned_ids)
    assert max(drafted) >= 96


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), ("no tensor 'd2t'",)),
        (lambda t: t.update(d2t=t["d2t"][:-1].copy()), ("d2t", "[95]", "[96]")),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), ("d2t", "F32")),
        (lambda t: t.update(d2t=t["d2t"] + 512), ("d2t", "vocabulary of 512")),
        (lambda t: t.update(d2t=np.zeros_like(t["d2t"]) - 1), ("d2t", "-1")),
        (lambda t: t.pop("lm_head.weight"), ("lm_head.weight",)),
    ],
)
def test_damaged_reduced_vocabulary(
    pair: Path, change: Callable[[Tensors], Any], words: tuple[str, ...]
) -> None:
    """A map that is missing, short, not whole numbers, or leads outside the target's vocabulary.
    Each would draft other tokens than the drafter meant."""
    make_draft(pair / "draft", pair / "target", layout="speculators", draft_vocab=96)
    edit_tensors(pair / "draft", change)
    refused(pair, *words)
