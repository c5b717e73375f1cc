"""How many tokens to draft in a round: a fixed number, or what pays by the times measured so far.

Knows seconds and acceptance; knows no drafter and no network. Lengths change speed, never text.
"""

from __future__ import annotations

from typing import Protocol

# Weight of a round that took longer than the running time.
NEWEST = 0.1
# What a try loses of its weight with every later one, and how many tries the mean counts for.
FADING, PRIOR = 0.04, 2.0
# Rounds until a parked drafter is tried again; doubled after every try that does not pay.
FIRST_PAUSE, LONGEST_PAUSE = 48, 384
# A parked drafter waits at least until what it lost is such a part of the time since then.
LOSS = 0.03
# Rounds before the curve is asked.
FIRST_ROUNDS = 2
# A round that accepts such a part of its drafts needs no comparison with plain decoding yet.
GOOD_SHARE = 0.75
# A drafter is parked only when it loses by more than times scatter.
MARGIN = 1.02


class DraftLength(Protocol):
    """Chooses the length of every round and is told how the round went."""

    def choose(self, most: int) -> int:
        """Drafts for the next round, at most `most`."""

    def record(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        """A round's outcome; `drafted` may be fewer than were chosen."""

    def describe(self) -> str:
        """What is chosen and why, for the statistics."""


class FixedLength:
    """Always the same number, or as many as there may be."""

    def __init__(self, length: int | None = None) -> None:
        self._length = length

    def choose(self, most: int) -> int:
        """The fixed number, where it is allowed."""
        return most if self._length is None else min(self._length, most)

    def record(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Nothing to learn."""

    def describe(self) -> str:
        """The number."""
        return "as long as possible" if self._length is None else f"{self._length} a round"


class AdaptiveLength:
    """The length with the most expected tokens per second; none while drafting loses.

    The first round drafts half of what it may, the second all of it, or one token if nothing was
    right; once drafts are refused, one round drafts none. Between measured lengths times are
    interpolated.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._tried: list[float] = []
        self._accepted: list[float] = []
        self._rounds = 0
        self._pause = FIRST_PAUSE
        self._resume_at = 0
        self._parked_rounds = 0
        # What rounds with drafts took since the last pause, and the tokens they gave.
        self._drafting_seconds, self._drafting_tokens = 0.0, 0
        self._last = 0
        self._went_well = False

    def choose(self, most: int) -> int:
        """The length that promises the most tokens per second."""
        self._last = self._next(most)
        return self._last

    def record(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Learn what a round of this length costs and how far its drafts were right."""
        self._rounds += 1
        self._went_well = accepted >= GOOD_SHARE * drafted
        self._parked_rounds += self._rounds <= self._resume_at
        seconds = draft_seconds + verify_seconds
        known = self._seconds.get(drafted)
        if known is not None and seconds > known:
            # Slowly upwards: most long rounds were interrupted by something else.
            seconds = known + NEWEST * (min(seconds, 2 * known) - known)
        self._seconds[drafted] = seconds
        if drafted:
            self._drafting_seconds += seconds
            self._drafting_tokens += accepted + 1
        if drafted and accepted == drafted:
            # A try that went well is worth another one soon.
            self._pause = FIRST_PAUSE
        for position in range(min(accepted + 1, drafted)):
            self._note(position, position < accepted)

    def describe(self) -> str:
        """The length in use, and how long the drafter was parked."""
        parked = f", parked for {self._parked_rounds} rounds" if self._parked_rounds else ""
        if self._rounds <= self._resume_at:
            return f"auto, now parked: plain decoding is faster{parked}"
        return f"auto, now {self._last}{parked}"

    def _next(self, most: int) -> int:
        if most < 1 or set(self._seconds) == {0}:
            return most
        if self._rounds < FIRST_ROUNDS:
            return self._first(most)
        if 0 not in self._seconds:
            return most if self._went_well else 0
        if self._rounds < self._resume_at:
            return 0
        best = max(range(1, most + 1), key=self._rate)
        if self._rate(best) * MARGIN >= self._rate(0):
            self._pause = FIRST_PAUSE
            return best
        if self._rounds == self._resume_at and self._resume_at:
            return best  # a try after a pause, as cheap as the curve says
        self._park()
        return 0

    def _park(self) -> None:
        plain_steps = self._drafting_seconds / self._seconds[0]
        enough = (plain_steps - self._drafting_tokens) / LOSS
        self._resume_at = self._rounds + max(self._pause, min(int(enough), LONGEST_PAUSE))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._drafting_seconds, self._drafting_tokens = 0.0, 0

    def _first(self, most: int) -> int:
        """Half at first, since a block of wrong drafts costs the most; then all, or one."""
        if not self._tried:
            return max(1, most // 2)
        return most if any(self._accepted) else 1

    def _rate(self, length: int) -> float:
        """Expected tokens per second of a round with `length` drafts."""
        tokens, chance = 1.0, 1.0
        for position in range(length):
            chance *= self._chance(position)
            tokens += chance
        return tokens / self._cost(length)

    def _chance(self, position: int) -> float:
        """How likely the draft at `position` is right, if those before it are.

        A position seen seldom leans on all positions together.
        """
        tried, accepted = sum(self._tried), sum(self._accepted)
        overall = (accepted + PRIOR / 2) / (tried + PRIOR)
        if position >= len(self._tried):
            return overall
        seen, right = self._tried[position], self._accepted[position]
        return (right + PRIOR * overall) / (seen + PRIOR)

    def _note(self, position: int, right: bool) -> None:
        if position == len(self._tried):
            self._tried.append(0.0)
            self._accepted.append(0.0)
        for figures, new in ((self._tried, 1.0), (self._accepted, float(right))):
            figures[position] = (1 - FADING) * figures[position] + new

    def _cost(self, length: int) -> float:
        """Seconds of a round, from the nearest measured lengths on both sides."""
        if length in self._seconds:
            return self._seconds[length]
        below = max(known for known in self._seconds if known < length)
        above = [known for known in self._seconds if known > length]
        if not above:
            return self._seconds[below] * (1 + 0.1 * (length - below))
        start, stop = self._seconds[below], self._seconds[min(above)]
        return start + (stop - start) * (length - below) / (min(above) - below)
