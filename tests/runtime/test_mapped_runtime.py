"""The self-check's runtime: sessions are opened in threads, closed after use, opened again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support_cases import HYBRID
from support_prompts import BundleMaker

from dflash_onnx.models.errors import ManifestError
from dflash_onnx.runtime.bundle_files import open_bundle
from dflash_onnx.runtime.mapped_runtime import (
    PACKED_BYTES,
    MappedGraph,
    MappedRuntime,
    packed_graphs,
)


def head_of(runtime: MappedRuntime, bundle: Path) -> MappedGraph:
    """The bundle's head, being opened."""
    return runtime.open(open_bundle(bundle).graphs["head"])


def best(graph: MappedGraph, bundle: Path) -> int:
    """The head's answer to a row of ones."""
    text = open_bundle(bundle).target.text
    hidden = np.ones((1, text.hidden_size), np.float32)
    bias = np.zeros(text.vocab_size, np.float32)
    (top,) = graph.run({"hidden": hidden, "rows": np.array([0])}, ["top_ids"], {"bias": bias})
    return int(top[0, 0])


def test_a_closed_graph_opens_itself_again(make_bundle: Callable[..., Path]) -> None:
    """After `close` nothing holds the mapped weights, and the next run gives the same."""
    bundle = make_bundle()
    with MappedRuntime(bundle) as runtime:
        graph = head_of(runtime, bundle)
        assert head_of(runtime, bundle) is graph, "opened once for all who ask"
        first = best(graph, bundle)
        assert graph._session is not None
        runtime.close()
        assert graph._session is None and not graph._threads.by_shapes
        assert best(graph, bundle) == first


def test_a_graph_that_does_not_open(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """The thread's error reaches whoever runs the graph, with the file's name."""
    bundle = tmp_path / "bundle"
    shutil.copytree(make_bundle(), bundle)
    with MappedRuntime(bundle) as runtime:
        path = bundle / "head.onnx"
        content = path.read_bytes()
        spec = open_bundle(bundle).graphs["head"]
        path.write_bytes(content[: len(content) // 2])
        graph = runtime.open(spec)
        with pytest.raises(ManifestError, match="head.onnx cannot be loaded"):
            graph.bind()


@pytest.mark.parametrize("packed", [(), ("head",)])
def test_packed_weights_give_the_same(make_bundle: Callable[..., Path], packed: tuple) -> None:
    """A quantised head's best token is the same in both forms."""
    bundle = make_bundle(precision="int8")
    with MappedRuntime(bundle) as plain, MappedRuntime(bundle, packed) as runtime:
        expected = best(head_of(plain, bundle), bundle)
        assert best(head_of(runtime, bundle), bundle) == expected


def test_small_quantised_graphs_are_packed(make_bundle: BundleMaker) -> None:
    """Floats and w8a8 are not, a large file is not, and a hybrid's forms are compared in floats."""
    manifest = open_bundle(make_bundle(precision="int4"))
    packed = set(packed_graphs(manifest))
    assert packed == manifest.graphs.keys() - {"vision"}
    size = replace(manifest.data_files["target.data"], num_bytes=PACKED_BYTES + 1)
    large = replace(manifest, data_files=manifest.data_files | {"target.data": size})
    assert set(packed_graphs(large)) == packed - {"target"}
    hybrid = open_bundle(make_bundle(target=HYBRID, precision="int4"))
    assert {"target", "target.portable"}.isdisjoint(packed_graphs(hybrid))
    for mapped_as_it_is in ("fp32", "w8a8"):
        assert packed_graphs(open_bundle(make_bundle(precision=mapped_as_it_is))) == []
