"""DFlash2's walk over candidates: its scores, its draws, and ids that must never be drafted.

Hidden rows are random here; where they come from is the business of the block's tests.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.stats import chi2
from support_checkpoint import edit_tensors, export
from support_dflash2 import Lattice, block_rows, lattice
from support_images import random_features
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.base import BlockRows, Drafted, DraftSampling
from dflash_onnx.runtime.drafters.choosers import SelectorWalk

TABLE = "model.language_model.embed_tokens.weight"
ANCHOR, ROWS = 300, 7
CONV = {"conv_kernel_size": 2, "conv_group_size": 16}
TRANSFORMS: list[dict[str, float]] = [
    {},
    {"output_multiplier": 0.4, "final_logit_softcapping": 5.0},
    {"output_multiplier": 2.5, "final_logit_softcapping": 0.0},
]


class Walked:
    """A DFlash2 drafter's walk, and what its checkpoint says about it."""

    def __init__(self, folder: Path, loud: float = 1.0, tied: bool = True, **options: Any) -> None:
        self.selector = {"selector_rank": 8, "selector_top_k": 6} | options
        make_target(folder / "target", seed=4, tied=tied)
        make_draft(folder / "draft", folder / "target", **CONV, **self.selector)
        self._head_name = TABLE if tied else "lm_head.weight"
        self.model = Model(export(folder, "quiet"), threads=1)
        self.banned = list(self.model.manifest.banned_ids)
        if loud != 1.0:
            edit_tensors(
                folder / "target", lambda t: amplify(t, self._head_name, self.banned, loud)
            )
            self.model = Model(export(folder, "loud"), threads=1)
        self.head = load_file(folder / "target/model.safetensors")[self._head_name]
        self.tensors = load_file(folder / "draft/model.safetensors")
        chooser = self.model.networks["dflash2"].chooser
        assert isinstance(chooser, SelectorWalk)
        self.walk = chooser

    def choose(self, hidden: np.ndarray, anchor: int, sampling: DraftSampling | None) -> Drafted:
        """Walk over hidden rows as if a block had given them."""
        return self.walk.choose(block_rows(self.tensors, hidden), anchor, sampling)

    def lattice(self, hidden: np.ndarray, anchor: int = ANCHOR, bans: bool = True) -> Lattice:
        return lattice(
            self.tensors,
            self.head,
            hidden,
            anchor,
            self.selector["selector_top_k"],
            self.banned if bans else (),
            self.selector.get("output_multiplier", 1.0),
            self.selector.get("final_logit_softcapping") or None,
        )


def amplify(tensors: dict[str, np.ndarray], name: str, columns: list[int], factor: float) -> None:
    """Let some columns of the head win most rows."""
    tensors[name][columns] *= np.float32(factor)


