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

from dflash_onnx.export import parallel
from dflash_onnx.export.checkpoint import scan
from dflash_onnx.export.data_files import DataJob, write_data
from dflash_onnx.export.parallel import Digest, in_order, some_at_once, workers
from dflash_onnx.export.progress import Progress
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


def test_items_are_taken_when_their_work_begins() -> None:
    """Two at a time, whichever is done first, and the results in order."""
    running, most_running = 0, 0
    lock = threading.Lock()

    def work(item: int) -> int:
        nonlocal running, most_running
        with lock:
            running += 1
            most_running = max(most_running, running)
        time.sleep(0.02 if item % 3 == 0 else 0.001)
        with lock:
            running -= 1
        return item

    def items() -> Iterator[int]:
        for item in range(12):
            assert running < 2, "taken before there was room for it"
            yield item

    with workers(2) as pool:
        assert some_at_once(pool, work, items(), 2, lambda: "b") == (list(range(12)), "b")
    assert most_running == 2


def test_nothing_is_begun_after_an_error() -> None:
    """The second item fails at once and the first one late: the first one's error is raised."""
    begun = []

    def failing(item: int) -> None:
        begun.append(item)
        time.sleep(0.05 if item == 0 else 0)
        raise ValueError(item)

    with workers(2) as pool, pytest.raises(ValueError, match="0"):
        some_at_once(pool, failing, range(9), 2, lambda: None)
    assert begun == [0, 1]


def test_other_work_is_done_meanwhile() -> None:
    """When as many items as may have begun; its error ends them all."""
    begun, going_on = threading.Barrier(3), threading.Event()

    def work(item: int) -> None:
        begun.wait(10)
        going_on.wait(10)
        raise ValueError("of the items")

    def meanwhile() -> None:
        begun.wait(10)
        going_on.set()
        raise ValueError("of the other")

    with workers(2) as pool, pytest.raises(ValueError, match="of the other"):
        some_at_once(pool, work, range(9), 2, meanwhile)


def test_digest_is_that_of_all_bytes_in_order() -> None:
    """Pieces of many sizes, more than may wait."""
    pieces = [np.full(n, n, np.uint8) for n in range(1, 200)]
    digest = Digest()
    for piece in pieces:
        digest.add(piece.data)
    assert digest.hexdigest() == hashlib.sha256(np.concatenate(pieces).tobytes()).hexdigest()
    digest.close()


def stored(folder: Path, form: str, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What a matrix becomes with a number of threads, in blocks of a few rows."""
    monkeypatch.setattr(parallel, "num_workers", lambda: num_threads)
    monkeypatch.setattr("dflash_onnx.export.checkpoint.BLOCK_BYTES", 4 * 72 * 3)
    (info,) = scan(folder / "matrix.safetensors")
    with (
        workers(num_threads) as pool,
        DataWriter(folder, "w.data", form, lambda _: None, pool) as writer,
    ):
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
        with (
            workers(2) as pool,
            DataWriter(tmp_path, "w.data", "int4", lambda _: None, pool) as writer,
        ):
            writer.add("w", sorted(scan(tmp_path / "m.safetensors"), key=str), matrix=True)
    assert threading.active_count() == before


def test_an_interrupt_ends_files_that_are_being_written(tmp_path: Path) -> None:
    """Ctrl-C reaches the thread that waits; what the others still have to write is dropped."""
    save_file({"a": np.ones((4000, 640), np.float32)}, tmp_path / "m.safetensors")
    (info,) = scan(tmp_path / "m.safetensors")
    before = threading.active_count()

    class Interrupting(Progress):
        def begin(self, file: str, num_bytes: int) -> None:
            if file == "c.data":
                raise KeyboardInterrupt

    def fill(writer: DataWriter) -> None:
        for number in range(1 if writer.file == "a.data" else 1000):
            writer.add(f"w{number}", [info])

    jobs = [DataJob(f"{name}.data", "fp32", 0, fill) for name in "abc"]
    with pytest.raises(KeyboardInterrupt):
        write_data(tmp_path, jobs, Interrupting(), lambda: None)
    assert threading.active_count() == before
    assert (tmp_path / "b.data").stat().st_size < 900 * 4 * 4000 * 640


def test_a_file_that_shrinks_during_the_export(tmp_path: Path) -> None:
    """A download that restarts under the exporter is an error with the tensor's name."""
    path = tmp_path / "m.safetensors"
    save_file({"a": np.ones((40, 64), np.float32)}, path)
    (info,) = scan(path)
    path.write_bytes(path.read_bytes()[:-4])
    with (
        workers(2) as pool,
        DataWriter(tmp_path, "w.data", "fp32", lambda _: None, pool) as writer,
        pytest.raises(ExportError, match="a cannot be read: the file ends early"),
    ):
        writer.add("w", [info])
