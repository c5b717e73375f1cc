"""Rows of a table that stays in its file: the embedding table is larger than most layers.

Rows are read one by one: a mapped table would become resident page by page, and a fault costs more
than a small read. Those read lately are kept, for most tokens come again soon. Knows no tokens.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..models.bundle_path import bundle_file
from ..models.errors import ManifestError
from ..models.manifest import TableSpec

KEPT_ROWS = 1024


class TableFile:
    """A table [V, H] of a bundle, read row by row; `ManifestError` when its file cannot be."""

    def __init__(self, folder: Path, table: TableSpec) -> None:
        self._path = bundle_file(folder, table.file)
        self._count, self._width = table.shape
        self._dtype = np.dtype(table.dtype)
        self._offset = table.offset
        # What no numbers at all give.
        self._none = np.zeros((0, self._width), np.float32)
        # Each [1, H], the newest last.
        self._kept: dict[int, NDArray[np.float32]] = {}
        # Conversations in several threads change what is kept, and the place in the file.
        self._lock = threading.Lock()
        try:
            self._file = self._path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(str(error)) from error
        weakref.finalize(self, self._file.close)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows [n, H] in fp32, not to be changed; IndexError for a number past the table."""
        with self._lock:
            rows = [self._row(number) for number in numbers.tolist()]
        # One alone is handed out as it is kept.
        return rows[0] if len(rows) == 1 else np.concatenate([self._none, *rows])

    def _row(self, number: int) -> NDArray[np.float32]:
        row = self._kept.pop(number, None)
        if row is None:
            row = self._read(number)
        self._kept[number] = row
        if len(self._kept) > KEPT_ROWS:
            del self._kept[next(iter(self._kept))]
        return row

    def _read(self, number: int) -> NDArray[np.float32]:
        if not 0 <= number < self._count:
            raise IndexError(f"row {number} of a table of {self._count}")
        row = np.empty(self._width, self._dtype)
        try:
            self._file.seek(self._offset + number * row.nbytes)
            count = self._file.readinto(row.data)
        except OSError as error:
            raise self._unreadable(str(error)) from error
        if count != row.nbytes:
            raise self._unreadable(f"it ends before row {number}")
        kept = row.astype(np.float32)[None]
        kept.setflags(write=False)
        return kept

    def _unreadable(self, why: str) -> ManifestError:
        return ManifestError(f"{self._path} cannot be read: {why}. Export the bundle again.")
