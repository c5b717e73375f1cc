"""The two accept rules on a toy Markov model whose logits depend on the last token alone.

Knows drafters that are right, wrong or random. Does not know real models or caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
import pytest
from scipy.stats import chi2

from dflash_onnx.runtime.sampling import Distribution, HeadRows, History, Sampler
from dflash_onnx.runtime.sampling_params import SamplingParams
from dflash_onnx.runtime.verify import Verdict, accept_equal, accept_rejection

VOCAB, LENGTH = 11, 18
LOGITS = (1.0, 0.2, 0.7, -0.6, 0.4)
Drafter = Callable[[list[int], int], list[int]]
Rule = Callable[[Sampler, HeadRows, list[int], int], Verdict]


def head(logits: np.ndarray) -> HeadRows:
    """A head's answer for logits [n, V], with all of them in the top list."""
    table = logits.astype(np.float32)
    order = np.argsort(-table, axis=1, kind="stable")
    return HeadRows(np.take_along_axis(table, order, axis=1), order, table)


def start(params: SamplingParams, prompt: list[int], vocab: int = VOCAB) -> Sampler:
    """A sampler at the beginning of its output."""
    return Sampler(params, History.start(prompt, vocab))


def plain(sampler: Sampler, model: np.ndarray, prompt: list[int]) -> list[int]:
    """One token at a time, no drafts."""
    output: list[int] = []
    for index in range(LENGTH):
        last = (prompt + output)[-1]
        output.append(sampler.choose(head(model[[last]]), 0, index))
        sampler.history.push(output[-1])
    return output


def speculative(
    sampler: Sampler, model: np.ndarray, prompt: list[int], draft: Drafter, width: int, rule: Rule
) -> list[int]:
    """Blocks of `width` drafts until the text is long enough, each verified by one rule."""
    output: list[int] = []
    while len(output) < LENGTH:
        drafts = draft(output, width)
        rows = head(model[[(prompt + output)[-1], *drafts]])
        verdict = rule(sampler, rows, drafts, len(output))
        assert len(verdict.tokens) == verdict.accepted + 1
        for token in verdict.tokens:
            output.append(token)
            sampler.history.push(token)
    return output[:LENGTH]


def drafters(rng: np.random.Generator, truth: list[int]) -> Iterator[Drafter]:
    """Drafts that are always right, always wrong, random, and right for a random stretch."""
    far = truth + [0] * 20
    yield lambda output, width: far[len(output) :][:width]
    yield lambda output, width: [(token + 1) % VOCAB for token in far[len(output) :][:width]]
    yield lambda output, width: rng.integers(0, VOCAB, width).tolist()
    yield lambda output, width: [
        token if rng.random() < 0.8 else 0 for token in far[len(output) :][:width]
    ]


def stream_params(rng: np.random.Generator, seed: int) -> SamplingParams:
    """Sampled options with filters and penalties, each off about half the time."""
    drawn = (rng.integers(1, 9), rng.uniform(0.3, 1), rng.random() / 4, *rng.normal(size=2), 1.3)
    pairs = zip(drawn, (0, 1.0, 0.0, 0.0, 0.0, 1.0), strict=True)
    chosen = (pair[rng.integers(2)] for pair in pairs)
    return SamplingParams(rng.uniform(0.4, 1.6), *chosen, rng_seed=seed)


@pytest.mark.parametrize("width", [1, 3, 7])
def test_sampled_text_is_that_of_plain_sampling_for_any_drafts(width: int) -> None:
    """A hundred streams per width, four drafters each, under random options."""
    for seed in range(100):
        rng = np.random.default_rng((seed, width))
        model, prompt = rng.normal(0, 2, (VOCAB, VOCAB)), rng.integers(0, VOCAB, 4).tolist()
        params = stream_params(rng, seed)
        want = plain(start(params, prompt), model, prompt)
        for draft in drafters(rng, want):
            sampler = start(params, prompt)
            assert speculative(sampler, model, prompt, draft, width, accept_equal) == want


@pytest.mark.parametrize("rule", [accept_equal, accept_rejection])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"frequency_penalty": 0.7}])
def test_greedy_text_is_that_of_plain_decoding(rule: Rule, options: dict[str, float]) -> None:
    """Both rules are the same greedy rule, with and without penalties."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        model, prompt = rng.normal(0, 2, (VOCAB, VOCAB)), rng.integers(0, VOCAB, 4).tolist()
        params = SamplingParams(**options)
        want = plain(start(params, prompt), model, prompt)
        for draft in drafters(rng, want):
            sampler = start(params, prompt)
            assert speculative(sampler, model, prompt, draft, 5, rule) == want


@pytest.mark.parametrize("rule", [accept_equal, accept_rejection])
def test_greedy_refuses_a_likely_second(rule: Rule) -> None:
    """With p(b) = 0.5 and p(a) = 0.3, the draft a is not taken and b follows."""
    rows = head(np.log([[0.3, 0.5, 0.2], [0.3, 0.5, 0.2]]))
    assert rule(start(SamplingParams(), [], 3), rows, [0], 0) == Verdict((1,), 0)


@pytest.mark.parametrize("rule", [accept_equal, accept_rejection])
def test_accepted_drafts_come_first_and_the_bonus_last(rule: Rule) -> None:
    """All, some and none accepted, no drafts at all, and a draft outside the vocabulary."""
    rows, sampler = head(np.eye(4)[[1, 2, 3]]), start(SamplingParams(), [], 4)
    assert rule(sampler, rows, [1, 2], 0) == Verdict((1, 2, 3), 2)
    assert rule(sampler, rows, [1, 0], 0) == Verdict((1, 2), 1)
    assert rule(sampler, rows, [0, 2], 0) == Verdict((1,), 0)
    assert rule(sampler, rows, [-1, 99], 0) == Verdict((1,), 0)
    assert rule(sampler, head(np.eye(4)[[1]]), [], 0) == Verdict((1,), 0)


class SteadySampler(Sampler):
    """A sampler that works one row's distribution out once, to keep many draws quick."""

    @cached_property
    def steady(self) -> Distribution:
        """The distribution of LOGITS under the options."""
        return super().distribution(head(np.array([LOGITS])), 0)

    def distribution(self, rows: HeadRows, row: int) -> Distribution:
        """The same for every row."""
        return self.steady


