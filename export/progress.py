"""What a long export says on stderr.

A bar on a terminal, one line per file in a log, nothing for a caller that did not ask.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Progress:
    """Told which file is begun and how many bytes have been written; says nothing itself.

    Bytes are added by several threads.
    """

    def begin(self, file: str, num_bytes: int) -> None:
        """A data file of about `num_bytes` comes next."""

    def add(self, num_bytes: int) -> None:
        """That many more bytes are written."""


class Lines(Progress):
    """Plain lines, which a log keeps."""

    def begin(self, file: str, num_bytes: int) -> None:
        """Print the file's name and size before the work, so that a log shows where it is."""
        print(f"writing {file} ... {num_bytes / 1e6:.1f} MB", file=sys.stderr, flush=True)


class Bar(Progress):
    """A bar over all files."""

    def __init__(self, bar: tqdm) -> None:
        self._bar = bar
        self._moving = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Move the bar."""
        with self._moving:
            self._bar.update(num_bytes)


@contextmanager
def progress(wanted: bool, total_bytes: int) -> Iterator[Progress]:
    """The progress that fits stderr, for an export of about `total_bytes`."""
    if not wanted:
        yield Progress()
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="weights") as bar:
            yield Bar(bar)
