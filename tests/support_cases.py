"""The space of exactness cases, and a small part of it that holds every pair of values.

Knows names and numbers only; `exactness.py` knows what they mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from support_layouts import LAYOUTS

TARGET: dict[str, Any] = {"close_logits": True}
DRAFTS: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 16},
    "sliding": {"sliding_window": 16, "is_causal": False, "taps": (0, 2)},
}
NETWORKS = dict(zip(DRAFTS, ("dflash", "dflash-2", "dflash-3"), strict=True))
WHOLE = 4096

NOT_DFLASH = ("oracle", "adversary", "first-k", "random", "lookup")
RAISING = ("raising observe", "raising propose", "raising crop")
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

    drafter: str
    media: str
    sampling: str
    accept: str
    block: int
    chunk: int
    policy: str


PLAIN = Case("none", "text", "greedy", "equal", 1, WHOLE, "")


def all_cases() -> Iterator[Case]:
    """The whole product, without what would be the same run twice."""
    for drafter in ("none", *NOT_DFLASH, *RAISING, *DFLASH):
        blocks = (1,) if drafter == "none" else BLOCKS
        policies = POLICIES if drafter in DFLASH else ("",)
        for media, sampling in itertools.product(LAYOUTS, SAMPLING):
            # Sampled text under the rejection rule keeps its distribution, not its tokens.
            rules = ("equal", "rejection") if sampling.startswith("greedy") else ("equal",)
            for rest in itertools.product(rules, blocks, CHUNKS, policies):
                yield Case(drafter, media, sampling, *rest)


def pairs(case: Case) -> Iterator[tuple]:
    """Every two values of a case with their factors."""
    values = zip((f.name for f in fields(case)), astuple(case), strict=True)
    yield from itertools.combinations(values, 2)


@cache
def covering_array() -> tuple[Case, ...]:
    """Few cases that hold every pair any case holds, greedily the best case next."""
    cases = list(all_cases())
    numbers: dict[tuple, int] = {}
    table = np.array([[numbers.setdefault(p, len(numbers)) for p in pairs(c)] for c in cases])
    missing, chosen = np.ones(len(numbers), bool), []
    while missing.any():
        best = int(missing[table].sum(axis=1).argmax())
        missing[table[best]] = False
        chosen.append(cases[best])
    return tuple(chosen)
