"""Sampling options, the order of their filters, keyed draws and the history they look at.

Knows a naive restatement of the filters in plain Python. Does not know drafts; see test_verify.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dflash_onnx.models.errors import PromptError
from dflash_onnx.runtime.sampling import (
    Distribution,
    HeadRows,
    History,
    Purpose,
    Sampler,
    uniform,
)
from dflash_onnx.runtime.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
PENALTIES = ("presence", "frequency", "repetition")
BELOW_ONE = math.nextafter(1.0, 0.0)


def head(logits: Any, num_top: int = 4, full: bool = True) -> HeadRows:
    """A head's answer for logits [n, V]."""
    table = np.asarray(logits, np.float32)
    order = np.argsort(-table, axis=1, kind="stable")[:, :num_top]
    tops = np.take_along_axis(table, order, axis=1)
    return HeadRows(tops, order, table if full else None)


def distribution(logits: Any, history: History | None = None, **options: Any) -> dict[int, float]:
    """Token id to probability for one row of logits [V]."""
    sampler = Sampler(SamplingParams(**options), history or History.start([], len(logits)))
    answer = sampler.distribution(head([logits]), 0)
    return dict(zip(answer.ids.tolist(), answer.probs.tolist(), strict=True))


def normalised(weights: dict[int, float]) -> dict[int, float]:
    """Weights scaled to a sum of one."""
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def naive(logits: list[float], prompt: list[int], output: list[int], p: SamplingParams) -> dict:
    """The whole chain of filters, restated with sorted lists and dictionaries."""
    for token in {*prompt, *output}:
        value, count = logits[token], output.count(token)
        value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        logits[token] = value - p.presence_penalty * (count > 0) - p.frequency_penalty * count
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = [t for t in ranked[: p.top_k or None] if logits[t] > -INF]
    best = logits[ranked[0]]
    probs = normalised({t: math.exp((logits[t] - best) / p.temperature) for t in ranked})
    kept, before = {}, 0.0
    for token in ranked:
        if p.top_p == 1 or before < p.top_p:
            kept[token] = probs[token]
        before += probs[token]
    floor = p.min_p * max(kept.values())
    return normalised({token: prob for token, prob in kept.items() if prob >= floor})


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Options of which each but temperature is off about half the time."""
    drawn = (rng.integers(1, 20), rng.random(), rng.random() / 2, *rng.normal(size=2), rng.random())
    pairs = zip(drawn, (0, 1.0, 0.0, 0.0, 0.0, 1.0), strict=True)
    return SamplingParams(rng.uniform(0.3, 2), *(pair[rng.integers(2)] for pair in pairs))


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *[("temperature", v) for v in (-0.1, NAN, INF, "hot", True, None, 10**400)],
        *[("top_k", v) for v in (-1, 2.0, NAN, True, "5")],
        *[("top_p", v) for v in (0.0, 1.01, -0.5, NAN, INF)],
        *[("min_p", v) for v in (-0.01, 1.01, NAN, INF)],
        *[(f"{p}_penalty", v) for p in PENALTIES for v in (NAN, INF, -INF, "1")],
        *[("repetition_penalty", v) for v in (0.0, -1.0)],
        *[("rng_seed", v) for v in (-1, 0.5, 2**64, NAN, False)],
    ],
)
def test_a_bad_option_is_named_with_its_range(option: str, bad: object) -> None:
    """The message carries the option, where it may lie and what came."""
    with pytest.raises(PromptError) as caught:
        SamplingParams(**{option: bad})
    message = str(caught.value)
    assert f"`{option}` must be a" in message and "up to" in message
    assert repr(bad) in message and "leave it out" in message


def test_range_ends_and_numpy_scalars_are_taken() -> None:
    """Closed ends belong to the range, and numpy's numbers count as numbers."""
    SamplingParams(top_p=1.0, min_p=1.0, temperature=0, rng_seed=2**64 - 1)
    SamplingParams(temperature=np.float32(0.7), top_k=np.int64(4), rng_seed=np.uint64(2**63))


def test_full_logits_are_asked_for_only_where_they_matter() -> None:
    """Eight best tokens suffice for greedy text and for a top-k of at most eight."""
    penalised = [SamplingParams(**{f"{p}_penalty": 0.5}) for p in PENALTIES]
    asking = [SamplingParams(1.0), SamplingParams(1.0, 9), *penalised]
    content = [SamplingParams(), SamplingParams(0.0, 9), SamplingParams(1.0, 8)]
    assert all(params.needs_logits(8) for params in asking)
    assert not any(params.needs_logits(8) for params in content)


