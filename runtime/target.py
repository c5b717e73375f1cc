"""The target network: embedding rows, one forward call over a cache, the head, the vision tower.

Shared and immutable; every call gets the cache it works on. Knows no chat and no drafting.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..models.grid import Grid, axial_rotary, position_table_lookup
from ..models.manifest import Manifest
from ..models.positions import Ints
from ..models.rope import RotaryTable
from ..models.text_config import PORTABLE_ROWS
from .recurrent_state import RecurrentState
from .sampling import HeadRows
from .session import Graph, Runtime
from .table_file import TableFile
from .target_cache import TargetCache

Float = NDArray[np.float32]


class TargetRows(NamedTuple):
    """One forward call's output: hidden [n, H] after the final norm, taps {layer: [n, H]}."""

    hidden: Float
    taps: dict[int, Float]


@dataclass(frozen=True)
class ImageRows:
    """An encoded image: embeds [n, H] and DeepStack rows [K, n, H]."""

    embeds: Float
    deepstack: Float

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.embeds.nbytes + self.deepstack.nbytes


# Rows of a prefill call: more are not faster on CPUs, and every one takes memory that stays taken.
PREFILL_ROWS = 128


class Head:
    """An output head with its ban list applied."""

    def __init__(self, graph: Graph, vocab_size: int, banned_ids: Collection[int]) -> None:
        self._graph = graph
        self._bias = np.zeros(vocab_size, np.float32)
        self._bias[list(banned_ids)] = -np.inf

    def argmax(self, hidden: Float, rows: Ints) -> Ints:
        """Best token id [n] of the chosen hidden rows."""
        return self._run(hidden, rows, ("top_ids",))[0][:, 0]

    def rows(self, hidden: Float, rows: Ints, with_logits: bool) -> HeadRows:
        """All that sampling needs of the chosen hidden rows; full logits only when asked."""
        fetch = ("top_values", "top_ids") + (("logits",) if with_logits else ())
        outputs = self._run(hidden, rows, fetch)
        return HeadRows(*outputs, *(() if with_logits else (None,)))

    def _run(self, hidden: Float, rows: Ints, fetch: tuple[str, ...]) -> list[NDArray]:
        return self._graph.run({"hidden": hidden, "rows": rows}, fetch, {"bias": self._bias})


def open_head(manifest: Manifest, runtime: Runtime) -> Head:
    """The target's own head."""
    graph, text = runtime.open(manifest.graphs["head"]), manifest.target.text
    return Head(graph, text.vocab_size, manifest.banned_ids)


class Target:
    """The target of a bundle; `portable` picks the form of recurrent layers that runs anywhere.

    `max_rows` is the most rows that one forward call takes.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        runtime: Runtime,
        head: Head,
        portable: bool = False,
    ) -> None:
        graphs = manifest.graphs
        self.config = manifest.target
        text = self.config.text
        self._portable = portable and text.linear is not None
        self.max_rows = PORTABLE_ROWS if self._portable else text.context_limit
        self._table = TableFile(folder, manifest.embedding)
        self._rotary = RotaryTable(text.rope)
        self._zeros = np.zeros(0, np.float32)
        self.head = head
        self._graph = runtime.open(graphs["target.portable" if self._portable else "target"])
        # Conversations without pictures do not pay for the tower.
        self._vision = runtime.later(graphs["vision"]) if self.config.vision else None

    @property
    def prefill_rows(self) -> int:
        """Rows of a prefill call: enough for its matrices to pay."""
        return min(self.max_rows, PREFILL_ROWS)

    def embed(self, token_ids: Ints) -> Float:
        """Embedding rows [n, H] of token ids, read from their file."""
        return self._table.rows(token_ids)

    def new_cache(self, limit: int) -> TargetCache:
        """An empty cache for at most `limit` rows."""
        text, binding = self.config.text, self._graph.bind()
        state = None
        if text.linear is not None:
            # The matrix products of the portable form leave memory unset when there are no rows.
            state = RecurrentState(binding, text.linear, text.linear_layers, int(self._portable))
        return TargetCache(
            binding, text.attention_layers, text.num_kv_heads, text.head_dim, limit, state
        )

    def rotary(self, mrope_positions: Ints) -> tuple[Float, Float]:
        """Cosines and sines [n, rotary_dim / 2] of M-RoPE positions [3, n]."""
        return self._rotary.rows(mrope_positions)

    def forward(
        self,
        cache: TargetCache,
        embeds: Float,
        mrope_positions: Ints,
        deepstack: Float | None,
        taps: Collection[int],
        certain: bool,
    ) -> TargetRows:
        """Run rows [n, H] at M-RoPE positions [3, n] after the cache's rows; nothing is committed.

        deepstack [K, n, H] is added after the first K layers; None stands for zeros (text).
        `certain` rows will all be committed; of others any number may be. The output lies in
        memory that the cache's next call writes to.
        """
        cache.reserve(embeds.shape[0])
        binding, count = cache.binding, self.config.num_deepstack
        cos, sin = self.rotary(mrope_positions)
        binding.feed("inputs_embeds", embeds[None])
        binding.feed("cos", cos)
        binding.feed("sin", sin)
        binding.feed("past_rows", np.array([cache.num_rows], np.int32))
        for k in range(count):
            if deepstack is None:
                binding.attach(f"deepstack.{k}", self._nothing(embeds.shape))
            else:
                binding.feed(f"deepstack.{k}", deepstack[k])
        kept = cache.state.begin(certain) if cache.state else ()
        outputs = binding.run_in_place(("hidden", *(f"tap.{i}" for i in taps), *kept))
        if cache.state:
            cache.state.finish(outputs[1 + len(taps) :])
        return TargetRows(outputs[0], dict(zip(taps, outputs[1:], strict=False)))

    def _nothing(self, shape: tuple[int, ...]) -> Float:
        """Zeros that no call changes, kept for the shape that comes again and again."""
        zeros = self._zeros
        if zeros.shape != shape:
            # Conversations in other threads may want another shape at the same time.
            zeros = self._zeros = np.zeros(shape, np.float32)
        return zeros

    def encode_patches(self, patches: Float, grid: Grid) -> ImageRows:
        """Run the vision tower on one image's patches [n, C*t*p*p]."""
        vision = self.config.vision
        assert vision is not None and self._vision is not None
        indices, weights = position_table_lookup(grid, vision.table_side)
        cos, sin = axial_rotary(grid, vision.head_dim, vision.rope_theta)
        feeds: dict[str, NDArray] = {
            "patches": patches,
            "table_indices": indices,
            "table_weights": weights,
            "cos": cos,
            "sin": sin,
        }
        names = tuple(f"deepstack.{k}" for k in range(self.config.num_deepstack))
        embeds, *deepstack = self._vision.run(feeds, ("image_embeds", *names))
        return ImageRows(embeds, np.stack(deepstack) if deepstack else np.zeros((0, *embeds.shape)))
