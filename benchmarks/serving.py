"""The child side of a benchmark: one engine in a process of its own, measured per request.

A child reads one JSON request a line (the fields of `Request`) and answers with one line of
figures. Runs in the peer's environment, so it knows the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Protocol, TextIO

MIB = 1024  # kibibytes, the unit of /proc/self/status


class Engine(Protocol):
    """What a peer has to offer."""

    def generate(
        self, request: Request, on_token: Callable[[int], object]
    ) -> dict[str, Any] | None:
        """Answer greedily from an empty cache; call `on_token` as soon as each token is known.

        Whatever is returned joins the figures.
        """


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens to add at most.

    With `ids`, the prompt is exactly these, `text` is what they come from, and no stop token ends
    the answer. Without, `text` is a chat turn behind `images` (files that `numpy.load` reads), and
    `draft` names the drafter; `draft_tokens` are its drafts a round, or "auto".
    """

    text: str
    new_tokens: int
    ids: list[int] | None = None
    images: tuple[str, ...] = ()
    draft: str = "none"
    draft_tokens: int | str | None = None


class Stopwatch:
    """Wall and CPU seconds of a run, noted when each token arrives."""

    def __init__(self) -> None:
        self._marks = [(perf_counter(), process_time())]
        self.token_ids: list[int] = []

    def token(self, token_id: int) -> None:
        """Note a token."""
        self._marks.append((perf_counter(), process_time()))
        self.token_ids.append(int(token_id))

    def figures(self) -> dict[str, Any]:
        """Seconds to the first token, from the first to the last, and of the median step."""
        start, first, last = self._marks[0], self._marks[1], self._marks[-1]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self._marks[1:])]
        return {
            "step_seconds": median(wall for wall, _ in steps),
            "step_cpu_seconds": median(cpu for _, cpu in steps),
            "prefill_seconds": first[0] - start[0],
            "prefill_cpu_seconds": first[1] - start[1],
            "decode_seconds": last[0] - first[0],
            "decode_cpu_seconds": last[1] - first[1],
            "token_ids": self.token_ids,
        }


def memory() -> dict[str, float]:
    """Resident memory of this process in MiB: now, at its peak, and the part that is no file."""
    names = {"VmRSS": "rss_mib", "VmHWM": "peak_rss_mib", "RssAnon": "anonymous_mib"}
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {name: int(fields[field].split()[0]) / MIB for field, name in names.items()}


def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed ones among `packages`."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def serve(make_engine: Callable[[], Engine], packages: tuple[str, ...]) -> None:
    """Load the engine, say so, then answer requests until stdin ends."""
    replies = _private_stdout()
    started = perf_counter()
    engine = make_engine()
    loaded = {"load_seconds": perf_counter() - started, "versions": versions(*packages)}
    _reply(replies, loaded | memory())
    for line in sys.stdin:
        watch = Stopwatch()
        found = engine.generate(Request(**json.loads(line)), watch.token) or {}
        _reply(replies, watch.figures() | memory() | found)


def _private_stdout() -> TextIO:
    """Keep stdout for replies; whatever a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _reply(stream: TextIO, figures: dict[str, Any]) -> None:
    print(json.dumps(figures), file=stream, flush=True)


def serve_or(
    main: Callable[[], None], engine: Callable[[Path, int], Engine], packages: tuple[str, ...]
) -> None:
    """Be the child when started as `SCRIPT --serve MODEL --threads N`, else run `main`."""
    if sys.argv[1:2] != ["--serve"]:
        return main()
    model, threads = Path(sys.argv[2]), int(sys.argv[4])
    serve(lambda: engine(model, threads), packages)
