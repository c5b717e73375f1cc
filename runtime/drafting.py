"""A drafter kept at arm's length: whatever it raises turns it off, and nothing it says is trusted.

Knows the drafter interface and the ban list; the request goes on whatever happens here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from operator import index
from typing import TypeVar

from ..models.positions import Position, Row
from .drafters.base import DraftCounts, Drafter, Observed, Proposal, Request

LOGGER = logging.getLogger("dflash_onnx.draft")
T = TypeVar("T")


class DraftRunner:
    """Runs one drafter for one conversation; `state` is "on" or "off: why"."""

    def __init__(self, drafter: Drafter, banned_ids: Collection[int], vocab_size: int) -> None:
        self.drafter = drafter
        self.state = "on"
        self._banned = frozenset(banned_ids)
        self._vocab_size = vocab_size

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self.drafter.name

    @property
    def counts(self) -> DraftCounts:
        """What happened on the draft side."""
        return self.drafter.counts

    @property
    def is_on(self) -> bool:
        """Whether the drafter still takes part."""
        return self.state == "on"

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output must be fetched."""
        return self.drafter.taps if self.is_on else ()

    def observe(self, rows: Observed) -> None:
        """Show committed rows to the drafter."""
        self._guarded("observe", lambda: self.drafter.observe(rows), None)

    def propose(self, request: Request) -> Proposal:
        """Draft; cut before the first id that is a placeholder or no token at all."""
        allowed = min(request.max_drafts, self.drafter.max_drafts)
        limited = Request(
            request.anchor,
            allowed,
            request.row,
            request.position,
            request.output_index,
            request.tokens,
        )
        return self._guarded("propose", lambda: self._drafted(limited), Proposal([]))

    def crop(self, num_rows: Row, position: Position) -> None:
        """Forget rows."""
        self._guarded("crop", lambda: self.drafter.crop(num_rows, position), None)

    def _drafted(self, request: Request) -> Proposal:
        proposal = self.drafter.propose(request)
        ids = [index(t) for t in proposal.token_ids[: request.max_drafts]]
        bad = next((i for i, t in enumerate(ids) if self._refused(t)), len(ids))
        return Proposal(ids[:bad], proposal.block_start)

    def _refused(self, token: int) -> bool:
        return token in self._banned or not 0 <= token < self._vocab_size

    def _guarded(self, what: str, call: Callable[[], T], instead: T) -> T:
        if not self.is_on:
            return instead
        try:
            return call()
        except Exception as error:  # a drafter may fail in any way; a request may not
            self.state = f"off: {what} failed: {error}"
            LOGGER.warning("drafter %s turned off: %s failed: %s", self.name, what, error)
            return instead
