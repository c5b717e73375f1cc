"""Threads change when blocks are read and hashed, never what is written or which error comes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_onnx.export import parallel, store
from dflash_onnx.export.checkpoint import scan
from dflash_onnx.export.parallel import Digest, in_order
from dflash_onnx.export.store import DataWriter
from dflash_onnx.models.errors import ExportError


def test_results_come_in_the_order_of_the_items() -> None:
    """Also when later items are done first, as they are here."""

    def slow_first(item: int) -> int:
        time.sleep(0.02 if item % 4 == 0 else 0)
        return item

    with ThreadPoolExecutor(3) as pool:
        assert list(in_order(pool, slow_first, range(20))) == list(range(20))


def test_only_a_few_items_are_taken_ahead() -> None:
    """A checkpoint larger than memory must not wait in memory for its writer."""
    taken = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(2) as pool:
        results = in_order(pool, lambda item: item, items())
        next(results)
        assert len(taken) <= parallel.num_workers() + 3
        results.close()


def test_the_first_error_in_order_is_raised() -> None:
    """Which of two errors a user reads does not depend on which thread was faster."""

    def failing(item: int) -> int:
        time.sleep(0.05 if item == 3 else 0)
        if item in (3, 5):
            raise ValueError(item)
        return item

    with ThreadPoolExecutor(4) as pool, pytest.raises(ValueError, match="3"):
        list(in_order(pool, failing, range(9)))


def test_digest_is_that_of_all_bytes_in_order() -> None:
    """Pieces of many sizes, more than may wait."""
    pieces = [np.full(n, n, np.uint8) for n in range(1, 200)]
    digest = Digest()
    for piece in pieces:
        digest.add(piece.data)
    assert digest.hexdigest() == hashlib.sha256(np.concatenate(pieces).tobytes()).hexdigest()
    digest.close()


def stored(folder: Path, form: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What a matrix becomes with a number of threads, in blocks of a few rows."""
    monkeypatch.setattr(store, "num_workers", lambda: workers)
    monkeypatch.setattr(parallel, "num_workers", lambda: workers)
    monkeypatch.setattr("dflash_onnx.export.checkpoint.BLOCK_BYTES", 4 * 72 * 3)
    (info,) = scan(folder / "matrix.safetensors")
    with DataWriter(folder, "w.data", form, lambda _: None) as writer:
        writer.add("w", [info], matrix=True)
        digest = writer.summary().sha256
    written = (folder / "w.data").read_bytes()
    assert digest == hashlib.sha256(written).hexdigest()
    return written


@pytest.mark.parametrize("form", ["fp32", "fp16", "int8", "int4", "w8a8"])
def test_bytes_do_not_depend_on_the_number_of_threads(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines must make the same bundle of the same checkpoint."""
    values = np.random.default_rng(0).normal(size=(100, 72)).astype(np.float32)
    save_file({"w": values}, tmp_path / "matrix.safetensors")
    one, many = (stored(tmp_path, form, n, monkeypatch) for n in (1, 7))
    assert one == many


def test_no_thread_outlives_a_failed_file(tmp_path: Path) -> None:
    """The second of two tensors is not finite: its name is in the error, the threads are gone."""
    values = np.ones((40, 64), np.float32)
    save_file({"a": values, "b": values * np.nan}, tmp_path / "m.safetensors")
    before = threading.active_count()
    with pytest.raises(ExportError, match="a value of b is not finite"):  # noqa: SIM117
        with DataWriter(tmp_path, "w.data", "int4", lambda _: None) as writer:
            writer.add("w", sorted(scan(tmp_path / "m.safetensors"), key=str), matrix=True)
    assert threading.active_count() == before


def test_a_file_that_shrinks_during_the_export(tmp_path: Path) -> None:
    """A download that restarts under the exporter is an error with the tensor's name."""
    path = tmp_path / "m.safetensors"
    save_file({"a": np.ones((40, 64), np.float32)}, path)
    (info,) = scan(path)
    path.write_bytes(path.read_bytes()[:-4])
    with (
        DataWriter(tmp_path, "w.data", "fp32", lambda _: None) as writer,
        pytest.raises(ExportError, match="a cannot be read: the file ends early"),
    ):
        writer.add("w", [info])
