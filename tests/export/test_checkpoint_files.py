"""Weight files that are incomplete, damaged or of another network are refused by name.

Knows the safetensors layouts and which words the message owes the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support_checkpoint import Tensors, edit_tensors, export, read, refused
from tiny_checkpoint import make_draft, make_target

TABLE = "model.language_model.embed_tokens.weight"
LAYER = "model.language_model.layers.1"
QUERY = f"{LAYER}.self_attn.q_proj.weight"


def sharded(folder: Path) -> Path:
    make_target(folder / "target", shards=3)
    make_draft(folder / "draft", folder / "target")
    return folder / "target/model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-00009-of-00003.safetensors", ("model-00009", "missing")),
        ("../target/model-00001-of-00003.safetensors", ("outside", "../target")),
        ("/etc/hostname", ("outside", "/etc/hostname")),
        ("..", ("..",)),
        (7, ("weight_map",)),
    ],
)
def test_shard_that_cannot_be_used(tmp_path: Path, file: Any, words: tuple[str, ...]) -> None:
    """An index may name a shard that was not downloaded, or a file outside the folder.
    Neither is opened."""
    index = sharded(tmp_path)
    weight_map = read(index)["weight_map"] | {TABLE: file}
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    refused(tmp_path, index.name, *words)


@pytest.mark.parametrize("raw", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_index_without_a_map(tmp_path: Path, raw: dict[str, Any]) -> None:
    """An index that maps nothing.
    The key it lacks is named."""
    index = sharded(tmp_path)
    index.write_text(json.dumps(raw), encoding="utf-8")
    refused(tmp_path, index.name, "weight_map")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    """Shards of two downloads in one folder may both hold a tensor, with other values.
    Which one is meant nobody knows, so both files are named."""
    index = sharded(tmp_path)
    first, second = sorted((tmp_path / "target").glob("model-*.safetensors"))[:2]
    tensors, others = load_file(first), load_file(second)
    name = min(tensors)
    save_file(others | {name: tensors[name] + 1}, second, {"format": "pt"})
    refused(tmp_path, name, first.name, second.name)
    assert index.exists()


def test_index_that_disagrees_with_the_shards(tmp_path: Path) -> None:
    """An index of another version: a tensor in another shard, in none, or not in the index.
    The tensor and both opinions are named."""
    index = sharded(tmp_path)
    right = read(index)["weight_map"]
    files = sorted(set(right.values()))
    other = next(file for file in files if file != right[TABLE])
    wrong = (
        (right | {TABLE: other}, (TABLE, other, right[TABLE])),
        (right | {"ghost": files[0]}, ("ghost", files[0], "no shard")),
        ({name: file for name, file in right.items() if name != QUERY}, (QUERY, "no file")),
    )
    for weight_map, words in wrong:
        index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        refused(tmp_path, index.name, *words)


@pytest.mark.parametrize("keep", [4, 1000, -100])
def test_truncated_weights(pair: Path, keep: int) -> None:
    """Interrupted downloads end inside the length, the header or the data.
    The file is named as unreadable each time."""
    path = pair / "target/model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(pair, str(path), "not a readable safetensors file")


def _set(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name])

    return change


def _poison(value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[QUERY][-1, -1] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(QUERY), ("no tensor", QUERY)),
        (lambda t: t.pop("model.visual.merger.norm.bias"), ("model.visual.merger.norm.bias",)),
        (lambda t: t.update(extra=np.zeros(2, np.float32)), ("'extra'", "matches nothing")),
        (lambda t: t.update({f"{LAYER}.self_attn.q_proj.bias": np.zeros(64)}), ("q_proj.bias",)),
        (_set(QUERY, lambda w: w[:-1].copy()), (QUERY, "[63, 64]", "[64, 64]")),
        (_set(QUERY, lambda w: w.astype(np.int8)), (QUERY, "I8", "Quantised")),
        (_set(QUERY, lambda w: w.astype(np.int32)), (QUERY, "I32", "Quantised")),
        (_set(QUERY, lambda w: w.astype(ml_dtypes.float8_e4m3fn)), (QUERY, "F8_E4M3")),
        (_poison(float("nan")), (QUERY, "not finite")),
        (_poison(float("-inf")), (QUERY, "not finite")),
    ],
)
def test_weights_that_do_not_fit(
    pair: Path, change: Callable[[Tensors], Any], words: tuple[str, ...]
) -> None:
    """Missing, extra, misshapen, quantised and not finite tensors, one at a time.
    The tensor is named with its file's own name for it."""
    edit_tensors(pair / "target", change)
    refused(pair, *words)


def test_value_too_large_for_half_precision(pair: Path) -> None:
    """70000 is a fine fp32 weight and infinite in fp16.
    Only the fp16 export refuses it, and says which precision takes it."""
    edit_tensors(pair / "target", _poison(70000.0))
    refused(pair, QUERY, "overflows fp16", "--precision fp32", precision="fp16")
    export(pair)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_nan_in_half_precision_source(pair: Path, dtype: Any) -> None:
    """NaN must be found in every source type, and without a stray warning.
    The tensor is named."""
    edit_tensors(pair / "target", _poison(float("nan")))
    edit_tensors(pair / "target", _set(QUERY, lambda w: w.astype(dtype)))
    refused(pair, QUERY, "not finite")
