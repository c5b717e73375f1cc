"""Moves large private memory onto huge pages, where Linux offers that to who asks.

A step reads every packed weight once; at 4 bits a fifth of its time went into looking up small
pages. NumPy asks for its own large arrays; here it is done for what a library has allocated. Where
the kernel cannot, nothing changes. Knows no weights and no sessions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Range = tuple[int, int]

PAGE = 2 << 20
# Of <asm-generic/mman-common.h>, since Linux 6.1; the older advice works at the first touch only.
MADV_COLLAPSE = 25
MAPS = Path("/proc/self/maps")


def mapped_memory() -> list[Range]:
    """Address ranges [start, stop) that are writable and come from no file, without the heap."""
    return _private(lambda name: not name)


def heap() -> list[Range]:
    """The range that small allocations come from, and large ones after a large one was freed."""
    return _private(lambda name: name == "[heap]")


def move(ranges: Iterable[Range]) -> int:
    """Ask for huge pages behind `ranges`, keeping what they hold; returns bytes that got them."""
    if sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for start, stop in ranges:
        first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        # One by one: a page that cannot be moved must not keep those after it.
        for address in range(first, last, PAGE):
            moved += PAGE * (madvise(address, PAGE, MADV_COLLAPSE) == 0)
    return moved


def without(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """The parts of `ranges` that lie in none of `others`."""
    left = list(ranges)
    for low, high in others:
        cut = [
            part
            for start, stop in left
            for part in ((start, min(stop, low)), (max(start, high), stop))
        ]
        left = [(start, stop) for start, stop in cut if start < stop]
    return left


def _private(wanted: Callable[[str], bool]) -> list[Range]:
    if sys.platform != "linux" or not MAPS.is_file():
        return []
    fields = (line.split(maxsplit=5) for line in MAPS.read_text().splitlines())
    return [_range(f[0]) for f in fields if f[1] == "rw-p" and wanted("".join(f[5:]))]


def _range(field: str) -> Range:
    start, stop = field.split("-")
    return int(start, 16), int(stop, 16)
