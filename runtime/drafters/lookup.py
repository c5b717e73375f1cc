"""Drafting by copying: the text that followed the same few tokens before, in prompt or output.

Costs no memory and no network; strong on transcription, quoting and JSON. Knows ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...models.positions import Position, Row
from .base import DraftCounts, Observed, Proposal, Request

LONGEST, SHORTEST = 4, 2
MAX_DRAFTS = 8


class Lookup:
    """N-gram lookup, longest match first, latest occurrence first."""

    name = "lookup"
    taps: tuple[int, ...] = ()

    def __init__(self, max_drafts: int = MAX_DRAFTS) -> None:
        self.max_drafts = max_drafts
        self.counts = DraftCounts()
        self._indexed = 0
        # The token count after the last occurrence of each n-gram.
        self._ends: dict[tuple[int, ...], int] = {}

    def observe(self, rows: Observed) -> None:
        """Nothing to note: a request brings all tokens."""

    def propose(self, request: Request) -> Proposal:
        """The tokens that followed the latest earlier occurrence of the current ending."""
        tokens = request.tokens
        end = self._match(tokens)
        self._index(tokens, len(tokens))
        if end is None:
            return Proposal([])
        return Proposal(list(tokens[end : end + request.max_drafts]))

    def crop(self, num_rows: Row, position: Position) -> None:
        """Start over: the tokens that follow are another text."""
        self._indexed = 0
        self._ends.clear()

    def _match(self, tokens: Sequence[int]) -> int | None:
        # Not yet with the newest token: an ending must not match itself.
        self._index(tokens, len(tokens) - 1)
        for size in range(LONGEST, SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if end is not None:
                return end
        return None

    def _index(self, tokens: Sequence[int], stop: int) -> None:
        """Note the n-grams of the first `stop` tokens that are not noted yet."""
        for end in range(self._indexed + 1, stop + 1):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, stop)
