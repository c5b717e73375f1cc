"""A DFlash2 drafter's tensors: named when they do not fit, stored as they are when they do.

The numbers its graphs give are the business of the golden and parity tests.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support_checkpoint import Tensors, edit_json, edit_tensors, export, refused
from tiny_checkpoint import make_draft

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime.bundle_files import map_table

SIZES = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 6,
}
CODEBOOK = "candidate_selector.predecessor_codebook"
NAMES = [
    CODEBOOK,
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
    "layers.0.attention_conv.base_kernel",
    "layers.1.attention_conv.kernel_projection.weight",
    "layers.1.mlp_conv.base_kernel",
    "layers.0.mlp_conv.kernel_projection.weight",
]


@pytest.fixture
def pair2(pair: Path) -> Path:
    """A target and a DFlash2 drafter to damage."""
    make_draft(pair / "draft", pair / "target", **SIZES)
    return pair


@pytest.mark.parametrize("name", NAMES)
def test_tensor_that_is_missing_or_misshapen(pair2: Path, name: str) -> None:
    """Each kind of tensor that DFlash2 adds, cut in its last dimension and then left out.
    Both times it is named, with both shapes where there are two."""
    shape = list(load_file(pair2 / "draft/model.safetensors")[name].shape)
    edit_tensors(pair2 / "draft", lambda t: t.update({name: t[name][..., :-1].copy()}))
    refused(pair2, name, str([*shape[:-1], shape[-1] - 1]), str(shape))
    edit_tensors(pair2 / "draft", lambda t: t.pop(name))
    refused(pair2, f"'{name}'")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (f"{CODEBOOK}.weight", CODEBOOK),
        ("candidate_selector.bias", "norm.weight"),
        ("layers.2.mlp_conv.base_kernel", "layers.1.mlp_conv.base_kernel"),
        ("layers.0.attention_conv.kernel_projection.bias", "norm.weight"),
    ],
)
def test_tensor_that_belongs_nowhere(pair2: Path, name: str, source: str) -> None:
    """A second codebook, a bias, a convolution of a layer too many.
    A drafter that ignored it would not be the one that was trained."""
    edit_tensors(pair2 / "draft", lambda t: t.update({name: t[source].copy()}))
    refused(pair2, name)


def test_dflash2_weights_under_a_v1_name(pair2: Path) -> None:
    """With the wrong architecture in config.json the body alone would load and draft noise.
    Its convolutions and codebooks are left over, and named."""
    edit_json(pair2 / "draft/config.json", {"architectures": ["DFlashDraftModel"]})
    refused(pair2, "candidate_selector")


def test_reduced_vocabulary_is_refused(pair: Path) -> None:
    """The selector's tables are indexed by target ids, so there is no DFlash2 of a reduced one.
    The field is named, before a weight is read."""
    options = {"layout": "speculators", "draft_vocab": 96, **SIZES}
    make_draft(pair / "draft", pair / "target", **options)
    refused(pair, "draft/config.json", "'draft_vocab_size'", "96", "DFlash2")


def tables(bundle: Path, name: str) -> list[np.ndarray]:
    selector = read_manifest(bundle).drafts[name].selector
    assert selector is not None
    return [map_table(bundle, table) for table in (selector.predecessor, selector.successor)]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_codebooks_are_stored_as_they_are(
    pair2: Path, precision: str, dtype: type[np.floating]
) -> None:
    """The tables are mapped by the runtime and never enter a graph.
    Each is its own tensor of the checkpoint, in the bundle's precision."""
    stored = tables(export(pair2, precision=precision), "dflash2")
    source: Tensors = load_file(pair2 / "draft/model.safetensors")
    for table, name in zip(stored, NAMES, strict=False):
        assert table.dtype == dtype and table.shape == (512, 12)
        np.testing.assert_array_equal(table, source[name].astype(dtype))


def test_layout_and_prefix_change_no_byte(pair2: Path) -> None:
    """The same weights with the prefix that some savers add, and in the other layout.
    The drafter's data file stays the same."""
    plain = (export(pair2, "plain") / "dflash2.data").read_bytes()
    for i, options in enumerate(({"prefix": "model."}, {"layout": "speculators"})):
        make_draft(pair2 / "draft", pair2 / "target", **SIZES, **options)
        assert (export(pair2, f"other{i}") / "dflash2.data").read_bytes() == plain


def test_drafters_are_named_after_their_kind(pair2: Path) -> None:
    """Two DFlash2 drafters and a v1 one in one bundle.
    Each is found by its kind, the second of a kind by its number."""
    make_draft(pair2 / "v1", pair2 / "target")
    drafts = tuple(pair2 / name for name in ("draft", "v1", "draft"))
    bundle = export_bundle(ExportOptions(pair2 / "target", pair2 / "bundle", drafts))
    kinds = {name: spec.kind for name, spec in read_manifest(bundle).drafts.items()}
    assert kinds == {"dflash2": "dflash2", "dflash": "dflash", "dflash2-2": "dflash2"}
