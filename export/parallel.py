"""Work spread over threads whose results come back in order, and a digest that runs behind.

NumPy, file reads and SHA-256 let other threads run meanwhile. Knows nothing about weights.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Other = TypeVar("Other")

# More gain nothing: one thread writes the file that all of them fill.
MAX_WORKERS = 8
# Pieces that may wait to be hashed before the writer waits too.
MAX_UNHASHED = 4


def num_workers() -> int:
    """Threads that pay on this machine."""
    return min(os.cpu_count() or 1, MAX_WORKERS)


@contextmanager
def workers(count: int) -> Iterator[Executor]:
    """Threads that end with the block; work that none of them has begun is then cancelled."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def some_at_once(
    pool: Executor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    most: int,
    meanwhile: Callable[[], Other],
) -> tuple[list[Result], Other]:
    """Results in the order of `items`, of which each is taken when its work begins.

    `meanwhile` is called here as soon as the first have begun. After an error no other item is
    taken; of several errors the first in order is raised, and that of `meanwhile` at once.
    """
    coming = iter(items)
    begun = [pool.submit(function, item) for item in islice(coming, most)]
    other = meanwhile()
    while _wait_for_room(begun, most) and (item := next(coming, None)) is not None:
        begun.append(pool.submit(function, item))
    return [future.result() for future in begun], other


def _wait_for_room(begun: list[Future[Result]], most: int) -> bool:
    """Wait until fewer than `most` are at work; whether all is well."""
    while len(running := [future for future in begun if not future.done()]) >= most:
        wait(running, return_when=FIRST_COMPLETED)
    return not any(future.done() and future.exception() for future in begun)


def in_order(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Results of `function` in the order of `items`; a few are computed ahead of the caller."""
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            # One more than works at a time, so that no thread waits for the caller.
            if len(waiting) > num_workers() + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


class Digest:
    """The SHA-256 of bytes one after the other, computed in a thread of its own.

    What is added must not change any more.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        # A single thread takes its work in order.
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()

    def add(self, data: memoryview | bytes) -> None:
        """Append bytes of contiguous memory."""
        self._waiting.append(self._pool.submit(self._sha256.update, data))
        if len(self._waiting) > MAX_UNHASHED:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        """The digest of everything that was added."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._sha256.hexdigest()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)