def test_filters_agree_with_their_restatement() -> None:
    """Random rows with ties and bans, random histories, random options."""
    rng = np.random.default_rng(5)
    for _ in range(400):
        size = int(rng.integers(2, 14))
        logits = np.round(rng.normal(0, 2, size) * 4) / 4
        logits[rng.random(size) < 0.2] = -INF
        logits[rng.integers(size)] = 1.0
        prompt, output = (rng.integers(0, size, rng.integers(0, 6)).tolist() for _ in range(2))
        params, history = random_params(rng), History.start(prompt, size)
        for token in output:
            history.push(token)
        got = Sampler(params, history).distribution(head([logits]), 0)
        want = naive(logits.tolist(), prompt, output, params)
        assert got.ids.tolist() == sorted(want)
        np.testing.assert_allclose(got.probs, [want[t] for t in sorted(want)], rtol=1e-12)


@pytest.mark.parametrize(("size", "top_p"), [(16384, 0.5), (16384, 0.25), (1500, 0.9)])
def test_a_nucleus_wider_than_the_first_look_is_found(size: int, top_p: float) -> None:
    """A flat row of many tokens keeps exactly the lowest ids of its ties."""
    kept = distribution(np.zeros(size), temperature=1.0, top_p=top_p)
    assert list(kept) == list(range(round(size * top_p)))


def test_ties_go_to_the_lowest_id() -> None:
    """Four equal best tokens above two; min-p keeps all equals, a tiny temperature the best."""

    def kept(**options: Any) -> list[int]:
        return list(distribution([0, 9, 9, 9, 9, 0], temperature=1.0, **options))

    assert kept(top_k=2) == [1, 2] and kept(top_k=3) == [1, 2, 3]
    assert kept(top_p=0.2) == kept(top_p=1e-9) == [1]
    assert kept(min_p=1.0) == [1, 2, 3, 4]
    assert distribution([1.0, 3.0, 2.0], temperature=5e-324) == {1: 1.0}


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    """A prompt token is divided, or multiplied below zero, but never charged for presence."""
    history = History.start([0, 0, 1], 4)
    history.push(2)
    history.push(2)
    options = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    got = distribution([2.0, -1.0, 2.0, 0.0], history, temperature=1.0, **options)
    want = normalised({t: math.exp(v) for t, v in enumerate([1.0, -2.0, 0.0, 0.0])})
    assert got == pytest.approx(want)


def test_greedy_takes_the_best_penalised_token() -> None:
    """Ties after the penalty go to the lowest id, and without penalties the head's best rules."""
    history = History.start([2], 4)
    rows = head([[1.0, 2.0, 4.0, 2.0]])
    assert Sampler(SamplingParams(), history).choose(rows, 0, 0) == 2
    assert Sampler(SamplingParams(repetition_penalty=2.0), history).choose(rows, 0, 0) == 1
    assert Sampler(SamplingParams(repetition_penalty=4.0), history).choose(rows, 0, 0) == 1


