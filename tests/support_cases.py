"""The space of exactness cases, and a small part of it that holds every pair of values.

Knows names and numbers only; `exactness.py` knows what they mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support_layouts import LAYOUTS

TARGET: dict[str, Any] = {"close_logits": True}
# With these layers and this seed every prompt has an answer of its own.
HYBRID: dict[str, Any] = {
    "architecture": "Qwen3_5ForConditionalGeneration",
    "mtp": True,
    "interval": 2,
    "seed": 2,
    "close_logits": True,
}
TARGETS = {"attention": TARGET, "hybrid": HYBRID}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 16}
CONV = {"conv_kernel_size": 3, "conv_group_size": 16}
DRAFTS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": MIXED,
    "sliding": {"sliding_window": 16, "is_causal": False, "taps": (0, 2)},
    "second": {**MIXED, **CONV, "selector_rank": 12, "selector_top_k": 6},
}
NETWORKS = dict(zip(DRAFTS, ("dflash", "dflash-2", "dflash-3", "dflash2"), strict=True))
WHOLE = 4096

NOT_DFLASH = ("oracle", "adversary", "first-k", "random", "lookup")
RAISING = ("raising observe", "raising propose", "raising crop")
MTP = ("mtp", "mtp guided")
DFLASH = tuple(f"{kind} {draft}" for kind in ("dflash", "guided") for draft in DRAFTS)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy penalised": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    },
    "seeded filtered": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "rng_seed": 7,
    },
    "seeded free": {"temperature": 1.0, "rng_seed": 11},
}
BLOCKS = (2, 3, 8)
CHUNKS = (1, 2, 7, 64, WHOLE)
POLICIES = ("seed", "seed-masked", "gap", "index", "off")


@dataclass(frozen=True)
class Case:
    """One run; `block` is 1 without a drafter and `policy` is empty where there is none."""

    target: str
    drafter: str
    media: str
    sampling: str
    accept: str
    block: int
    chunk: int
    policy: str


PLAIN = Case("attention", "none", "text", "greedy", "equal", 1, WHOLE, "")
HYBRID_PLAIN = replace(PLAIN, target="hybrid")


def all_cases(target: str) -> Iterator[Case]:
    """The whole product of a target, without what would be the same run twice."""
    own = MTP if target == "hybrid" else ()
    for drafter in ("none", *NOT_DFLASH, *RAISING, *own, *DFLASH):
        blocks = (1,) if drafter == "none" else BLOCKS
        policies = POLICIES if drafter in DFLASH else ("",)
        for media, sampling in itertools.product(LAYOUTS, SAMPLING):
            # Sampled text under the rejection rule keeps its distribution, not its tokens.
            rules = ("equal", "rejection") if sampling.startswith("greedy") else ("equal",)
            for rest in itertools.product(rules, blocks, CHUNKS, policies):
                yield Case(target, drafter, media, sampling, *rest)


def pairs(case: Case) -> Iterator[tuple]:
    """Every two values of a case with their factors."""
    values = zip((f.name for f in fields(case)), astuple(case), strict=True)
    yield from itertools.combinations(values, 2)


@cache
def covering_array(target: str) -> tuple[Case, ...]:
    """Few cases of a target that hold every pair any does, greedily the best case next."""
    cases = list(all_cases(target))
    table = _pair_numbers(cases)
    missing, chosen = np.ones(int(table.max()) + 1, bool), []
    while missing.any():
        best = int(missing[table].sum(axis=1).argmax())
        missing[table[best]] = False
        chosen.append(cases[best])
    return tuple(chosen)


def _pair_numbers(cases: list[Case]) -> NDArray[np.int64]:
    """The numbers [cases, pairs] of every case's pairs."""
    columns = [_numbered(np.array(values)) for values in zip(*map(astuple, cases), strict=True)]
    numbers, count = [], 0
    for first, second in itertools.combinations(columns, 2):
        numbers.append(_numbered(first * (int(second.max()) + 1) + second) + count)
        count = int(numbers[-1].max()) + 1
    return np.stack(numbers, axis=1)


def _numbered(values: NDArray) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1]
