"""The MTP drafter: the head that ships in Qwen3.5-family checkpoints, chained token by token.

It observes every row, media included, at the target's own M-RoPE positions; a row enters its
cache once the embedding of the row after it is known. Knows no taps and no hole policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...models.errors import PromptError
from ...models.manifest import Manifest
from ...models.positions import (
    Hole,
    Ints,
    Position,
    Row,
    advancing_positions,
    next_position,
    text_ruler,
)
from ..sampling_params import is_whole
from ..session import Graph, Runtime
from ..target import Target
from ..target_cache import TargetCache
from .base import DraftCounts, Observed, Proposal, Request

Float = NDArray[np.float32]

# Each draft is a pass of its own, and likelier to be wrong than the one before.
DEFAULT_DRAFTS = 3
MAX_DRAFTS = 15
FEED_ROWS = 512


@dataclass(frozen=True)
class MtpRows:
    """Target rows: numbers [n], hidden rows [n, H] and M-RoPE positions [3, n]."""

    numbers: range
    hidden: Float
    positions: Ints


class MtpNetworks:
    """The MTP graph of a bundle with the target's head, embedding table and rope."""

    def __init__(self, manifest: Manifest, runtime: Runtime, target: Target) -> None:
        self.target = target
        self._graph: Graph = runtime.later(manifest.graphs["mtp"])

    def new_cache(self, limit: int) -> TargetCache:
        """An empty cache of the head's one layer."""
        text = self.target.config.text
        return TargetCache(self._graph.bind(), (0,), text.num_kv_heads, text.head_dim, limit)

    def forward(self, cache: TargetCache, embeds: Float, hidden: Float, positions: Ints) -> Float:
        """Hidden rows [n, H] from the rows' [n, H] and the embeddings [n, H] one row further."""
        cache.reserve(len(embeds))
        cos, sin = self.target.rotary(positions)
        feeds = {"inputs_embeds": embeds[None], "past_hidden": hidden, "cos": cos, "sin": sin}
        feeds["past_rows"] = np.array([cache.num_rows], np.int32)
        for name, array in feeds.items():
            cache.binding.feed(name, array)
        return cache.binding.run(("hidden",))[0]

    def best(self, hidden: Float) -> int:
        """The head's best token of the last row."""
        return int(self.target.head.argmax(hidden, np.array([len(hidden) - 1]))[0])


class Mtp:
    """One conversation's MTP drafter."""

    name = "mtp"
    taps: tuple[int, ...] = ()

    def __init__(self, networks: MtpNetworks, limit: int, draft_tokens: int | None) -> None:
        self.max_drafts = _max_drafts(draft_tokens)
        self.counts = DraftCounts()
        self._networks = networks
        self._cache = networks.new_cache(limit)
        # Target rows whose entries are in the cache or wait for it, in order.
        self._numbers: list[int] = []
        self._waiting: list[tuple[Float, Float, Ints]] = []
        # The newest observed row, as long as the embedding after it is unknown.
        self._last: MtpRows | None = None
        self._next_row = Row(0)
        self._next_position = Position(0)

    def observe(self, rows: Observed) -> None:
        """Take rows; each one's entry joins its hidden row with the embedding that follows."""
        count = len(rows.embeds)
        numbers = range(rows.first_row, rows.first_row + count)
        new = MtpRows(numbers, rows.hidden.copy(), rows.mrope_positions)
        self._note_hole(rows.first_row, rows.mrope_positions)
        if self._last is not None:
            self._enqueue(self._last, rows.embeds[:1])
        self._enqueue(_part(new, slice(0, count - 1)), rows.embeds[1:])
        self._last = _part(new, slice(count - 1, count))
        self._next_row = Row(rows.first_row + count)
        self._next_position = next_position(rows.mrope_positions)
        if sum(len(embeds) for embeds, _, _ in self._waiting) >= FEED_ROWS:
            self._feed()

    def propose(self, request: Request) -> Proposal:
        """Draft by feeding each draft and the hidden row it came from back into the head."""
        if request.max_drafts < 1 or self._last is None:
            return Proposal([])
        target, networks = self._networks.target, self._networks
        self._enqueue(self._last, target.embed(np.array([request.anchor])))
        self._last = None
        hidden = self._feed()
        committed, drafts = self._cache.num_rows, [networks.best(hidden)]
        positions = advancing_positions(request.position, request.max_drafts)
        while len(drafts) < request.max_drafts:
            place = positions[:, len(drafts) - 1 : len(drafts)]
            embeds = target.embed(np.array(drafts[-1:]))
            hidden = networks.forward(self._cache, embeds, hidden[-1:], place)
            self._cache.commit(1)
            drafts.append(networks.best(hidden))
        # Entries of drafts stand on the head's own rows; the target's take their place.
        self._cache.crop(committed)
        return Proposal(drafts, request.position)

    def crop(self, num_rows: Row, position: Position) -> None:
        """Forget rows from `num_rows` on, and the one before: what follows it may be another."""
        self._feed()
        if self._last is not None and self._last.numbers.start >= num_rows:
            self._last = None
        kept = bisect_left(self._numbers, num_rows - 1)
        if self._numbers[kept:]:
            self._cache.crop(Row(kept))
            self._note_lost(num_rows, position)
            del self._numbers[kept:]
        if num_rows < self._next_row:
            self._next_row, self._next_position = num_rows, position

    def _note_lost(self, num_rows: Row, position: Position) -> None:
        """The entry before the next row is gone, and its hidden row with it."""
        if num_rows and num_rows - 1 in self._numbers and self._last is None:
            self.counts.holes.append(Hole(Position(position - 1), position))

    def _note_hole(self, first_row: Row, positions: Ints) -> None:
        if first_row > self._next_row:
            self._last = None
            start = Position(int(text_ruler(positions)[0]))
            self.counts.holes.append(Hole(self._next_position, start))

    def _enqueue(self, rows: MtpRows, embeds: Float) -> None:
        if len(embeds):
            self._waiting.append((embeds, rows.hidden, rows.positions))
            self._numbers += rows.numbers

    def _feed(self) -> Float:
        """Run waiting entries; their output rows [n, H]."""
        if not self._waiting:
            return np.zeros((0, 0), np.float32)
        embeds, hidden = (np.concatenate(_nth(self._waiting, i)) for i in (0, 1))
        positions = np.concatenate(_nth(self._waiting, 2), axis=1)
        self._waiting.clear()
        output = self._networks.forward(self._cache, embeds, hidden, positions)
        self._cache.commit(len(embeds))
        self.counts.injected_rows += len(embeds)
        self.counts.cache_bytes = self._cache.num_bytes
        return output


def _part(rows: MtpRows, part: slice) -> MtpRows:
    return MtpRows(rows.numbers[part], rows.hidden[part], rows.positions[:, part])


def _nth(items: Sequence[tuple], i: int) -> list:
    return [item[i] for item in items]


def _max_drafts(draft_tokens: int | None) -> int:
    if draft_tokens is None:
        return DEFAULT_DRAFTS
    if not is_whole(draft_tokens) or not 0 <= draft_tokens <= MAX_DRAFTS:
        raise PromptError(
            f"draft_tokens must lie between 0 and {MAX_DRAFTS} for the MTP head, "
            f"not {draft_tokens}."
        )
    return draft_tokens
