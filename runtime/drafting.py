"""A drafter kept at arm's length: whatever it raises turns it off, and nothing it says is trusted.

Knows the drafter interface and the ban list; the request goes on whatever happens here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from operator import index
from typing import TypeVar

from ..models.positions import Position, Row
from .draft_length import DraftLength, FixedLength
from .drafters.base import DraftCounts, Drafter, Observed, Proposal, Request
from .sampling import Distribution

LOGGER = logging.getLogger("dflash_onnx.draft")
T = TypeVar("T")


class DraftRunner:
    """Runs one drafter for one conversation; `state` is "on" or "off: why"."""

    def __init__(
        self,
        drafter: Drafter,
        banned_ids: Collection[int],
        vocab_size: int,
        length: DraftLength | None = None,
    ) -> None:
        self.drafter = drafter
        self.length: DraftLength = length or FixedLength()
        self.name = drafter.name
        self.counts: DraftCounts = drafter.counts
        self.state = "on"
        self._taps = drafter.taps
        self._banned = frozenset(banned_ids)
        self._vocab_size = vocab_size

    @property
    def is_on(self) -> bool:
        """Whether the drafter still takes part."""
        return self.state == "on"

    @property
    def max_drafts(self) -> int:
        """Drafts of a round at most."""
        return self.drafter.max_drafts if self.is_on else 0

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output must be fetched."""
        return self._taps if self.is_on else ()

    def observe(self, rows: Observed) -> None:
        """Show committed rows to the drafter."""
        self._guarded("observe", lambda: self.drafter.observe(rows), None)

    def propose(self, request: Request) -> Proposal:
        """Draft; cut before the first id that is a placeholder or no token at all."""
        return self._guarded("propose", lambda: self._drafted(request), Proposal([]))

    def crop(self, num_rows: Row, position: Position) -> None:
        """Forget rows."""
        self._guarded("crop", lambda: self.drafter.crop(num_rows, position), None)

    def _drafted(self, request: Request) -> Proposal:
        allowed = min(request.max_drafts, self.drafter.max_drafts)
        proposal = self.drafter.propose(request._replace(max_drafts=allowed))
        ids = [index(t) for t in proposal.token_ids[:allowed]]
        bad = next((i for i, t in enumerate(ids) if self._refused(t)), len(ids))
        proposals = proposal.proposals
        if proposals is not None:
            proposals = list(proposals[:bad])
            self._check_proposals(ids[:bad], proposals)
        return Proposal(ids[:bad], proposal.block_start, proposals)

    def _check_proposals(self, ids: list[int], proposals: list[Distribution]) -> None:
        """Each drafted id needs what it was drawn from, with nothing on ids that cannot come."""
        if len(proposals) != len(ids):
            raise ValueError(f"{len(proposals)} distributions for {len(ids)} drafts")
        for token, proposal in zip(ids, proposals, strict=True):
            if not proposal.probability(token) > 0:
                raise ValueError(f"draft {token} has no probability in its own distribution")
            if not self._banned.isdisjoint(proposal.ids.tolist()):
                raise ValueError("a distribution gives weight to a placeholder id")

    def _refused(self, token: int) -> bool:
        return not 0 <= token < self._vocab_size or token in self._banned

    def _guarded(self, what: str, call: Callable[[], T], instead: T) -> T:
        if not self.is_on:
            return instead
        try:
            return call()
        except Exception as error:  # a drafter may fail in any way; a request may not
            self.state = f"off: {what} failed: {error}"
            LOGGER.warning("drafter %s turned off: %s failed: %s", self.name, what, error)
            return instead
