"""Pages of text lines, drawn with Pillow's own font on a grid of 32-pixel cells."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 32
FONT_SIZE = 22
TOP = 2  # of the text inside its row of cells
Canvas = tuple[int, int]


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


@lru_cache(maxsize=1)
def font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
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
