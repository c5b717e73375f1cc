"""A tokenizer.json read in a process of its own, while this one imports what an export needs.

The library reads it without letting other threads run. Knows processes; what is read and checked
is `tokenizer_file`'s, and a process that fails changes when that happens, not what comes of it.
"""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..models.errors import ExportError
from .tokenizer_file import TokenizerFacts, read_tokenizer

# A smaller file is read sooner than an interpreter starts.
SMALL = 1 << 20
# What the process imports comes from where it comes from here.
PROGRAM = "import sys; sys.path[:] = {paths!r}; from {module} import answer; answer({path!r})"


@contextmanager
def reading(path: Path) -> Iterator[Callable[[], TokenizerFacts]]:
    """Begin to read a tokenizer; what is given waits for it, and raises as `read_tokenizer`."""
    if not sys.executable or not path.is_file() or path.stat().st_size < SMALL:
        yield partial(read_tokenizer, path)
        return
    program = PROGRAM.format(paths=sys.path, module=__name__, path=str(path))
    # In a session of its own, so that Ctrl-C is this process's to handle, which ends the other.
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            yield partial(_facts, process, path)
        finally:
            process.kill()


def _facts(process: subprocess.Popen[bytes], path: Path) -> TokenizerFacts:
    content, _ = process.communicate()
    if process.returncode:
        return read_tokenizer(path)
    found = pickle.loads(content)
    if isinstance(found, ExportError):
        raise found
    return found


def answer(path: str) -> None:
    """What the process does: write what was read, or the error, to stdout."""
    # It ends before it has garbage, and looking for some takes an eighth of its time.
    gc.disable()
    found: TokenizerFacts | ExportError
    try:
        found = read_tokenizer(Path(path))
    except ExportError as error:
        found = error
    sys.stdout.buffer.write(pickle.dumps(found))