def tally(sampler: Sampler, q: Distribution | None) -> np.ndarray:
    """How often each token [5] comes out of rejection blocks of three drafts."""
    rows, counts = head(np.array([LOGITS] * 4)), np.zeros(5, np.int64)
    guess = [0.1, 0.4, 0.1, 0.2, 0.2] if q is None else q.probs
    proposals = None if q is None else [q] * 3
    blocks = np.random.default_rng(3).choice(5, (17_000, 3), p=guess).tolist()
    while counts.sum() < 17_000:
        index, drafts = int(counts.sum()), blocks.pop()
        tokens = accept_rejection(sampler, rows, drafts, index, proposals).tokens
        np.add.at(counts, list(tokens), 1)
    return counts


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.5, 0, 1.0), (1.0, 4, 0.8), (1.5, 0, 0.8)]
)
def test_rejection_keeps_the_target_distribution(
    general: bool, temperature: float, top_k: int, top_p: float
) -> None:
    """Chi-square at 0.1 % over 17 000 tokens a case, for point masses and for a general q."""
    params = SamplingParams(temperature, top_k, top_p, rng_seed=11)
    sampler = SteadySampler(params, History.start([], 5))
    q = Distribution(np.arange(5), np.array([0.15, 0.3, 0.05, 0.3, 0.2])) if general else None
    counts, target = tally(sampler, q), sampler.steady
    assert counts[target.ids].sum() == counts.sum()
    want = target.probs * counts.sum()
    statistic = ((counts[target.ids] - want) ** 2 / want).sum()
    assert statistic < chi2.ppf(0.999, target.ids.size - 1)


def test_a_rejected_point_mass_never_comes_back() -> None:
    """The bonus after a rejection is another token, and one seed and index always give the same."""
    rows, outcomes = head(np.zeros((2, 5))), set()
    for index in range(300):
        sampler = start(SamplingParams(1.0, rng_seed=2), [], 5)
        verdict = accept_rejection(sampler, rows, [3], index)
        assert verdict == accept_rejection(sampler, rows, [3], index)
        assert verdict.accepted == (verdict.tokens[0] == 3)
        outcomes.add(verdict.tokens[0])
    assert outcomes == set(range(5))


def test_proposals_that_say_the_same_decide_the_same() -> None:
    """Where q is p nothing is rejected, and a point mass spelled out is the default."""
    rows, sampler = head(np.array([LOGITS] * 2)), start(SamplingParams(1.0, top_k=4), [], 5)
    target = sampler.distribution(rows, 0)
    for index in range(100):
        drafts, point = [index % 3], Distribution.point(index % 3)
        assert accept_rejection(sampler, rows, drafts, index, [target]).accepted == 1
        default = accept_rejection(sampler, rows, drafts, index)
        assert accept_rejection(sampler, rows, drafts, index, [point]) == default


@pytest.mark.parametrize("rule", [accept_equal, accept_rejection])
def test_the_history_is_left_as_it_was(rule: Rule) -> None:
    """After a verdict, and after a row that cannot be read."""
    sampler = start(SamplingParams(0.8, presence_penalty=0.4), [1, 2])
    sampler.history.push(5)
    before = [part.tolist() for part in sampler.history.seen()]
    rows = head(np.vstack([np.eye(VOCAB)[[3, 4]] * 99, np.full((1, VOCAB), -np.inf)]))
    with pytest.raises(ValueError, match="row 2 has no usable logit"):
        rule(sampler, rows, [3, 4], 0)
    assert rule(sampler, head(np.eye(VOCAB)[[3, 4, 3]] * 99), [3, 4], 0).accepted == 2
    assert [part.tolist() for part in sampler.history.seen()] == before


def test_lengths_must_fit() -> None:
    """Rows are one more than drafts, proposals as many."""
    sampler, rows = start(SamplingParams(1.0), []), head(np.zeros((2, VOCAB)))
    with pytest.raises(ValueError, match="2 head rows do not fit 2 drafts"):
        accept_equal(sampler, rows, [1, 2], 0)
    with pytest.raises(ValueError, match="2 proposals do not fit 1 drafts"):
        accept_rejection(sampler, rows, [1], 0, [Distribution.point(1)] * 2)
