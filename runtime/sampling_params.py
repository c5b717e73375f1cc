"""The sampling options of one request, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..models.errors import PromptError

_BIG = 1e38  # products with float32 logits stay finite in float64
_WORD = 2**64 - 1  # a seed is one word of the generator's key


@dataclass(frozen=True)
class SamplingParams:
    """The sampling options of one request; raises PromptError for a value out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    rng_seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, _BIG)
        _check("top_k", self.top_k, 0, _WORD)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -_BIG, _BIG)
        _check("frequency_penalty", self.frequency_penalty, -_BIG, _BIG)
        _check("repetition_penalty", self.repetition_penalty, 0.0, _BIG, open_low=True)
        _check("rng_seed", self.rng_seed, 0, _WORD)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken without a draw."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def needs_logits(self, num_top: int) -> bool:
        """Whether a head's `num_top` best tokens per row are too few to sample exactly."""
        return self.penalised or not (self.greedy or 0 < self.top_k <= num_top)


def _check(option: str, got: Any, low: float, high: float, open_low: bool = False) -> None:
    kind, noun = (Integral, "a whole number") if isinstance(low, int) else (Real, "a number")
    typed = isinstance(got, kind) and not isinstance(got, bool)
    if not (typed and low <= got <= high) or (open_low and got == low):
        raise PromptError(
            f"option `{option}` must be {noun} {'above' if open_low else 'from'} {low} "
            f"up to {high}, but it is {got!r}; change it, or leave it out to use the default."
        )


def is_whole(got: Any) -> bool:
    """Whether a value is a whole number; True and False are not."""
    return isinstance(got, Integral) and not isinstance(got, bool)


def check_whole(option: str, got: Any, low: int) -> None:
    """Refuse anything but a whole number of at least `low`, by the option's name."""
    if not is_whole(got) or got < low:
        raise PromptError(f"{option} must be a whole number of {low} or more, not {got!r}.")
