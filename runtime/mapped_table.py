"""Rows of a table that stays in its file: the embedding table is larger than most layers.

A prompt touches pages all over the file; they are given back, or the table would be resident
as a whole after a few prompts. Knows no tokens.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..models.bundle_path import bundle_file
from ..models.errors import ManifestError
from ..models.manifest import TableSpec

# After this many rows their pages are given back; a page holds neighbours that nobody asked for.
KEPT_ROWS = 16


class MappedTable:
    """A table [V, H] of a bundle, read row by row."""

    def __init__(self, folder: Path, table: TableSpec) -> None:
        path = bundle_file(folder, table.file)
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ManifestError(
                f"{path} cannot be read: {error}. Export the bundle again."
            ) from error
        count = int(np.prod(table.shape))
        values = np.frombuffer(self._map, np.dtype(table.dtype), count, table.offset)
        self._rows = values.reshape(table.shape)
        self._touched = 0

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows [n, H] in fp32."""
        rows = self._rows[numbers].astype(np.float32)
        self._touched += numbers.size
        if self._touched > KEPT_ROWS and sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTNEED)
            self._touched = 0
        return rows
