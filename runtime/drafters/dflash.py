"""The DFlash drafter: observe committed rows, handle holes by policy, propose blocks.

Knows the draft's ruler, pending rows and policies; the target verifies whatever it proposes.
"""

from __future__ import annotations

import logging

import numpy as np

from ...models.errors import PromptError
from ...models.positions import (
    Hole,
    Ints,
    Position,
    Row,
    block_positions,
    index_ruler,
    seed_positions,
    text_ruler,
)
from ..sampling_params import is_whole
from .base import DraftCounts, Observed, Proposal, Request
from .draft_cache import DraftCache
from .networks import DraftNetworks
from .policy import MAX_PAUSE_ROWS, HolePolicy, HoleSettings
from .rows import Float

LOGGER = logging.getLogger("dflash_onnx.draft")
INJECT_ROWS = 512


class DFlash:
    """One conversation's DFlash drafter.

    `pos_next` is the next position on its ruler: one past the last row it injected or seeded.
    """

    def __init__(
        self,
        name: str,
        networks: DraftNetworks,
        settings: HoleSettings,
        draft_tokens: int | None = None,
    ) -> None:
        self.name = name
        self.taps = networks.taps
        self.max_drafts = _max_drafts(draft_tokens, networks.block_size)
        self.counts = DraftCounts()
        self.pos_next = Position(0)
        self.settings = settings
        self._networks = networks
        self._caches = [networks.new_cache(kind) for kind in networks.kinds]
        self._pending: list[tuple[list[Float], Ints]] = []
        # Text rows still to come before drafting resumes, and the hole that asked for them.
        self._pause_rows = 0
        self._paused_at = Position(0)

    @property
    def policy(self) -> HolePolicy:
        """The hole policy in force."""
        return self.settings.policy

    @property
    def hole_rows(self) -> int:
        """R, the most rows a hole is filled with."""
        return self.settings.rows([layer.window for layer in self._networks.layers])

    @property
    def caches(self) -> list[DraftCache]:
        """One cache per mask kind."""
        return self._caches

    def observe(self, rows: Observed) -> None:
        """Queue the rows' features, or skip them when their span is pinned on the text ruler."""
        if self.policy.ruler == "text" and rows.span.pinned:
            if rows.first_row == rows.span.start:
                self.counts.skipped_spans += 1
                LOGGER.debug("skipped a pinned span of %d rows", rows.span.num_rows)
            return
        positions = self._on_ruler(rows)
        self._reach(Position(int(positions[0])))
        self._pending.append(([rows.taps[i].copy() for i in self.taps], positions))
        self.pos_next = Position(int(positions[-1]) + 1)
        self.counts.injected_rows += positions.size
        if rows.span.kind == "text":
            self._pause_rows = max(0, self._pause_rows - positions.size)
        if sum(p.size for _, p in self._pending) >= INJECT_ROWS:
            self._flush()

    def propose(self, request: Request) -> Proposal:
        """Draft a block that starts at the anchor's position on this drafter's ruler."""
        start = request.position if self.policy.ruler == "text" else Position(request.row)
        self._reach(start)
        if self._pause_rows or request.max_drafts < 1:
            return Proposal([], start)
        self._flush()
        positions = self.positions(start, request)
        drafted = self._networks.draft(request.anchor, positions, self._caches, request.sampling)
        return Proposal(drafted.token_ids, start, drafted.proposals)

    def positions(self, start: Position, request: Request) -> Ints:
        """Positions [drafts + 1] of a block whose anchor comes next at `start`."""
        return block_positions(start, request.max_drafts + 1)

    def crop(self, num_rows: Row, position: Position) -> None:
        """Forget rows from `num_rows` (index ruler) or `position` (text ruler) on."""
        self._flush()
        stop = position if self.policy.ruler == "text" else Position(num_rows)
        lost = [(cache, cache.crop(stop)) for cache in self._caches]
        self.pos_next = Position(min(self.pos_next, stop))
        if stop <= self._paused_at:
            self._pause_rows = 0
        holes = [(cache, hole) for cache, hole in lost if hole is not None]
        if holes:
            self._handle(max((hole for _, hole in holes), key=lambda h: h.stop - h.start), holes)

    def take_settings(self, other: DFlash) -> bool:
        """Go on with another's settings; False when its networks or ruler are not the same."""
        if self._networks is not other._networks or self.policy.ruler != other.policy.ruler:
            return False
        self.settings, self.max_drafts = other.settings, other.max_drafts
        self._pause_rows = 0
        return True

    def _on_ruler(self, rows: Observed) -> Ints:
        if self.policy.ruler == "text":
            return text_ruler(rows.mrope_positions)
        return index_ruler(rows.first_row, rows.token_ids.size)

    def _reach(self, start: Position) -> None:
        """Rows come next at `start`; whatever lies between is a hole."""
        assert start >= self.pos_next, f"a span starts at {start}, before {self.pos_next}"
        if start > self.pos_next:
            self._flush()
            hole = Hole(self.pos_next, start)
            self._handle(hole, [(cache, hole) for cache in self._caches])
            self.pos_next = start

    def _handle(self, hole: Hole, parts: list[tuple[DraftCache, Hole]]) -> None:
        """Treat a hole by the policy; `parts` says which positions each cache lacks."""
        self.counts.holes.append(hole)
        LOGGER.debug("hole [%d, %d), policy %s", hole.start, hole.stop, self.policy.value)
        if self.policy is HolePolicy.OFF:
            self._pause_rows, self._paused_at = min(self.hole_rows, MAX_PAUSE_ROWS), hole.start
        if self.policy.seeds:
            self.counts.seeded_rows += seed_positions(hole, self.hole_rows).size
            for cache, part in parts:
                self._seed(cache, seed_positions(part, self.hole_rows))

    def _seed(self, cache: DraftCache, positions: Ints) -> None:
        visible = self.policy is HolePolicy.SEED
        for chunk in _chunks(positions):
            keys, values = self._networks.inject(self._networks.zero_features(chunk.size), chunk)
            self._append(cache, keys, values, chunk, visible)

    def _flush(self) -> None:
        """Inject pending rows: their features become K/V rows of every layer."""
        if not self._pending:
            return
        features, positions = _joined(self._pending)
        self._pending.clear()
        for start in range(0, positions.size, INJECT_ROWS):
            part = slice(start, start + INJECT_ROWS)
            keys, values = self._networks.inject([f[part] for f in features], positions[part])
            for cache in self._caches:
                self._append(cache, keys, values, positions[part], True)

    def _append(
        self,
        cache: DraftCache,
        keys: list[Float],
        values: list[Float],
        positions: Ints,
        visible: bool,
    ) -> None:
        kind = self._networks.kinds[self._caches.index(cache)]
        layers = [i for i, layer in enumerate(self._networks.layers) if layer == kind]
        cache.append([keys[i] for i in layers], [values[i] for i in layers], positions, visible)
        self.counts.cache_bytes = sum(cache.num_bytes for cache in self._caches)


def _joined(pending: list[tuple[list[Float], Ints]]) -> tuple[list[Float], Ints]:
    """Features and positions of all pending rows."""
    if len(pending) == 1:
        return pending[0]
    features = [np.concatenate(tap) for tap in zip(*(f for f, _ in pending), strict=True)]
    return features, np.concatenate([p for _, p in pending])


def _chunks(positions: Ints) -> list[Ints]:
    return [positions[i : i + INJECT_ROWS] for i in range(0, positions.size, INJECT_ROWS)]


def _max_drafts(draft_tokens: int | None, block_size: int) -> int:
    if draft_tokens is None:
        return block_size - 1
    if not is_whole(draft_tokens) or not 0 <= draft_tokens <= block_size - 1:
        raise PromptError(
            f"draft_tokens must lie between 0 and {block_size - 1} for this drafter "
            f"(its block size is {block_size}), not {draft_tokens}."
        )
    return draft_tokens
