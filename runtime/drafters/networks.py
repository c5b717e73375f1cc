"""The DFlash drafter's networks of a bundle: features to K/V rows, and a block to token ids.

Shared and immutable. Knows graphs, rope and heads; knows no cache, no holes and no policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from ...models.draft_config import DraftLayer
from ...models.manifest import DraftSpec, Manifest
from ...models.positions import Ints, visible_block, visible_context
from ...models.rope import RotaryTable
from ..binding import Binding
from ..bundle_files import map_table
from ..session import Graph, Runtime
from ..target import Head, Target
from .base import BlockRows, Drafted, DraftSampling
from .choosers import BestToken, Chooser, SelectorWalk
from .draft_cache import DraftCache
from .rows import Float, GraphWriter, HostWriter, RowWriter

# Finite, so that half-precision providers can add it; far below any normalised score.
MASKED = np.float32(-1e4)


class DraftNetworks(Protocol):
    """What a DFlash drafter computes with; tests put an oracle here."""

    taps: tuple[int, ...]
    block_size: int
    layers: tuple[DraftLayer, ...]
    kinds: tuple[DraftLayer, ...]

    def new_cache(self, kind: DraftLayer) -> DraftCache:
        """An empty cache for the layers of one mask kind."""

    def inject(self, features: list[Float], positions: Ints) -> tuple[list[Float], list[Float]]:
        """Keys and values [1, kv heads, n, d] per layer of feature rows, one [n, H] per tap."""

    def draft(
        self,
        anchor: int,
        positions: Ints,
        caches: list[DraftCache],
        sampling: DraftSampling | None,
    ) -> Drafted:
        """Ids [B-1] drafted by a block of B rows at `positions`, the anchor first."""

    def zero_features(self, num_rows: int) -> list[Float]:
        """Feature rows of zeros, which give K = V = 0."""


class DFlashNetworks:
    """The graphs of one drafter, with the target's embedding and (unless reduced) its head."""

    def __init__(
        self,
        name: str,
        folder: Path,
        manifest: Manifest,
        runtime: Runtime,
        target: Target,
        append_by_graph: bool = False,
    ) -> None:
        spec, graphs = manifest.drafts[name], manifest.graphs
        self.spec: DraftSpec = spec
        self.taps = spec.target_layer_ids
        self.block_size = spec.block_size
        self.layers = spec.layers
        self.kinds = spec.mask_kinds
        self._rotary = RotaryTable(spec.rope)
        self._by_kind = [
            [n for n, layer in enumerate(self.layers) if layer == kind] for kind in self.kinds
        ]
        # One for each drafter at work, as long as its caches live.
        self._bindings: WeakKeyDictionary[DraftCache, Binding] = WeakKeyDictionary()
        self._target = target
        self._mask_rows = self._scaled(np.full(spec.block_size - 1, spec.mask_token_id))
        parts = ("inject", "block", "head", *["append"] * append_by_graph)
        self._graphs = {
            part: runtime.later(graphs[f"{name}.{part}"])
            for part in parts
            if f"{name}.{part}" in graphs
        }
        self._inject, self._block = self._graphs["inject"], self._graphs["block"]
        append = self._graphs.get("append")
        self._writer: RowWriter = HostWriter() if append is None else GraphWriter(append)
        self.chooser = _chooser(spec, folder, manifest.banned_ids, self._graphs, target)

    def open(self) -> None:
        """Open every graph, so that one that is wrong is found before an answer begins."""
        for graph in self._graphs.values():
            graph.open()
        self.chooser.open()

    def new_cache(self, kind: DraftLayer) -> DraftCache:
        """An empty cache for the layers of one mask kind."""
        count = self.layers.count(kind)
        spec = self.spec
        return DraftCache(count, spec.num_kv_heads, spec.head_dim, kind.window, self._writer)

    def inject(self, features: list[Float], positions: Ints) -> tuple[list[Float], list[Float]]:
        """Keys and values [1, kv heads, n, d] per layer of feature rows, one [n, H] per tap."""
        cos, sin = self._rotary.rows(positions)
        feeds = {f"tap.{i}": f for i, f in zip(self.taps, features, strict=True)}
        outputs = self._inject.run({**feeds, "cos": cos, "sin": sin})
        return outputs[0::2], outputs[1::2]

    def draft(
        self,
        anchor: int,
        positions: Ints,
        caches: list[DraftCache],
        sampling: DraftSampling | None,
    ) -> Drafted:
        """Ids [B-1] drafted by a block of B rows at `positions`, the anchor first."""
        rows = self.block(anchor, positions, caches).drafted
        return self.chooser.choose(rows, anchor, sampling)

    def block(self, anchor: int, positions: Ints, caches: list[DraftCache]) -> BlockRows:
        """What a block of B rows computes, the anchor's row included."""
        binding = self._bindings.get(caches[0])
        if binding is None:
            binding = self._bindings[caches[0]] = self._block.bind()
        cos, sin = self._rotary.rows(positions)
        binding.feed("embeds", self._embeds(anchor, positions.size))
        binding.feed("cos", cos)
        binding.feed("sin", sin)
        for i, (kind, cache) in enumerate(zip(self.kinds, caches, strict=True)):
            binding.feed(f"mask.{i}", _mask(kind, cache, positions))
            for layer, key, value in zip(self._by_kind[i], cache.keys, cache.values, strict=True):
                binding.attach(f"past_key_values.{layer}.key", key)
                binding.attach(f"past_key_values.{layer}.value", value)
        hidden, *projected = binding.run(self._block.outputs)
        return BlockRows(hidden, projected[0] if projected else None)

    def zero_features(self, num_rows: int) -> list[Float]:
        """Feature rows of zeros, which give K = V = 0."""
        width = self._target.config.text.hidden_size
        return [np.zeros((num_rows, width), np.float32) for _ in self.taps]

    def _embeds(self, anchor: int, num_rows: int) -> Float:
        return np.concatenate((self._scaled(np.array([anchor])), self._mask_rows[: num_rows - 1]))

    def _scaled(self, token_ids: Ints) -> Float:
        return self._target.embed(token_ids) * np.float32(self.spec.input_embedding_scale)


def _chooser(
    spec: DraftSpec,
    folder: Path,
    banned_ids: Sequence[int],
    graphs: Mapping[str, Graph],
    target: Target,
) -> Chooser:
    if spec.selector is not None:
        predecessor = map_table(folder, spec.selector.predecessor)
        successor = map_table(folder, spec.selector.successor)
        return SelectorWalk(spec.selector, target.head, predecessor, successor)
    if spec.d2t is None:
        return BestToken(target.head, None)
    target_ids = map_table(folder, spec.d2t)
    banned = np.flatnonzero(np.isin(target_ids, banned_ids)).tolist()
    return BestToken(Head(graphs["head"], target_ids.size, banned), target_ids)


def _mask(kind: DraftLayer, cache: DraftCache, positions: Ints) -> Float:
    """Additive mask [B, slots + B] of one kind: cached rows, then the block itself."""
    slots = cache.positions.size
    mask = np.empty((positions.size, slots + positions.size), np.float32)
    seen = visible_context(positions, cache.positions, kind.window, cache.valid)
    np.multiply(~seen, MASKED, out=mask[:, :slots])
    mask[:, slots:] = _block_mask(kind, positions.size)
    return mask


@lru_cache(maxsize=64)
def _block_mask(kind: DraftLayer, num_rows: int) -> Float:
    mask = ~visible_block(num_rows, kind.window, kind.causal) * MASKED
    mask.setflags(write=False)
    return mask
