"""Exported DFlash2 drafters against z-lab's own, run live with other seeds, shapes and options.

Knows which reference calls stand for block, candidates and walk. The reference follows the ids
drawn here, so that both give the distributions along one path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import load_file
from support_dflash2 import block_rows
from support_images import random_features
from support_networks import draft_hidden, draft_rows, max_difference
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.base import DraftSampling
from dflash_onnx.runtime.drafters.choosers import SelectorWalk

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
zlab = pytest.importorskip("dflash.model")

pytestmark = pytest.mark.parity
BOUND = 1e-4
# Choices closer than this are left to rounding; they are printed, and not compared.
CLEAR = 1e-4
ANCHOR = 300
CONTEXTS = (1, 11, 12, 37, 90)


def conv(taps: int, group: int, rank: int, top_k: int) -> dict[str, int]:
    return {
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": top_k,
    }


DRAFTS: dict[str, dict[str, Any]] = {
    # As released: sliding layers that are not causal, and these four numbers.
    "released": {"seed": 51, "sliding_window": 12, "is_causal": False, **conv(2, 16, 256, 16)},
    "one-tap": {"seed": 52, **conv(1, 64, 1, 1)},
    "all-taps": {"seed": 53, "is_causal": True, **conv(8, 1, 5, 3)},
    "default-causality": {
        "seed": 54,
        "layers": 3,
        "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
        "sliding_window": 12,
        "block_size": 16,
        **conv(4, 8, 32, 32),
    },
    "scaled": {
        "seed": 55,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 16,
        "taps": (3, 0, 1),
        "input_embedding_scale": 8.0,
        "output_multiplier": 1.5,
        "final_logit_softcapping": 10.0,
        **conv(3, 32, 16, 8),
    },
    "bf16": {
        "seed": 56,
        "dtype": "bfloat16",
        "final_logit_softcapping": -1.0,
        "output_multiplier": 0.25,
        **conv(2, 4, 8, 12),
    },
}


class Pair:
    """A bundle's drafter and z-lab's, with one target's table and head."""

    def __init__(self, folder: Path, **options: Any) -> None:
        make_target(folder / "target", seed=50, tied=False)
        make_draft(folder / "draft", folder / "target", **options)
        exported = ExportOptions(folder / "target", folder / "bundle", (folder / "draft",))
        self.model = Model(export_bundle(exported))
        self.networks = self.model.networks["dflash2"]
        head = load_file(folder / "target/model.safetensors")["lm_head.weight"]
        self._weight = torch.from_numpy(head)
        self.tensors = load_file(folder / "draft/model.safetensors")
        self.reference = load_reference(folder / "draft")
        windows = [layer.self_attn.sliding_window for layer in self.reference.layers]
        assert windows == [layer.window for layer in self.networks.layers]

    def features(self, rows: int) -> np.ndarray:
        return random_features(rows, rows, len(self.networks.taps) * 64)

    def hidden(self, rows: int, size: int) -> np.ndarray:
        """The reference's hidden rows; embeddings are scaled as its loop scales them."""
        ids = np.array([ANCHOR] + [self.networks.spec.mask_token_id] * (size - 1))
        config = self.reference.config
        scale = float(zlab._draft_value(config, "input_embedding_scale", 1.0))
        with torch.inference_mode():
            return self.reference(
                target_hidden=torch.from_numpy(self.features(rows))[None],
                noise_embedding=torch.from_numpy(self.model.target.embed(ids))[None] * scale,
                position_ids=torch.arange(rows + size)[None],
            )[0].numpy()

    def propose(self, hidden: np.ndarray, temperature: float) -> tuple[list[int], Any, Any]:
        """The reference's ids, candidates [n, K] and q [n, K] for drafted rows."""
        with torch.inference_mode():
            path, candidates, q = self.reference.propose(
                torch.from_numpy(hidden)[None], torch.tensor([ANCHOR]), self._head, temperature
            )
        return path[0].tolist(), candidates[0].numpy(), None if q is None else q[0].numpy()

    def follow(self, hidden: np.ndarray, temperature: float, ids: list[int]) -> np.ndarray:
        """The reference's q [n, K] along given candidates, which take the place of its draws."""
        _, candidates, _ = self.propose(hidden, 0.0)
        places = iter(np.argwhere(candidates == np.array(ids)[:, None])[:, 1])
        with patch.object(zlab, "_sample_probs", lambda q: torch.tensor([next(places)])):
            path, _, q = self.propose(hidden, temperature)
        assert path == ids
        return q

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """The reference's transformed logits."""
        with torch.inference_mode():
            rows = torch.from_numpy(hidden)[None]
            return self.reference.compute_logits(rows, self._head)[0].numpy()

    def clear_rows(self, hidden: np.ndarray) -> int:
        """Rows before the first whose greedy choice or last candidate is a near tie."""
        with patch.object(zlab, "_sample_probs", lambda q: q.argmax(dim=-1)):
            _, candidates, q = self.propose(hidden, 1.0)
        size = candidates.shape[1]
        columns = np.sort(self.logits(hidden), axis=1)
        close = columns[:, -size] - columns[:, -size - 1] < CLEAR
        if size > 1:
            best = np.sort(np.log(q), axis=1)
            close |= best[:, -1] - best[:, -2] < CLEAR
        count = int(np.argmax(close)) if close.any() else len(close)
        if count < len(close):
            print(f"[parity] row {count} of {len(close)} is too close to call")
        return count

    def _head(self, hidden: Any) -> Any:
        """The target's head without the columns that must not be drafted."""
        logits = torch.nn.functional.linear(hidden, self._weight)
        logits[..., list(self.model.manifest.banned_ids)] = -torch.inf
        return logits


