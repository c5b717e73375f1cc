"""Synthetic pages and questions for the miniature; needs only NumPy and Pillow.

`sample(seed, index)` gives one held-out example, `sample(seed, index, split="train")` one of the
kind that training sees. The splits never share a random stream, and every sentence, letter and
invoice line whose checksum is 0 modulo 8 is left out of training; held-out pages use only those.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from lexicon import (
    ADJECTIVES,
    DAYS,
    ITEMS,
    KNOWN,
    LISTS,
    MONTHS,
    NAMES,
    NOUNS,
    PLACES,
    QUESTIONS,
    TIMES,
    VERBS,
)
from PIL import Image, ImageDraw, ImageFont

CELL = 32
FONT_SIZE = 22
TOP = 2  # of the text inside its row of cells
Canvas = tuple[int, int]
CANVASES: tuple[tuple[Canvas, int], ...] = (
    ((1, 4), 3), ((1, 6), 5), ((1, 8), 12), ((2, 6), 5), ((2, 8), 16), ((3, 8), 18), ((4, 8), 15),
    ((5, 8), 8), ((6, 8), 8), ((3, 12), 4), ((4, 12), 3), ((8, 8), 2), ((12, 8), 1),
)  # fmt: skip
PAIR_CANVASES: tuple[Canvas, ...] = ((1, 6), (1, 8), (2, 6), (2, 8), (3, 8))
KINDS = {"read": 46, "json": 10, "pages": 8, "total": 5, "number": 5, "text": 18, "image+text": 8}


@dataclass(frozen=True)
class Page:
    """Lines of black text on white; line i lies in the cell row `row` + i and starts at `left`."""

    canvas: Canvas
    lines: tuple[str, ...]
    row: int
    left: int

    def gray(self) -> np.ndarray:
        """The page as uint8 [height, width]."""
        rows, columns = self.canvas
        image = Image.new("L", (columns * CELL, rows * CELL), 255)
        draw = ImageDraw.Draw(image)
        for index, line in enumerate(self.lines):
            position = (self.left, (self.row + index) * CELL + TOP)
            draw.text(position, line, font=font(), fill=0)
        return np.asarray(image)


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


@lru_cache(maxsize=1)
def font() -> ImageFont.FreeTypeFont:
    """Aileron, which Pillow carries."""
    return ImageFont.load_default(FONT_SIZE)


@lru_cache(maxsize=100_000)
def width(text: str) -> float:
    """Pixels that the text takes."""
    return font().getlength(text)


def wrap(text: str, limit: float) -> list[str]:
    """Lines of whole words no wider than `limit` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer) > limit:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


