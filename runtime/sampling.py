"""From head outputs to a token: penalties, temperature, top-k, top-p, min-p and a keyed draw.

Knows token ids, logits and the options of a request. Does not know sessions, drafts or text; the
head has already set banned tokens to -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Purpose(IntEnum):
    """What a uniform number is spent on, so that no two uses share one."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


class HeadRows(NamedTuple):
    """A head's answers at n positions, bans already -inf: top_values [n, K] descending with ties
    lowest id first, their top_ids [n, K], and all logits [n, V] or None."""

    top_values: npt.NDArray[np.float32]
    top_ids: Ids
    logits: npt.NDArray[np.float32] | None = None


class History:
    """How often each token stands in the prompt text and in the output, one stack of output."""

    def __init__(self, prompt_counts: Ids) -> None:
        self._in_prompt = prompt_counts > 0
        self._output: list[int] = []
        # Of the first `_counted` tokens of the output: few requests ask for counts.
        self._output_counts = np.zeros_like(prompt_counts)
        self._counted = 0

    @classmethod
    def start(cls, prompt_ids: Iterable[int], vocab_size: int) -> History:
        """The history before any output; raises ValueError for an id outside the vocabulary."""
        ids = np.fromiter(prompt_ids, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"prompt ids span {ids.min()}..{ids.max()}, not 0..{vocab_size - 1}")
        return cls(np.bincount(ids, minlength=vocab_size).astype(np.int64))

    def push(self, token: int) -> None:
        """Append one output token; raises IndexError for an id past the vocabulary."""
        if not 0 <= token < self._in_prompt.size:
            raise IndexError(f"token {token} is none of a vocabulary of {self._in_prompt.size}")
        self._output.append(int(token))

    def pop(self) -> None:
        """Take the newest output token back; raises IndexError when there is none."""
        token = self._output.pop()
        if self._counted > len(self._output):
            self._output_counts[token] -= 1
            self._counted -= 1

    def seen(self) -> tuple[Ids, Ids]:
        """The ids met in prompt or output, ascending [m], and their counts in the output [m]."""
        for token in self._output[self._counted :]:
            self._output_counts[token] += 1
        self._counted = len(self._output)
        ids = np.flatnonzero(self._in_prompt | (self._output_counts > 0))
        return ids, self._output_counts[ids]


@dataclass(frozen=True, eq=False)
class Distribution:
    """Probabilities probs [m] of the token ids [m], ids ascending; every other id has none."""

    ids: Ids
    probs: Floats

    @classmethod
    def of(cls, ids: Ids, weights: Floats) -> Distribution:
        """Normalise weights [m] of ids [m]; raises ValueError when no weight is positive."""
        kept = weights > 0
        if not kept.any():
            raise ValueError("no token has a positive weight")
        return cls(ids[kept], weights[kept] / weights[kept].sum())

    @classmethod
    def point(cls, token: int) -> Distribution:
        """All mass on one token."""
        return cls(np.array([token], np.int64), np.ones(1))

    def token_at(self, u: float) -> int:
        """The token whose share of [0, 1), laid out in id order, holds u."""
        edges = np.cumsum(self.probs)
        # Rounding can leave the last edge beside 1: u scales to it, and no answer lies past it.
        last = np.searchsorted(edges, edges[-1], side="left")
        return int(self.ids[min(np.searchsorted(edges, u * edges[-1], side="right"), last)])

    def probability(self, token: int) -> float:
        """The probability of one token."""
        at = int(np.searchsorted(self.ids, token))
        return float(self.probs[at]) if at < self.ids.size and self.ids[at] == token else 0.0

    def without(self, token: int) -> Distribution:
        """This distribution less one token, normalised; raises ValueError when none is left."""
        return Distribution.of(self.ids, np.where(self.ids == token, 0.0, self.probs))


def uniform(rng_seed: int, index: int, purpose: Purpose) -> float:
    """A number in [0, 1) that depends on the three arguments alone."""
    key = np.array((rng_seed, purpose), np.uint64)
    counter = np.array((index, 0, 0, 0), np.uint64)
    return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53


class Sampler:
    """Chooses tokens from head rows under one request's options and the history so far."""

    def __init__(self, params: SamplingParams, history: History) -> None:
        self.params = params
        self.history = history

    def choose(self, rows: HeadRows, row: int, output_index: int) -> int:
        """The token at one row; raises ValueError for a row without a usable logit."""
        if self.params.greedy and not self.params.penalised:
            return _best(rows, row)
        distribution = self.distribution(rows, row)
        if self.params.greedy:
            return int(distribution.ids[0])
        return distribution.token_at(uniform(self.params.rng_seed, output_index, Purpose.SAMPLE))

    def distribution(self, rows: HeadRows, row: int) -> Distribution:
        """What one row is drawn from; raises ValueError for a row without a usable logit."""
        params = self.params
        if params.greedy and not params.penalised:
            return Distribution.point(_best(rows, row))
        ids, values = self._scores(rows, row)
        _check_best(values.max(), row)
        if params.greedy:
            return Distribution.point(int(ids[values.argmax()]))
        if params.top_k:
            kept = _largest(values, params.top_k)
            ids, values = ids[kept], values[kept]
        weights = _softmax(values, params.temperature)
        if params.top_p < 1:
            kept = _nucleus(weights, params.top_p)
            ids, weights = ids[kept], weights[kept]
        return Distribution.of(ids, weights * (weights >= params.min_p * weights.max()))

    def _scores(self, rows: HeadRows, row: int) -> tuple[Ids, Floats]:
        if rows.logits is not None:
            values = rows.logits[row].astype(np.float64)
            if self.params.penalised:
                self._penalise(values)
            return np.arange(values.size), values
        if self.params.needs_logits(rows.top_ids.shape[1]):
            raise ValueError("the head rows carry no logits, and these sampling options need them")
        by_id = np.argsort(rows.top_ids[row])
        return rows.top_ids[row][by_id], rows.top_values[row][by_id].astype(np.float64)

    def _penalise(self, logits: Floats) -> None:
        params = self.params
        ids, counts = self.history.seen()
        values, repetition = logits[ids], params.repetition_penalty
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        logits[ids] = values


def _best(rows: HeadRows, row: int) -> int:
    """The head's best token at one row."""
    _check_best(rows.top_values[row, 0], row)
    return int(rows.top_ids[row, 0])


def _check_best(best: float, row: int) -> None:
    if not math.isfinite(best):
        raise ValueError(f"head row {row} has no usable logit: its best one is {best}")


def _softmax(values: Floats, temperature: float) -> Floats:
    # Subtracting the maximum first keeps tiny temperatures from overflowing to inf - inf.
    with np.errstate(over="ignore"):
        weights = np.exp((values - values.max()) / temperature)
    return weights / weights.sum()


def _largest(values: Floats, count: int) -> Ids:
    if count >= values.size:
        return np.arange(values.size)
    # Not a full sort: a vocabulary holds hundreds of thousands of values.
    limit = np.partition(values, -count)[-count]
    above, ties = np.flatnonzero(values > limit), np.flatnonzero(values == limit)
    return np.sort(np.concatenate((above, ties[: count - above.size])))


def _nucleus(probs: Floats, top_p: float, count: int = 1024) -> Ids:
    best = _largest(probs, count)
    best = best[np.argsort(-probs[best], kind="stable")]
    up_to = np.cumsum(probs[best])
    if up_to[-1] < top_p and count < probs.size:
        return _nucleus(probs, top_p, 8 * count)
    return np.sort(best[: 1 + np.count_nonzero(up_to[:-1] < top_p)])
