"""From samples to the acceptance table: tokens per target call with bootstrap intervals.

Knows statistics and Markdown; runs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .bench_holes import PHASES, Sample, Setting

RESAMPLES = 1000


@dataclass(frozen=True)
class Cell:
    """Tokens per target call over `num_prompts` prompts, with a 95 % bootstrap interval."""

    mean: float
    low: float
    high: float
    num_prompts: int


@dataclass(frozen=True)
class Table:
    """Cells by setting and phase, and how many answers differed from the plain run's."""

    cells: dict[Setting, dict[str, Cell]]
    num_answers: int
    num_different: int


def tabulate(samples: Iterable[Sample]) -> Table:
    """Collect samples into the table; prompts without a round in a phase do not count there."""
    groups: dict[Setting, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    everything = list(samples)
    for sample in everything:
        if sample.target_calls:
            groups[sample.setting][sample.phase].append(sample)
    cells = {s: {p: _cell(g) for p, g in phases.items()} for s, phases in groups.items()}
    return Table(cells, len(everything), sum(not s.equal for s in everything))


def _cell(samples: list[Sample]) -> Cell:
    tokens = np.array([s.tokens for s in samples], float)
    calls = np.array([s.target_calls for s in samples], float)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(samples), (RESAMPLES, len(samples)))
    means = tokens[drawn].sum(axis=1) / calls[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Cell(float(tokens.sum() / calls.sum()), float(low), float(high), len(samples))


def best_policy(table: Table, draft: str) -> str | None:
    """The policy with the most tokens per call right after an image, blocks rightly placed."""
    scores = {
        setting.policy.value: phases[PHASES[1]].mean
        for setting, phases in table.cells.items()
        if setting.draft == draft and setting.policy and not setting.at_token_count
        and PHASES[1] in phases
    }  # fmt: skip
    return max(scores, key=lambda name: scores[name]) if scores else None


def markdown(table: Table) -> str:
    """The table as people read it."""
    lines = ["| drafter | holes | block at | " + " | ".join(PHASES) + " |"]
    lines.append("|" + "---|" * (3 + len(PHASES)))
    for setting, phases in table.cells.items():
        policy = "" if setting.policy is None else setting.policy.value
        place = "token count" if setting.at_token_count else "position"
        texts = [_text(phases.get(phase)) for phase in PHASES]
        where = place if policy else ""
        lines.append(f"| {setting.draft} | {policy} | {where} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _text(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell.mean:.2f} ({cell.low:.2f}-{cell.high:.2f})"


def to_json(table: Table) -> dict:
    """The table for machines."""
    rows = [
        {
            "draft": setting.draft,
            "policy": setting.policy.value if setting.policy else None,
            "at_token_count": setting.at_token_count,
            "phase": phase,
            "tokens_per_call": cell.mean,
            "low": cell.low,
            "high": cell.high,
            "prompts": cell.num_prompts,
        }
        for setting, phases in table.cells.items()
        for phase, cell in phases.items()
    ]
    return {"rows": rows, "answers": table.num_answers, "different": table.num_different}