def load_reference(folder: Path) -> Any:
    """z-lab's drafter, after a check that it took every tensor."""
    draft, info = zlab.DFlash2DraftModel.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return draft.eval()


def report(what: str, measured: float) -> None:
    print(f"[parity] {what}: {measured:.2e}")
    assert measured <= BOUND, f"{what} differs by {measured:.3e}"


@pytest.fixture(scope="module", params=DRAFTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("dflash2"), **DRAFTS[request.param])


def test_block_equals_zlab(pair: Pair) -> None:
    """Contexts around the window, and blocks shorter than the trained one.
    The reference fails on blocks that are two rows shorter than its taps, so none is."""
    taps = pair.reference.layers[0].mlp_conv.kernel_size
    for rows in CONTEXTS:
        for size in (max(2, taps - 1), max(5, taps), pair.networks.block_size):
            theirs = pair.hidden(rows, size)
            for chunk in (512, 5):
                ours = draft_hidden(pair.networks, pair.features(rows), ANCHOR, size, chunk=chunk)
                report(f"c{rows}b{size} hidden", max_difference(ours, theirs))


def test_walk_equals_zlab(pair: Pair) -> None:
    """Candidates, their transformed logits, the greedy ids, and q along ids that were drawn here.
    From the first row that is too close to call, rows are printed and left out."""
    walk, compared = pair.networks.chooser, 0
    assert isinstance(walk, SelectorWalk)
    for rows in CONTEXTS:
        hidden = pair.hidden(rows, pair.networks.block_size)[1:]
        hidden = hidden[: pair.clear_rows(hidden)]
        compared += len(hidden)
        values, ids = walk.candidates(hidden)
        ours = block_rows(pair.tensors, hidden)
        theirs, candidates, _ = pair.propose(hidden, 0.0)
        assert walk.choose(ours, ANCHOR, None).token_ids == theirs
        np.testing.assert_array_equal(np.sort(ids, axis=1), np.sort(candidates, axis=1))
        expected = np.take_along_axis(pair.logits(hidden), ids, axis=1)
        report(f"c{rows} values", max_difference(values, expected))
        drawn = walk.choose(ours, ANCHOR, DraftSampling(0.9, rows, 1))
        assert drawn.proposals is not None
        q = pair.follow(hidden, 0.9, drawn.token_ids)
        for t, proposal in enumerate(drawn.proposals):
            np.testing.assert_array_equal(proposal.ids, np.sort(candidates[t]))
            by_id = q[t][np.argsort(candidates[t])]
            report(f"c{rows} q", max_difference(proposal.probs, by_id))
    assert compared > len(CONTEXTS) * (pair.networks.block_size - 1) // 2


SAME = {"seed": 61, "taps": (0, 3), **conv(3, 16, 12, 6)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 9},
        {"sliding_window": 9, "is_causal": False, "training_keys": True},
        {"output_multiplier": 0.7, "final_logit_softcapping": 20.0, "input_embedding_scale": 2.0},
    ],
)
def test_speculators_layout_equals_zlab_layout(options: dict[str, Any], tmp_path: Path) -> None:
    """One drafter saved in both layouts: other places for every field, other causality flag.
    Hidden rows, candidates and drawn walks are equal bit for bit."""
    make_target(tmp_path / "target", seed=60)
    zlab_only = {k: v for k, v in options.items() if k != "training_keys"}
    make_draft(tmp_path / "zlab", tmp_path / "target", **SAME, **zlab_only)
    make_draft(tmp_path / "spec", tmp_path / "target", layout="speculators", **SAME, **options)
    drafts = (tmp_path / "zlab", tmp_path / "spec")
    exported = ExportOptions(tmp_path / "target", tmp_path / "bundle", drafts)
    networks = Model(export_bundle(exported)).networks
    first, second = networks["dflash2"], networks["dflash2-2"]
    assert (first.taps, first.layers) == (second.taps, second.layers)
    features = random_features(1, 23, 2 * 64)
    blocks = [draft_rows(one, features, ANCHOR, 8) for one in (first, second)]
    np.testing.assert_array_equal(*(block.hidden for block in blocks))
    sampling = DraftSampling(1.0, 2, 3)
    pairs = zip((first, second), blocks, strict=True)
    drawn = [one.chooser.choose(block, 7, sampling) for one, block in pairs]
    assert drawn[0].token_ids == drawn[1].token_ids
    for one, other in zip(*(d.proposals for d in drawn), strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.probs, other.probs)
