"""DFlash2's convolution inside the exported block: its numbers, and where its taps end.

Attention hides what the convolution does, so the drafters here have it turned into a mean of all
values (query weights of zero) or into nothing (output weights of zero).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support_checkpoint import edit_tensors, export
from support_dflash2 import Block
from support_images import random_features
from support_networks import draft_hidden, filled_caches, max_difference
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.networks import DFlashNetworks

ANCHOR, OTHER, BLOCK = 300, 41, 8
SELECTOR = {"selector_rank": 4, "selector_top_k": 4}
# (taps, channels a group); the last drafter has as many taps as rows, and one group for all.
CONVS = [(1, 16), (2, 16), (3, 4), (5, 1), (BLOCK, 64)]
convs = pytest.mark.parametrize(("taps", "group"), CONVS)


class Pair:
    """A loaded target and DFlash2 drafter, whose attention matrices of one kind may be zero."""

    def __init__(
        self, folder: Path, zeroed: str | None, taps: int, group: int, **options: Any
    ) -> None:
        make_target(folder / "target", seed=3)
        conv = {"conv_kernel_size": taps, "conv_group_size": group}
        make_draft(folder / "draft", folder / "target", **SELECTOR, **conv, **options)
        if zeroed is not None:
            edit_tensors(folder / "draft", lambda tensors: zero(tensors, zeroed))
        self.tensors = load_file(folder / "draft" / "model.safetensors")
        self.model = Model(export(folder), threads=1)

    @property
    def networks(self) -> DFlashNetworks:
        return self.model.networks["dflash2"]

    def features(self, rows: int) -> np.ndarray:
        return random_features(rows, rows, len(self.networks.taps) * 64)

    def hidden(self, rows: int, size: int = BLOCK, anchor: int = ANCHOR) -> np.ndarray:
        return draft_hidden(self.networks, self.features(rows), anchor, size)


def zero(tensors: dict[str, np.ndarray], name: str) -> None:
    """Set one attention matrix of every layer to zero."""
    chosen = [key for key in tensors if key.endswith(f"self_attn.{name}.weight")]
    assert chosen
    tensors.update({key: np.zeros_like(tensors[key]) for key in chosen})


@convs
def test_block_equals_a_naive_one(tmp_path: Path, taps: int, group: int) -> None:
    """Both convolutions of both layers against loops over rows, channels and taps, for any length.
    Values of context rows are taken as they are: no tap reaches them, nothing convolves them."""
    pair = Pair(tmp_path, "q_proj", taps, group, input_embedding_scale=1.5)
    naive = Block(pair.tensors, num_heads=2, num_kv_heads=1)
    for rows, size in ((1, 2), (1, BLOCK), (9, 5), (9, BLOCK)):
        ids = np.array([ANCHOR] + [pair.networks.spec.mask_token_id] * (size - 1))
        embeds = pair.model.target.embed(ids) * np.float32(1.5)
        expected = naive.hidden(pair.features(rows), embeds)
        difference = max_difference(pair.hidden(rows, size), expected)
        print(f"[conv] c={taps} g={group} rows={rows} size={size}: {difference:.2e}")
        assert difference < 1e-4


@convs
def test_taps_reach_so_far_and_no_further(tmp_path: Path, taps: int, group: int) -> None:
    """Without attention a row knows its left neighbours alone, as far as the taps of both sides go.
    Another anchor changes those rows; all later ones stay, and are the same row over and over."""
    pair = Pair(tmp_path, "o_proj", taps, group, layers=1)
    reach = min(2 * (taps - 1), BLOCK - 1)
    one, other = pair.hidden(5), pair.hidden(5, anchor=OTHER)
    changed = np.abs(one - other).max(axis=1)
    assert (changed[: reach + 1] > 1e-4).all()
    assert (changed[reach + 1 :] == 0).all()
    assert (one[reach + 1 :] == one[-1]).all()


@convs
def test_nothing_lies_before_the_block(tmp_path: Path, taps: int, group: int) -> None:
    """Without attention neither the context nor an earlier block can be seen, through no tap.
    A shorter block is the beginning of a longer one."""
    pair = Pair(tmp_path, "o_proj", taps, group)
    whole = pair.hidden(9)
    np.testing.assert_array_equal(whole, pair.hidden(1))
    for size in range(2, BLOCK):
        assert max_difference(pair.hidden(9, size), whole[:size]) < 1e-5


@convs
def test_earlier_blocks_leave_no_trace(tmp_path: Path, taps: int, group: int) -> None:
    """With attention, and one set of caches for several blocks of several lengths and anchors.
    The last block is the one that a fresh set gives, bit for bit."""
    pair = Pair(tmp_path, None, taps, group)
    caches = filled_caches(pair.networks, pair.features(9))
    for size, anchor in ((8, OTHER), (3, 7), (2, 11)):
        pair.networks.draft(anchor, np.arange(9, 9 + size), caches, None)
    last = pair.networks.block(ANCHOR, np.arange(9, 9 + BLOCK), caches).hidden
    np.testing.assert_array_equal(last, pair.hidden(9))


@convs
def test_identity_kernels_make_a_plain_drafter(tmp_path: Path, taps: int, group: int) -> None:
    """A first tap of one, other taps and projections of zero: the block of the v1 drafter.
    Windows, context and embeddings are treated as there, whatever the taps."""
    pair = Pair(tmp_path / "second", None, taps, group, seed=8)
    edit_tensors(tmp_path / "second/draft", identity)
    make_draft(tmp_path / "second/plain", tmp_path / "second/target", seed=8)
    drafts = (tmp_path / "second/draft", tmp_path / "second/plain")
    options = ExportOptions(tmp_path / "second/target", tmp_path / "both", drafts)
    networks = Model(export_bundle(options), threads=1).networks
    for rows in (1, 23):
        hidden = [
            draft_hidden(networks[name], pair.features(rows), ANCHOR, BLOCK)
            for name in ("dflash", "dflash2")
        ]
        assert max_difference(*hidden) < 1e-5
        assert max_difference(hidden[0], pair.hidden(rows)) > 1e-2


def identity(tensors: dict[str, np.ndarray]) -> None:
    """Kernels that leave rows as they are."""
    for name in [n for n in tensors if "_conv." in n]:
        tensors[name] = np.zeros_like(tensors[name])
        if name.endswith("base_kernel"):
            tensors[name][:, 0] = 1