def softmax(scores: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((scores - scores.max()) / temperature)
    return weights / weights.sum()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Walked:
    return Walked(tmp_path_factory.mktemp("walk"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_walk_equals_the_lattice(tmp_path: Path, transform: dict[str, float], tied: bool) -> None:
    """Every score of every pair of neighbours in double precision, and a walk over that table.
    Candidates, greedy ids and, along drawn paths, all of q; with logits transformed and not."""
    walked, leads = Walked(tmp_path, tied=tied, **transform), []
    for seed in range(25):
        hidden = random_features(seed, ROWS, 64)
        anchor = int(np.random.default_rng(seed).integers(512))
        table = walked.lattice(hidden, anchor)
        values, ids = walked.walk.candidates(hidden)
        assert values.shape == ids.shape == (ROWS, 6)
        np.testing.assert_array_equal(np.sort(ids, axis=1), table.ids)
        path, lead = table.greedy()
        assert walked.choose(hidden, anchor, None).token_ids == path
        leads.append(lead)
        drawn = walked.choose(hidden, anchor, DraftSampling(0.7, seed, 5))
        assert drawn.proposals is not None
        for q, scores in zip(drawn.proposals, table.scores(drawn.token_ids), strict=True):
            np.testing.assert_allclose(q.probs, softmax(scores, 0.7), atol=1e-5)
    print(f"[walk] closest choice {min(leads):.1e}")
    assert min(leads) > 1e-4, "a near tie tests rounding; take other seeds"


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_short_blocks_begin_as_long_ones_do(plain: Walked, rows: int) -> None:
    """Fewer rows are asked for near the end of an answer.
    The ids are the beginning of what the full block gives, greedy or drawn."""
    hidden = random_features(3, ROWS, 64)
    for sampling in (None, DraftSampling(1.0, 9, 4)):
        whole = plain.choose(hidden, ANCHOR, sampling).token_ids
        assert plain.choose(hidden[:rows], ANCHOR, sampling).token_ids == whole[:rows]


def test_draws_depend_on_seed_and_output_index_alone(plain: Walked) -> None:
    """The same seed draws the same ids; a walk taken up in the middle goes on as it would have.
    Other seeds and other places in the output draw others."""
    hidden = random_features(5, ROWS, 64)
    first = plain.choose(hidden, ANCHOR, DraftSampling(1.0, 3, 10)).token_ids
    assert plain.choose(hidden, ANCHOR, DraftSampling(1.0, 3, 10)).token_ids == first
    for k in range(1, ROWS):
        rest = plain.choose(hidden[k:], first[k - 1], DraftSampling(1.0, 3, 10 + k))
        assert rest.token_ids == first[k:]
    for seeds, indices in ((range(20), [10]), ([3], range(20))):
        made = [DraftSampling(1.0, seed, index) for seed in seeds for index in indices]
        assert len({tuple(plain.choose(hidden, ANCHOR, s).token_ids) for s in made}) > 10


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_draws_have_the_distribution_they_come_with(plain: Walked, temperature: float) -> None:
    """Chi-square at 0.1 % of the first two ids together, over 3000 seeds, against the lattice.
    The second id depends on the first, so a walk that forgot its predecessor would show."""
    hidden, drawn = random_features(6, 2, 64), Counter()
    for seed in range(3000):
        sampling = DraftSampling(temperature, seed, 1)
        drawn[tuple(plain.choose(hidden, ANCHOR, sampling).token_ids)] += 1
    table = plain.lattice(hidden)
    first = softmax(table.first, temperature)
    want, got = [], []
    for i, one in enumerate(table.ids[0]):
        joint = first[i] * softmax(table.rest[0, i], temperature) * 3000
        want += joint.tolist()
        got += [drawn.pop((int(one), int(two)), 0) for two in table.ids[1]]
    assert not drawn
    statistic, cells = pooled_statistic(np.array(got), np.array(want))
    print(f"[walk] T={temperature}: chi-square {statistic:.1f} with {cells} cells")
    assert statistic < chi2.ppf(0.999, cells - 1)


def pooled_statistic(got: np.ndarray, want: np.ndarray) -> tuple[float, int]:
    """Chi-square of counts, with all rarely expected cells taken as one; and how many cells."""
    rare = want < 5
    got = np.append(got[~rare], got[rare].sum())
    want = np.append(want[~rare], want[rare].sum())
    kept = want > 0
    return float(((got - want)[kept] ** 2 / want[kept]).sum()), int(kept.sum())


@pytest.mark.parametrize("options", [{}, {"final_logit_softcapping": 30.0}])
def test_placeholders_are_no_candidates(tmp_path: Path, options: dict[str, float]) -> None:
    """Columns of image placeholders and spare ids shout louder than all tokens.
    The reference would propose them; here other candidates take their places."""
    walked = Walked(tmp_path, loud=30.0, **options)
    for seed in range(10):
        hidden = random_features(seed, ROWS, 64)
        assert np.isin(walked.lattice(hidden, bans=False).ids, walked.banned).any(axis=1).all()
        _, ids = walked.walk.candidates(hidden)
        assert not np.isin(ids, walked.banned).any()
        assert walked.choose(hidden, ANCHOR, None).token_ids == walked.lattice(hidden).greedy()[0]


def test_more_candidates_than_tokens(tmp_path: Path) -> None:
    """With K as large as the vocabulary every column is a candidate, the banned ones too.
    They have no weight: no walk takes one and no q holds one."""
    walked = Walked(tmp_path, loud=30.0, selector_top_k=512)
    usable = 512 - len(walked.banned)
    for seed in range(5):
        hidden = random_features(seed, ROWS, 64)
        drafted = [walked.choose(hidden, ANCHOR, s) for s in (None, DraftSampling(9.0, seed, 1))]
        for ids in (drafted[0].token_ids, drafted[1].token_ids):
            assert not set(ids) & set(walked.banned)
        assert drafted[1].proposals is not None
        for q in drafted[1].proposals:
            assert q.ids.size == usable and not set(q.ids.tolist()) & set(walked.banned)
            assert q.probs.sum() == pytest.approx(1)


def test_rows_that_overflowed_are_drafted_all_the_same(plain: Walked) -> None:
    """A block of half precision may overflow at some text; the next one need not, so the drafter
    must not be turned off: its ids are worth nothing, and are ids."""
    hidden = random_features(4, ROWS, 64)
    rows = block_rows(plain.tensors, hidden)
    assert rows.projected is not None
    rows.projected[2] = np.nan
    drafted = plain.walk.choose(rows, ANCHOR, None).token_ids
    assert drafted[:2] == plain.choose(hidden, ANCHOR, None).token_ids[:2]
    assert len(drafted) == ROWS and all(0 <= token < 512 for token in drafted)


def test_of_equal_scores_the_lowest_id_is_taken(
    plain: Walked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros score every token alike, in whatever order a head gives the candidates."""
    hidden, ids = np.zeros((2, 64), np.float32), np.array([[7, 3, 9], [8, 6, 4]])
    values = np.zeros(ids.shape, np.float32)
    monkeypatch.setattr(plain.walk, "candidates", lambda rows: (values, ids))
    rows = BlockRows(hidden, np.zeros((2, 8), np.float32))
    assert plain.walk.choose(rows, ANCHOR, None).token_ids == [3, 4]
