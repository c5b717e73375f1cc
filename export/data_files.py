"""The data files of a bundle, two written at a time: one alone keeps no two processors busy.

Knows files and threads; what goes into a file is its job's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..models.manifest import DataFile
from ..models.stored import StoredTensor
from .parallel import num_workers, some_at_once, workers
from .progress import Progress
from .store import DataWriter, ToHalf, to_half

Other = TypeVar("Other")

# A file is written by one thread; that of a float copy waits for the system most of its time.
FILES_AT_ONCE = 2


class DataJob(NamedTuple):
    """A file to write, of about `num_bytes`; `fill` gives the writer everything."""

    file: str
    precision: str
    num_bytes: int
    fill: Callable[[DataWriter], None]


class Written(NamedTuple):
    """What is in a file that was written."""

    tensors: dict[str, StoredTensor]
    summary: DataFile


def write_data(
    folder: Path,
    jobs: Sequence[DataJob],
    bar: Progress,
    meanwhile: Callable[[], Other],
    to_half: ToHalf = to_half,
) -> tuple[dict[str, Written], Other]:
    """Write files into a folder; what is in each, in the order of the jobs.

    `meanwhile` is called once the first are being written; with its error they end.
    """

    def begun() -> Iterator[DataJob]:
        for job in jobs:
            bar.begin(job.file, job.num_bytes)
            yield job

    # The blocks' threads end first, and with them whatever file was being written.
    with workers(FILES_AT_ONCE) as files, workers(num_workers()) as pool:

        def write(job: DataJob) -> Written:
            with DataWriter(folder, job.file, job.precision, bar.add, pool, to_half) as writer:
                job.fill(writer)
                return Written(writer.tensors, writer.summary())

        written, other = some_at_once(files, write, begun(), FILES_AT_ONCE, meanwhile)
    return dict(zip((job.file for job in jobs), written, strict=True)), other
