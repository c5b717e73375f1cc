"""DFlash with the bug that this project exists for, to measure what the right position is worth.

Its context is right; its blocks start at the token count instead of the next position, as
llama.cpp's did before #28715. Used by benchmarks and tests, never offered for answers.
"""

from __future__ import annotations

from ...models.positions import Ints, Position, block_positions
from .base import Request
from .dflash import DFlash


class AtTokenCount(DFlash):
    """A DFlash drafter that confuses rows with positions."""

    def positions(self, start: Position, request: Request) -> Ints:
        """The block where the row number says, wherever the text has got to."""
        return block_positions(Position(request.row), request.max_drafts + 1)
