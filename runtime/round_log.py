"""The rounds of one answer as they end: kept, and shown to whoever watches.

Knows what a round's record holds; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ..models.positions import Hole, Row
from .drafters.base import DraftCounts, Proposal
from .results import Round


class RoundLog:
    """Collects rounds; `observer` sees each one as it ends."""

    def __init__(self, observer: Callable[[Round], None]) -> None:
        self.rounds: list[Round] = []
        self._observer = observer
        self._holes_seen = 0

    def start(self, counts: DraftCounts) -> None:
        """Holes met before this answer belong to no round of it."""
        self._holes_seen = len(counts.holes)

    def add(
        self,
        first_row: Row,
        anchor: int,
        proposal: Proposal,
        accepted: int,
        produced: int,
        counts: DraftCounts,
    ) -> None:
        """Record a round that drafted `proposal` after `anchor` and kept `produced` tokens."""
        record = Round(
            index=len(self.rounds),
            rows=first_row,
            block_start=proposal.block_start,
            anchor=anchor,
            drafted=tuple(proposal.token_ids),
            accepted=min(accepted, produced),
            produced=produced,
            hole=self._new_hole(counts),
        )
        self.rounds.append(record)
        self._observer(record)

    def _new_hole(self, counts: DraftCounts) -> Hole | None:
        new = counts.holes[-1] if len(counts.holes) > self._holes_seen else None
        self._holes_seen = len(counts.holes)
        return new
