"""Which drafts the target keeps, and the token it adds: one rule by equality, one by rejection.

Knows head rows, drafted ids and a sampler. Does not know caches, stop tokens or how drafts are
made; the caller commits the tokens it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .sampling import Distribution, HeadRows, Purpose, Sampler, uniform

# Takes a row and its draft; None accepts the draft, a token replaces it.
_Judge = Callable[[int, int], int | None]


class Verdict(NamedTuple):
    """The accepted drafts followed by one bonus token, and how many drafts were accepted."""

    tokens: tuple[int, ...]
    accepted: int


def accept_equal(
    sampler: Sampler, rows: HeadRows, drafts: Sequence[int], first_output_index: int
) -> Verdict:
    """Keep drafts [d] while they equal the target's own choice at rows [d + 1], so that the output
    is that of plain sampling; raises ValueError when drafts and rows do not fit."""

    def judge(row: int, draft: int) -> int | None:
        token = sampler.choose(rows, row, first_output_index + row)
        return None if token == draft else token

    return _walk(sampler, rows, drafts, first_output_index, judge)


def accept_rejection(
    sampler: Sampler,
    rows: HeadRows,
    drafts: Sequence[int],
    first_output_index: int,
    proposals: Sequence[Distribution] | None = None,
) -> Verdict:
    """Keep drafts [d] by rejection sampling against proposals [d], each a point mass by default, so
    that the output has the target's distribution; raises ValueError when lengths do not fit."""
    if proposals is not None and len(proposals) != len(drafts):
        raise ValueError(f"{len(proposals)} proposals do not fit {len(drafts)} drafts")
    if sampler.params.greedy:
        return accept_equal(sampler, rows, drafts, first_output_index)

    def judge(row: int, draft: int) -> int | None:
        target = sampler.distribution(rows, row)
        proposal = None if proposals is None else proposals[row]
        share = 1.0 if proposal is None else proposal.probability(draft)
        seed, index = sampler.params.rng_seed, first_output_index + row
        if uniform(seed, index, Purpose.ACCEPT) * share < target.probability(draft):
            return None
        rest = target.without(draft) if proposal is None else _residual(target, proposal)
        return rest.token_at(uniform(seed, index, Purpose.RESIDUAL))

    return _walk(sampler, rows, drafts, first_output_index, judge)


def accept_synthetic(
    sampler: Sampler, rows: HeadRows, drafts: Sequence[int], first_output_index: int, chance: float
) -> Verdict:
    """Keep each draft [d] with probability `chance`, right or wrong: what drafts that good would
    be worth, without a drafter that has them. The text means nothing."""

    def judge(row: int, draft: int) -> int | None:
        index = first_output_index + row
        kept = uniform(sampler.params.rng_seed, index, Purpose.ACCEPT) < chance
        return None if kept else sampler.choose(rows, row, index)

    return _walk(sampler, rows, drafts, first_output_index, judge)


def _walk(
    sampler: Sampler, rows: HeadRows, drafts: Sequence[int], first: int, judge: _Judge
) -> Verdict:
    if len(rows.top_ids) != len(drafts) + 1:
        raise ValueError(f"{len(rows.top_ids)} head rows do not fit {len(drafts)} drafts plus one")
    kept: list[int] = []
    try:
        for row, draft in enumerate(map(int, drafts)):
            bonus = judge(row, draft)
            if bonus is not None:
                return Verdict((*kept, bonus), row)
            sampler.history.push(draft)
            kept.append(draft)
        bonus = sampler.choose(rows, len(kept), first + len(kept))
        return Verdict((*kept, bonus), len(kept))
    finally:
        for _ in kept:
            sampler.history.pop()


def _residual(target: Distribution, proposal: Distribution) -> Distribution:
    excess = target.probs.copy()
    _, ours, theirs = np.intersect1d(target.ids, proposal.ids, True, return_indices=True)
    excess[ours] -= proposal.probs[theirs]
    # Rounding alone can reject where target and proposal agree; nothing exceeds then.
    return Distribution.of(target.ids, excess) if (excess > 0).any() else target
