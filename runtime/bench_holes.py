"""Acceptance by drafter, hole policy and phase, on held-out prompts; every answer is compared.

Knows prompts and conversations; the table, its intervals and its printing are in `bench_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .drafters.base import Drafter
from .drafters.dflash import DFlash
from .drafters.lookup import Lookup
from .drafters.mtp import Mtp
from .drafters.networks import DFlashNetworks
from .drafters.policy import HolePolicy, HoleSettings
from .drafters.token_count import AtTokenCount
from .model import Model
from .options import GenerateOptions, make_options
from .plan import PromptPlan
from .results import Round

# Output tokens after the image that count as "first".
FIRST_TOKENS = 32
PHASES = ("text", "image, first 32", "image, later", "reused prefix")


@dataclass(frozen=True)
class Prompt:
    """A question with its pictures [height, width, 3]."""

    text: str
    images: tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True)
class Setting:
    """One line of the table: a drafter, a policy and where its blocks start."""

    draft: str
    policy: HolePolicy | None
    at_token_count: bool = False


@dataclass(frozen=True)
class Sample:
    """What one prompt contributed to one phase of one setting."""

    setting: Setting
    phase: str
    target_calls: int
    tokens: int
    equal: bool


def settings(model: Model, policies: Iterable[HolePolicy]) -> Iterator[Setting]:
    """Every drafter under every policy, with and without the right block position."""
    yield Setting("lookup", None)
    if model.mtp is not None:
        yield Setting("mtp", None)
    for name in model.networks:
        for policy in policies:
            yield Setting(name, policy)
            # On the index ruler the token count is the right position.
            if policy.ruler == "text" and policy is not HolePolicy.OFF:
                yield Setting(name, policy, at_token_count=True)


def measure(
    model: Model,
    prompts: list[Prompt],
    chosen: list[Setting],
    max_new_tokens: int,
    advance: Callable[[], None],
) -> Iterator[Sample]:
    """Answer every prompt under every setting, fresh and behind a prefix the drafter never saw."""
    options = make_options(max_new_tokens=max_new_tokens)
    for prompt in prompts:
        plan = model.plan(prompt.text, prompt.images)
        plain = model.conversation("none").generate_plan(plan, options).result().token_ids
        for setting in chosen:
            yield from _fresh(model, plan, options, setting, plain, bool(prompt.images))
            if prompt.images:
                yield _reused(model, plan, options, setting, plain)
            advance()


def _fresh(
    model: Model,
    plan: PromptPlan,
    options: GenerateOptions,
    setting: Setting,
    plain: tuple[int, ...],
    has_images: bool,
) -> Iterator[Sample]:
    generation = model.conversation(_drafter(model, setting)).generate_plan(plan, options)
    equal = generation.result().token_ids == plain
    if not has_images:
        yield _sample(setting, PHASES[0], generation.rounds, equal)
        return
    first, later = _split(generation.rounds)
    yield _sample(setting, PHASES[1], first, equal)
    if later:
        yield _sample(setting, PHASES[2], later, equal)


def _reused(
    model: Model,
    plan: PromptPlan,
    options: GenerateOptions,
    setting: Setting,
    plain: tuple[int, ...],
) -> Sample:
    """The prompt's rows are in the target's cache already; the drafter comes after them."""
    conversation = model.conversation("none")
    conversation.generate_plan(plan, make_options(max_new_tokens=1)).result()
    conversation.use_draft(draft=_drafter(model, setting))
    generation = conversation.generate_plan(plan, options)
    equal = generation.result().token_ids == plain
    return _sample(setting, PHASES[3], generation.rounds, equal)


def _drafter(model: Model, setting: Setting) -> Drafter:
    if setting.draft == "mtp" and model.mtp is not None:
        return Mtp(model.mtp, model.context_limit, None)
    if setting.policy is None:
        return Lookup()
    networks: DFlashNetworks = model.networks[setting.draft]
    kind = AtTokenCount if setting.at_token_count else DFlash
    return kind(setting.draft, networks, HoleSettings(setting.policy))


def _split(rounds: list[Round]) -> tuple[list[Round], list[Round]]:
    """Rounds that begin within the first output tokens, and the later ones."""
    emitted = np.cumsum([0, *(r.produced for r in rounds)])[: len(rounds)]
    count = int((emitted < FIRST_TOKENS).sum())
    return rounds[:count], rounds[count:]


def _sample(setting: Setting, phase: str, rounds: list[Round], equal: bool) -> Sample:
    return Sample(setting, phase, len(rounds), sum(r.produced for r in rounds), equal)