class Writer:
    """Draws page contents and text turns from one random stream."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.held_out = split == "test"

    def page(self, canvas: Canvas, receipt: bool = False, count: int | None = None) -> Page:
        """A page of 1 to 6 lines that fit the canvas."""
        rng, limit = self.rng, canvas[1] * CELL - 12
        most = min(canvas[0], 6)
        count = count or rng.choice([rng.randint(1, most), most])
        if receipt:
            lines = self.receipt(max(2, count))
        else:
            styles = (self.sentences, self.receipt, self.series, self.known, self.note)
            style = rng.choices(styles, (32, 18, 16, 18, 16))[0]
            lines = style(count) if style == self.receipt else style(count, limit)
        if any(width(line) > limit for line in lines):
            lines = self.sentences(count, limit)
        return Page(canvas, tuple(lines), rng.randint(0, canvas[0] - len(lines)), rng.randint(2, 6))

    def fresh(self, draw: Callable[[], str]) -> str:
        """A line of this split: checksums 0 modulo 8 are kept from training."""
        while True:
            line = draw()
            if (zlib.crc32(line.encode()) % 8 == 0) == self.held_out:
                return line

    def sentences(self, count: int, limit: float) -> list[str]:
        """Unrelated short sentences, one a line."""
        return [self.fitting(self.sentence, limit) for _ in range(count)]

    def fitting(self, draw: Callable[[float], str], limit: float) -> str:
        """A drawn line of this split that fits."""
        while True:
            line = self.fresh(lambda: draw(limit))
            if width(line) <= limit:
                return line

    def sentence(self, limit: float) -> str:
        """One sentence about as long as the line."""
        pick = self.rng.choice
        if limit < 150:
            return f"{pick(ADJECTIVES)} {pick(NOUNS)}"
        if limit < 200:
            return f"{pick(NAMES)} {pick(VERBS)} {pick(('it', 'one', 'tea', 'rice'))}"
        name, verb, adjective, noun = pick(NAMES), pick(VERBS), pick(ADJECTIVES), pick(NOUNS)
        choices = [
            f"{name} {verb} the {noun}.",
            f"The {adjective} {noun} is {pick(ADJECTIVES)}.",
            f"{name} is {pick(PLACES)}.",
            f"{name} {verb} {pick(LISTS['numbers'][1:])} {noun}s.",
        ]
        if limit > 300:
            choices += [
                f"{name} {verb} the {adjective} {noun} {pick(TIMES)}.",
                f"The {noun} is {pick(PLACES)} {pick(TIMES)}.",
            ]
        return pick(choices)

    def receipt(self, count: int) -> list[str]:
        """An invoice number, items and the total, as many lines as asked."""
        rng = self.rng
        head = self.fresh(lambda: f"Invoice {rng.randint(1000, 9999)}")
        items, total = [], 0
        for name in rng.sample(list(ITEMS), max(1, count - 2)):
            quantity = rng.randint(1, 9)
            total += quantity * ITEMS[name]
            items.append(f"{quantity} {name} {euros(quantity * ITEMS[name])}")
        if count == 1:
            return [rng.choice([head, items[0], f"Total {euros(total)}"])]
        return [head, *items[: count - 2], f"Total {euros(total)}"]

    def series(self, count: int, limit: float) -> list[str]:
        """Consecutive entries of a list, or numbered ones, or dates in a row."""
        rng = self.rng
        style = rng.randrange(3)
        names = rng.choice(list(LISTS.values()))
        start = rng.randrange(len(names))
        if style == 0:
            return [names[(start + i) % len(names)] for i in range(count)]
        if style == 1:
            return [f"{i + 1}. {names[(start + i) % len(names)]}" for i in range(count)]
        day, month, weekday = rng.randint(1, 22), rng.choice(MONTHS), rng.randrange(7)
        lines = [f"{DAYS[(weekday + i) % 7]}, {day + i} {month}" for i in range(count)]
        short = [f"{day + i} {month}" for i in range(count)]
        return lines if max(map(width, lines)) <= limit else short

    def known(self, count: int, limit: float) -> list[str]:
        """The first lines of a well-known text, wrapped; some of it when the page is small."""
        lines = wrap(self.rng.choice(list(KNOWN.values())), limit)
        start = self.rng.randint(0, max(0, len(lines) - count))
        return lines[start : start + count]

    def note(self, count: int, limit: float) -> list[str]:
        """A letter from one person to another, or the part of it that fits."""
        rng = self.rng
        first, second = rng.sample(NAMES, 2)
        day, hour = rng.choice(DAYS), rng.randint(1, 12)
        lines = [
            f"Dear {first},",
            f"the {rng.choice(('train', 'boat', 'market'))} {rng.choice(('leaves', 'opens'))}",
            f"on {day} at {hour}:{rng.choice(('00', '15', '30', '45'))}.",
            "See you soon,",
            "best wishes,",
            second,
        ]
        start = rng.randint(0, len(lines) - count)
        return lines[start : start + count]

    def text_turn(self) -> tuple[str, str]:
        """A question that needs no image, and its answer."""
        rng = self.rng
        kind = rng.choices(("count", "list", "recite", "table", "repeat"), (4, 3, 3, 3, 1))[0]
        if kind == "count":
            first = rng.randint(0, 80)
            last = first + rng.randint(4, 14)
            numbers = ", ".join(str(number) for number in range(first, last + 1))
            return f"Count from {first} to {last}.", numbers
        if kind == "list":
            name = rng.choice(list(LISTS))
            return f"List the {name}.", ", ".join(LISTS[name])
        if kind == "recite":
            name = rng.choice(list(KNOWN))
            return f"Recite {name}.", KNOWN[name]
        if kind == "table":
            n, m = rng.randint(2, 9), rng.randint(3, 8)
            rows = "\n".join(f"{n} x {i} = {n * i}" for i in range(1, m + 1))
            return f"Table of {n} up to {m}.", rows
        line = self.fitting(self.sentence, 244)
        return f"Repeat: {line}", line


def euros(halves: int) -> str:
    """An amount given in half euros."""
    return f"{halves // 2}.{'50' if halves % 2 else '00'}"
