"""Options of one generation, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..models.errors import PromptError
from .sampling_params import SamplingParams, check_whole

ACCEPT_RULES = ("equal", "rejection")


@dataclass(frozen=True)
class GenerateOptions:
    """How far and how to generate; `chunk` is the largest prefill batch in rows, None one that
    keeps its activations small.

    `accept`: "equal" keeps the text of the plain run at the same seed, with any drafter;
    "rejection" accepts more drafts and keeps only the distribution. For measurements alone:
    `ignore_stop` goes on to the last token, and `synthetic_acceptance` accepts each draft with this
    probability, whatever the target says.
    """

    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    chunk: int | None = None
    accept: str = "equal"
    ignore_stop: bool = False
    synthetic_acceptance: float | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 0)
        if self.chunk is not None:
            check_whole("chunk", self.chunk, 1)
        if self.accept not in ACCEPT_RULES:
            rules = " or ".join(ACCEPT_RULES)
            raise PromptError(f"accept must be {rules}, not {self.accept!r}.")
        chance = self.synthetic_acceptance
        if chance is not None and not 0 <= chance <= 1:
            raise PromptError(f"synthetic_acceptance must lie between 0 and 1, not {chance!r}.")
        listed = isinstance(self.stop, tuple) and all(isinstance(s, str) for s in self.stop)
        if not listed or "" in self.stop:
            raise PromptError(f"stop must be a list of non-empty strings, not {self.stop!r}.")


def make_options(**options: Any) -> GenerateOptions:
    """Options from flat keywords, e.g. temperature=0.7, max_new_tokens=64.

    Raises TypeError for a name that is no option, `PromptError` for a value out of range.
    """
    names = {f.name for f in fields(SamplingParams)}
    sampling = {k: v for k, v in options.items() if k in names}
    rest = {k: v for k, v in options.items() if k not in names}
    if isinstance(rest.get("stop"), list):
        rest["stop"] = tuple(rest["stop"])
    return GenerateOptions(sampling=SamplingParams(**sampling), **rest)
