"""Prompts laid out by hand: runs of random text, pictures and sound of chosen sizes.

Media rows are random numbers, so no vision tower runs; equal parts give equal rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dflash_onnx.models.grid import Grid
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.plan import Media, PlanBuilder, PromptPlan
from dflash_onnx.runtime.target import ImageRows

BundleMaker = Callable[..., Path]


@dataclass(frozen=True)
class Part:
    """A piece of a prompt: `rows` of text or audio, or a picture of `height` x `width` rows."""

    kind: Literal["text", "image", "audio"]
    height: int
    width: int = 1
    seed: int = 0
    ids: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.height * self.width

    @property
    def advance(self) -> int:
        """Positions it takes: an image p + max(h, w), everything else one a row."""
        return max(self.height, self.width) if self.kind == "image" else self.num_rows

    @property
    def is_skipped(self) -> bool:
        """Whether a drafter on the text ruler must not inject its rows."""
        return self.kind == "image" and self.num_rows > 1


def text(num_rows: int, seed: int = 0) -> Part:
    return Part("text", num_rows, 1, seed)


def words(ids: Sequence[int]) -> Part:
    return Part("text", len(ids), ids=tuple(ids))


def image(height: int, width: int, seed: int = 0) -> Part:
    return Part("image", height, width, seed)


def audio(num_rows: int, seed: int = 0) -> Part:
    return Part("audio", num_rows, 1, seed)


def lay_out(model: Model, parts: Sequence[Part]) -> PromptPlan:
    """A plan of random ids and random media rows; equal parts give equal rows."""
    builder, placeholder = PlanBuilder(), model.manifest.target.special.image
    for part in parts:
        rng = np.random.default_rng([part.seed, part.height, part.width])
        if part.kind == "text":
            builder.text(part.ids or rng.integers(20, 480, part.num_rows).tolist())
        elif part.kind == "audio":
            builder.audio(placeholder, _media(model, part, rng))
        else:
            grid = Grid(2 * part.height, 2 * part.width, 2)
            builder.image(placeholder, grid, _media(model, part, rng))
    return builder.plan()


def _media(model: Model, part: Part, rng: np.random.Generator) -> Media:
    shape = (part.num_rows, model.manifest.target.text.hidden_size)
    embeds = rng.normal(size=shape).astype(np.float32) * np.float32(0.2)
    deepstack = np.zeros((model.target.config.num_deepstack, *shape), np.float32)
    return Media(part.kind, repr(part), part.num_rows, lambda: ImageRows(embeds, deepstack))
