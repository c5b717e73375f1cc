"""Rows of a table in its file: what is read, what is kept, and threads that share both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dflash_onnx.models.errors import ManifestError
from dflash_onnx.models.manifest import TableSpec
from dflash_onnx.runtime.table_file import KEPT_ROWS, TableFile

COUNT, WIDTH, OFFSET = 3 * KEPT_ROWS, 4, 64
VALUES = np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "table.data").write_bytes(bytes(OFFSET) + VALUES.tobytes())
    return tmp_path


@pytest.fixture
def table(folder: Path) -> TableFile:
    return TableFile(folder, TableSpec("table.data", OFFSET, "float32", (COUNT, WIDTH)))


def test_rows_are_the_files_however_often_they_are_asked_for(table: TableFile) -> None:
    """More rows than are kept, in one call and in many, near ones and far ones, some twice."""
    rng = np.random.default_rng(0)
    for count in (1, 7, KEPT_ROWS, COUNT, 1, 300, 0):
        numbers = rng.integers(0, COUNT, count)
        np.testing.assert_array_equal(table.rows(numbers), VALUES[numbers])


def test_what_a_caller_does_to_its_rows_changes_no_later_ones(table: TableFile) -> None:
    numbers = np.array([5, 5, 9])
    table.rows(numbers)[:] = -1
    with pytest.raises(ValueError, match="read-only"):
        table.rows(numbers[:1])[:] = -1
    np.testing.assert_array_equal(table.rows(numbers), VALUES[numbers])


def test_rows_used_last_are_kept_and_no_more_than_those(folder: Path, table: TableFile) -> None:
    """With the file gone empty, whatever can still be read was kept."""
    table.rows(np.arange(KEPT_ROWS))
    table.rows(np.array([0, KEPT_ROWS]))
    (folder / "table.data").write_bytes(b"")
    kept = np.array([0, *range(2, KEPT_ROWS + 1)])
    np.testing.assert_array_equal(table.rows(kept), VALUES[kept])
    for number in (1, KEPT_ROWS + 1):
        with pytest.raises(ManifestError):
            table.rows(np.array([number]))


def test_threads_share_what_is_kept(table: TableFile) -> None:
    """Each reads all rows in an order of its own, so that every one is put away and read again."""

    def read(seed: int) -> bool:
        numbers = np.random.default_rng(seed).permutation(COUNT)
        parts = [table.rows(part) for part in np.split(numbers, 32)]
        return np.array_equal(np.concatenate(parts), VALUES[numbers])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_rows_that_are_not_there(folder: Path, table: TableFile) -> None:
    """A number past the table, and a file that became shorter while it was in use."""
    with pytest.raises(IndexError, match=f"row {COUNT} of a table of {COUNT}"):
        table.rows(np.array([COUNT]))
    (folder / "table.data").write_bytes(bytes(OFFSET + 10))
    with pytest.raises(ManifestError, match=r"table\.data cannot be read: it ends before row 7"):
        table.rows(np.array([7]))
