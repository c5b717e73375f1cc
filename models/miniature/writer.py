"""What the pages and text turns say, drawn from one random stream; knows no pixels but widths."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from .lexicon import (
    ADJECTIVES,
    DAYS,
    ITEMS,
    KNOWN,
    LISTS,
    MONTHS,
    NAMES,
    NOUNS,
    PLACES,
    TIMES,
    VERBS,
)
from .page import CELL, Canvas, Page, width, wrap


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
            lines = self.receipt(max(2, count), limit)
        else:
            styles = (self.sentences, self.receipt, self.series, self.known, self.note)
            style = rng.choices(styles, (32, 18, 16, 18, 16))[0]
            lines = style(count, limit)
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

    def receipt(self, count: int, limit: float) -> list[str]:
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
