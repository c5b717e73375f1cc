"""A runtime for a look at every graph: weights stay in mapped files, sessions close after use.

A bundle larger than memory still runs, slowly and in other kernels than text is generated with;
small quantised graphs run as text is generated. Knows ONNX Runtime and which weights are large.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ..models.manifest import GraphSpec, Manifest
from ..models.precision import BLOCKED
from .session import Graph, HeldBindings, Runtime

# The largest data file that may be held in memory a second time.
PACKED_BYTES = 256 << 20
# Opening takes longer than running, most of all a large graph's.
NUM_OPENERS = 2


class MappedRuntime(Runtime):
    """Opens graphs of one bundle folder in threads; `close` lets go of those that have run.

    Weights of the `packed` graphs are packed as usual.
    """

    # Folding would turn half-precision weights into float32 copies at load.
    disabled_optimizers = ("ConstantFolding",)

    def __init__(self, folder: Path, packed: Collection[str] = ()) -> None:
        super().__init__(folder, "cpu")
        self._packed = frozenset(packed)
        self._by_file: dict[str, MappedGraph] = {}
        self._openers = ThreadPoolExecutor(NUM_OPENERS)

    def __enter__(self) -> MappedRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self._openers.shutdown(cancel_futures=True)

    def open(self, spec: GraphSpec) -> Graph:
        """As `later`: nobody waits before the first run."""
        return self.later(spec)

    def later(self, spec: GraphSpec) -> Graph:
        """Begin to open a graph, once for all who ask; its first run raises what went wrong."""
        if spec.file not in self._by_file:
            open_session = partial(self._session, spec)
            coming = self._openers.submit(open_session)
            self._by_file[spec.file] = MappedGraph(self._ort, open_session, coming, spec)
        return self._by_file[spec.file]

    def close(self) -> None:
        """Close sessions that have run; a graph that runs again opens another."""
        for graph in self._by_file.values():
            graph.close()

    def _options(self, graph: str) -> Any:
        options = super()._options(graph)
        # Planning which tensor may take another's place costs more than it saves in one run.
        options.enable_mem_reuse = False
        if graph not in self._packed:
            options.add_session_config_entry("session.disable_prepacking", "1")
        return options


class MappedGraph(Graph):
    """A graph whose session comes from a thread, and again when it is needed after `close`."""

    def __init__(
        self, ort: Any, open_session: Callable[[], Any], coming: Future[Any], spec: GraphSpec
    ) -> None:
        super().__init__(ort, self._coming_session, spec)
        self._open_session = open_session
        self._coming: Future[Any] | None = coming

    def close(self) -> None:
        """Let the session and the files it has mapped go, unless a binding still lives."""
        self._session, self._threads = None, HeldBindings()

    def _coming_session(self) -> Any:
        coming, self._coming = self._coming, None
        return coming.result() if coming else self._open_session()


def packed_graphs(manifest: Manifest) -> list[str]:
    """Graphs whose weights are packed as for many runs: where they are quantised and few.

    What is only mapped is unpacked at every product, which takes longer; a head is unpacked as a
    whole, which takes more memory too, whatever its size. The two forms of a hybrid target are
    compared in floats: 8-bit activations make levels of their last bits.
    """
    sizes, hybrid = manifest.data_files, manifest.target.text.linear is not None
    found = []
    for graph in manifest.graphs:
        part = graph.rpartition(".")[0] or graph
        few = part == "head" or sizes[f"{part}.data"].num_bytes <= PACKED_BYTES
        in_floats = hybrid and part == "target"
        if few and not in_floats and manifest.precision.of(part) in BLOCKED:
            found.append(graph)
    return found
