"""Feeds rows to a hybrid target one call at a time, and looks at the state that they leave.

Knows the calls that the loop makes; knows no prompts, no drafters and no reference code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_onnx.models.positions import Position, advancing_positions
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.target_cache import TargetCache

HYBRID: dict[str, Any] = {"architecture": "Qwen3_5ForConditionalGeneration"}
Float = NDArray[np.float32]


class Feeder:
    """A target and a cache of its own; text rows only."""

    def __init__(self, model: Model) -> None:
        self.target = model.target
        self.cache = model.target.new_cache(model.context_limit)

    def call(self, ids: Sequence[int], certain: bool, kept: int | None = None) -> Float:
        """Hidden rows of `ids`, of which the first `kept` are committed; all without a number."""
        first = Position(self.cache.num_rows)
        positions, embeds = advancing_positions(first, len(ids)), self.target.embed(np.array(ids))
        rows = self.target.forward(self.cache, embeds, positions, None, (), certain)
        self.cache.commit(len(ids) if kept is None else kept)
        return rows.hidden.copy()

    def one_by_one(self, ids: Sequence[int]) -> Float:
        """Hidden rows of plain steps."""
        return np.concatenate([self.call([token], True) for token in ids])


def states(cache: TargetCache) -> list[Float]:
    """Copies of the state of every layer; rows that wait to be replayed are not in it yet."""
    assert cache.state is not None
    return [array.copy() for array in cache.state._states]


def windows(cache: TargetCache) -> list[Float]:
    """Copies of the convolution window of every layer."""
    assert cache.state is not None
    return [array.copy() for array in cache.state._windows]


def same_bits(first: Sequence[Float], second: Sequence[Float]) -> bool:
    """Equality that tells 0.0 from -0.0, array by array."""
    pairs = list(zip(first, second, strict=True))
    return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def difference(first: Sequence[Float], second: Sequence[Float]) -> float:
    """Largest absolute difference, array by array."""
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


def relative(first: Sequence[Float], second: Sequence[Float]) -> float:
    """Largest difference of an array as a part of its largest value."""
    return max(
        difference([a], [b]) / float(np.abs(b).max()) for a, b in zip(first, second, strict=True)
    )