def test_top_lists_alone_give_the_full_answer() -> None:
    """With 0 < top_k <= K the distributions agree to the last bit, ties and bans too."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        logits = np.round(rng.normal(0, 1, (3, 30)) * 2) / 2
        logits[rng.random((3, 30)) < 0.5] = -INF
        logits[:, 7] = 0.0
        params = SamplingParams(1.0, int(rng.integers(1, 9)), float(rng.uniform(0.1, 1)), 0.1)
        sampler = Sampler(params, History.start([], 30))
        for row in range(3):
            full = sampler.distribution(head(logits, 8), row)
            short = sampler.distribution(head(logits, 8, full=False), row)
            assert full.ids.tolist() == short.ids.tolist()
            assert full.probs.tolist() == short.probs.tolist()


@pytest.mark.parametrize("options", [(1.0,), (1.0, 5), (0.0, 0, 1.0, 0.0, 1.0)])
def test_missing_logits_are_noticed(options: tuple[Any, ...]) -> None:
    """A caller that did not heed needs_logits hears of it."""
    sampler = Sampler(SamplingParams(*options), History.start([], 6))
    with pytest.raises(ValueError, match="no logits"):
        sampler.distribution(head([np.zeros(6)], 4, full=False), 0)


@pytest.mark.parametrize("row", [[-INF] * 3, [0.0, NAN, 1.0], [0.0, INF, 1.0]])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.5}])
def test_a_row_without_a_best_token_is_an_error(row: list[float], options: dict) -> None:
    """All banned, not a number and infinite are told apart from a choice."""
    best = np.array([[max(row, key=lambda v: (math.isnan(v), v))]], np.float32)
    rows = HeadRows(best, np.array([[0]]), np.array([row], np.float32))
    with pytest.raises(ValueError, match="no usable logit"):
        Sampler(SamplingParams(**options), History.start([], 3)).choose(rows, 0, 0)


def test_the_draw_walks_ids_in_order() -> None:
    """Both ends of [0, 1) land on tokens that carry mass, and each edge opens the next token."""
    answer = Distribution(np.array([2, 5, 7, 9]), np.array([0.0, 0.25, 0.75, 0.0]))
    draws = {0.0: 5, 0.2499: 5, 0.25: 7, BELOW_ONE: 7, 1.0: 7}
    assert {u: answer.token_at(u) for u in draws} == draws


def test_rounding_never_draws_past_the_end() -> None:
    """Sums a little beside one still end on the last token with mass."""
    for size in range(1, 300):
        answer = Distribution.of(np.arange(size), np.random.default_rng(size).random(size))
        assert (answer.token_at(0.0), answer.token_at(BELOW_ONE)) == (0, size - 1)


def test_one_token_can_be_taken_out() -> None:
    """The rest keeps its proportions, an absent id changes nothing, and the last cannot go."""
    answer = Distribution.of(np.array([1, 4, 6]), np.array([2.0, 1.0, 1.0]))
    assert [answer.probability(t) for t in (0, 1, 4, 6, 8)] == [0, 0.5, 0.25, 0.25, 0]
    assert answer.without(1).probs.tolist() == [0.5, 0.5]
    assert answer.without(1).ids.tolist() == [4, 6]
    assert answer.without(5).probs.tolist() == answer.probs.tolist()
    with pytest.raises(ValueError, match="positive weight"):
        Distribution.point(3).without(3)


def test_uniform_numbers_depend_on_their_key_alone() -> None:
    """Each key has its own number, a known one, and consecutive ones pass chi-square at 0.1 %."""
    keys = [(s, i, p) for s in (0, 1, 2**64 - 1) for i in (0, 1, 2**40) for p in Purpose]
    numbers = [uniform(*key) for key in keys]
    assert numbers == [uniform(*key) for key in keys] and len(set(numbers)) == len(keys)
    assert uniform(0, 0, Purpose.SAMPLE) == 0.011546754286331562
    bins = np.histogram([uniform(3, i, Purpose.SAMPLE) for i in range(5000)], 10, (0, 1))[0]
    assert bins.sum() == 5000 and ((bins - 500) ** 2 / 500).sum() < 27.9


def test_the_history_is_a_stack() -> None:
    """Pops undo pushes, a prompt token stays seen, and foreign ids are refused."""
    history = History.start(iter([3, 3]), 5)
    history.push(1)
    history.push(3)
    assert [part.tolist() for part in history.seen()] == [[1, 3], [1, 1]]
    history.pop()
    history.pop()
    assert [part.tolist() for part in history.seen()] == [[3], [0]]
    for foreign in (-1, 5):
        with pytest.raises(ValueError, match=r"not 0\.\.4"):
            History.start([foreign], 5)


def test_the_history_counts_what_stands_in_it_now() -> None:
    """Tokens are counted when somebody asks, whatever came and went in between."""
    rng, history = np.random.default_rng(0), History.start([2], 6)
    output: list[int] = []
    for step in rng.integers(0, 4, 400):
        if step == 0 and output:
            history.pop()
            output.pop()
        elif step < 3:
            output.append(int(rng.integers(6)))
            history.push(output[-1])
        else:
            ids, counts = history.seen()
            assert ids.tolist() == sorted({2, *output})
            assert counts.tolist() == [output.count(i) for i in ids.tolist()]
    for foreign in (-1, 6):
        with pytest.raises(IndexError, match="vocabulary of 6"):
            history.push(foreign)
