"""Synthetic pages and questions for the miniature; needs only NumPy and Pillow.

`sample(seed, index)` gives one held-out example, `sample(seed, index, split="train")` one of the
kind that training sees. The splits never share a random stream, and every sentence, letter and
invoice line whose checksum is 0 modulo 8 is left out of training; held-out pages use only those.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np

from .lexicon import QUESTIONS
from .page import Canvas, Page
from .writer import Writer

CANVASES: tuple[tuple[Canvas, int], ...] = (
    ((1, 4), 3), ((1, 6), 5), ((1, 8), 12), ((2, 6), 5), ((2, 8), 16), ((3, 8), 18), ((4, 8), 15),
    ((5, 8), 8), ((6, 8), 8), ((3, 12), 4), ((4, 12), 3), ((8, 8), 2), ((12, 8), 1),
)  # fmt: skip
PAIR_CANVASES: tuple[Canvas, ...] = ((1, 6), (1, 8), (2, 6), (2, 8), (3, 8))
KINDS = {"read": 46, "json": 10, "pages": 8, "total": 5, "number": 5, "text": 18, "image+text": 8}


@dataclass(frozen=True)
class Sample:
    """One question with its pages and the right answer."""

    kind: str
    pages: tuple[Page, ...]
    prompt: str
    answer: str

    @property
    def images(self) -> tuple[np.ndarray, ...]:
        """The pages as uint8 [height, width, 3]."""
        return tuple(np.repeat(page.gray()[..., None], 3, axis=2) for page in self.pages)

    @property
    def num_lines(self) -> int:
        """Lines of text in all pages together."""
        return sum(len(page.lines) for page in self.pages)


def sample(seed: int, index: int, split: str = "test") -> Sample:
    """Example `index` of the stream `seed`; the same arguments always give the same example."""
    rng = random.Random(f"{split}/{seed}/{index}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    return make(rng, kind, pick_canvases(rng, kind), split)


def pick_canvases(rng: random.Random, kind: str) -> tuple[Canvas, ...]:
    """Image sizes in cells of 32 pixels for a question of this kind."""
    if kind == "text":
        return ()
    if kind == "pages":
        return rng.choice(PAIR_CANVASES), rng.choice(PAIR_CANVASES)
    canvases, weights = zip(*CANVASES, strict=True)
    while True:
        canvas = rng.choices(canvases, weights)[0]
        if kind not in ("total", "number") or (canvas[0] > 1 and canvas[1] > 6):
            return (canvas,)


def make(
    rng: random.Random,
    kind: str,
    canvases: tuple[Canvas, ...],
    split: str = "test",
    lines: int | None = None,
) -> Sample:
    """A random example of the kind on these canvases, with `lines` lines a page if given."""
    writer = Writer(rng, split)
    receipt = kind in ("total", "number")
    pages = tuple(writer.page(canvas, receipt, lines) for canvas in canvases)
    if kind in ("text", "image+text"):
        return Sample(kind, pages, *writer.text_turn())
    return Sample(kind, pages, QUESTIONS[kind], _answer(kind, pages))


def _answer(kind: str, pages: tuple[Page, ...]) -> str:
    texts = ["\n".join(page.lines) for page in pages]
    if kind == "read":
        return texts[0]
    if kind == "json":
        return json.dumps({"lines": list(pages[0].lines)})
    if kind == "pages":
        return "\n".join(f"[{number}] {text}" for number, text in enumerate(texts, 1))
    return pages[0].lines[-1 if kind == "total" else 0].split()[-1]
