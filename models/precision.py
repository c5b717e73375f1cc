"""Number formats of weights: their names, what each part of a bundle is stored in, block sizes.

Knows no files and no graphs; `export.quantise` packs, `models.graphs.matmul` multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOATS = ("fp32", "fp16")
# Weights of 4 or 8 bits with one scale per block of a row; 8-bit weights with 8-bit activations.
BLOCKED = {"int4": 4, "int8": 8}
PRECISIONS = (*FLOATS, *BLOCKED, "w8a8")
# The largest block whose products do not depend on how many rows a call has (ort.md, 4e).
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Precisions:
    """What the decoder, the output head, the drafters and the vision tower are stored in."""

    target: str
    head: str
    draft: str
    vision: str

    @property
    def table(self) -> str:
        """The embedding table's: a float head may be tied to it, rows of others are read only."""
        return self.head if self.head in FLOATS else "fp16"

    def of(self, part: str) -> str:
        """What the data file of a part is stored in; parts of other names are drafters."""
        parts = {
            "embedding": self.table,
            "target": self.target,
            "head": self.head,
            "vision": self.vision,
        }
        return parts.get(part, self.draft)

    def __str__(self) -> str:
        parts = (self.target, self.head, self.draft, self.vision)
        if len(set(parts)) == 1:
            return self.target
        return "{} (head {}, draft {}, vision {})".format(*parts)


def choose(
    target: str, head: str | None = None, draft: str | None = None, vision: str | None = None
) -> Precisions:
    """The precision of every part: what is given, else the target's; images are read in floats.

    The vision tower runs once per image and its errors reach every later token, so it follows the
    target only where that is a float.
    """
    fallback = target if target in FLOATS else "fp16"
    return Precisions(target, head or target, draft or target, vision or fallback)
