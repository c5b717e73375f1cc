"""Speed on one prompt of random tokens: prefill, plain and speculative decoding, round by round.

Plain and speculative runs alternate in one process and medians are compared, because machines are
shared. Knows clocks; prints nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal

import numpy as np

from .draft_factory import DraftChoice
from .model import Model
from .options import make_options
from .plan import PlanBuilder, PromptPlan
from .results import Result


@dataclass(frozen=True)
class SpeedOptions:
    """What to measure: rows of the prompt, tokens of the answer, alternating repeats."""

    draft: str | None
    draft_tokens: int | Literal["auto"] | None
    prompt_tokens: int
    new_tokens: int
    repeats: int
    synthetic_acceptance: float | None
    seed: int


@dataclass(frozen=True)
class Run:
    """One answer: seconds per token and per round, and where a round's time went."""

    prefill_seconds: float
    token_seconds: float
    round_seconds: float
    network_seconds: float
    draft_seconds: float
    verify_seconds: float
    tokens_per_round: float
    drafted: int
    accepted: int
    length: str


def measure(model: Model, options: SpeedOptions, tick: Callable[[], object]) -> dict[str, Any]:
    """Alternate plain and speculative runs after one warm-up each; medians and ratios."""
    plan = random_prompt(model, options.prompt_tokens, options.seed)
    plain, drafting = (
        DraftChoice("none"),
        DraftChoice(options.draft, draft_tokens=options.draft_tokens),
    )
    runs: dict[str, list[Run]] = {"plain": [], "speculative": []}
    for repeat in range(options.repeats + 1):
        for name, choice in (("plain", plain), ("speculative", drafting)):
            run = _run(model, plan, choice, options)
            if repeat:
                runs[name].append(run)
            tick()
    report = {name: summary(found) for name, found in runs.items()}
    facts = asdict(options) | {"prompt_digest": digest(plan), "provider": model.provider_info()}
    facts |= {"target_digest": model.manifest.target_digest, "draft": drafter_name(model, options)}
    return facts | report | {"ratios": ratios(report["plain"], report["speculative"])}


def random_prompt(model: Model, num_tokens: int, seed: int) -> PromptPlan:
    """Text rows of random ids that an answer could hold."""
    usable = np.setdiff1d(np.arange(model.manifest.tokenizer_size), model.manifest.banned_ids)
    builder = PlanBuilder()
    builder.text(np.random.default_rng(seed).choice(usable, num_tokens).tolist())
    return builder.plan()


def digest(plan: PromptPlan) -> str:
    """Identity of a prompt's token ids."""
    return hashlib.sha256(plan.token_ids.astype("<i8").tobytes()).hexdigest()[:16]


def drafter_name(model: Model, options: SpeedOptions) -> str:
    """The drafter that runs when none is named."""
    return options.draft or next(iter(model.manifest.draft_names), "none")


def _run(model: Model, plan: PromptPlan, choice: DraftChoice, options: SpeedOptions) -> Run:
    """One answer in a conversation of its own."""
    made = make_options(
        max_new_tokens=options.new_tokens,
        ignore_stop=True,
        synthetic_acceptance=options.synthetic_acceptance,
    )
    conversation = model.conversation(choice.draft, draft_tokens=choice.draft_tokens)
    generation = conversation.generate_plan(plan, made)
    deltas = iter(generation)
    next(deltas)
    before, started = _network_seconds(model), perf_counter()
    for _ in deltas:
        pass
    seconds = perf_counter() - started
    return _figures(generation.result(), seconds, _network_seconds(model) - before)


def _figures(result: Result, seconds: float, network_seconds: float) -> Run:
    draft, timings = result.draft, result.timings
    rounds, tokens = max(draft.rounds, 1), max(sum(draft.tokens_per_round), 1)
    return Run(
        prefill_seconds=timings.prefill_seconds,
        token_seconds=seconds / tokens,
        round_seconds=seconds / rounds,
        network_seconds=network_seconds / rounds,
        draft_seconds=timings.draft_seconds / rounds,
        verify_seconds=timings.verify_seconds / rounds,
        tokens_per_round=tokens / rounds,
        drafted=draft.drafted,
        accepted=draft.accepted,
        length=draft.length,
    )


def _network_seconds(model: Model) -> float:
    return sum(clock.seconds for clock in model.clocks().values())


def summary(runs: list[Run]) -> dict[str, Any]:
    """Medians over runs; seconds become milliseconds."""
    figures: dict[str, Any] = {}
    for name, value in asdict(runs[-1]).items():
        if isinstance(value, str):
            figures[name] = value
            continue
        middle = median(getattr(run, name) for run in runs)
        seconds = name.endswith("_seconds")
        figures[name.replace("_seconds", "_ms")] = 1e3 * middle if seconds else middle
    host = figures["round_ms"] - figures["network_ms"]
    return figures | {
        "tokens_per_second": 1e3 / figures["token_ms"],
        "host_us": 1e3 * host,
        "host_share": host / figures["round_ms"],
    }


def ratios(plain: dict[str, Any], speculative: dict[str, Any]) -> dict[str, float]:
    """Speed-up, and how much of what the networks' own times allow it is."""
    speed_up = plain["token_ms"] / speculative["token_ms"]
    cost = speculative["network_ms"] / plain["network_ms"]
    allowed = speculative["tokens_per_round"] / cost
    return {
        "speed_up": speed_up,
        "round_cost": cost,
        "allowed_speed_up": allowed,
        "efficiency": speed_up / allowed,
    }
