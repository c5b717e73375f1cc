"""One graph of a bundle as a session: checked against the manifest, run through IO binding.

Knows ONNX Runtime; knows nothing about what a graph computes. Sessions are shared between
conversations and threads, and hold their weights: what a run may never use is opened `later`. A
`Binding` belongs to one caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..models.bundle_path import bundle_file
from ..models.errors import DflashOnnxError, ManifestError, ProviderError
from ..models.manifest import GraphSpec
from . import huge_pages
from .binding import Array, Binding, Clock
from .interface_check import check_interface
from .providers import import_onnxruntime, num_threads, provider_name

# Its errors that speak of a graph or weight file; all others are of the provider or the machine.
# `Fail` is what a weight file that is missing, short or outside the folder gives.
FILE_FAILURES = {"Fail", "InvalidGraph", "InvalidProtobuf", "NoModel", "NoSuchFile", "NotFound"}


# Threads wait awake for the next operator, but neither long nor past a run: pools of several
# sessions fight for the same cores (ort.md, 5), and so do other programs.
SPINNING = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "30",
    "session.force_spinning_stop": "1",
}
# Sets of input shapes that a thread keeps bound for one graph.
MAX_BINDINGS = 16


class Runtime:
    """ONNX Runtime on one provider; opens graphs of one bundle folder.

    `profiles` is a folder for ONNX Runtime's own profiles, which `end_profiles` completes.
    """

    # Of ONNX Runtime's passes over a graph, those that are left out.
    disabled_optimizers: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path,
        provider: str,
        threads: int | None = None,
        profiles: Path | None = None,
    ) -> None:
        self._ort = import_onnxruntime()
        self.provider = provider
        self.provider_name = provider_name(provider)
        self.threads = threads or num_threads()
        self.version: str = self._ort.__version__
        self._folder = folder
        self._profiles = profiles
        self._graphs: dict[str, Graph] = {}

    def open(self, spec: GraphSpec) -> Graph:
        """Open a graph; `ManifestError` or `ProviderError` says which file and why."""
        graph = self.later(spec)
        graph.open()
        return graph

    def later(self, spec: GraphSpec) -> Graph:
        """A graph that opens itself when it is first used, in whatever thread that is."""
        graph = Graph(self._ort, partial(self._packed_session, spec), spec)
        self._graphs[Path(spec.file).stem] = graph
        return graph

    def clocks(self) -> dict[str, Clock]:
        """How long every opened graph has run so far, by its file's name without the suffix."""
        opened = {name: graph for name, graph in self._graphs.items() if graph.is_open}
        return {name: replace(graph.clock) for name, graph in opened.items()}

    def _packed_session(self, spec: GraphSpec) -> Any:
        """A session for many runs, its packed weights behind huge pages where that can be."""
        before = huge_pages.mapped_memory()
        session = self._session(spec)
        # The heap too: weights fill what was freed there.
        new = huge_pages.without(huge_pages.mapped_memory(), before)
        huge_pages.move([*huge_pages.heap(), *new])
        return session

    def _session(self, spec: GraphSpec) -> Any:
        path = bundle_file(self._folder, spec.file)
        self._check_available(path)
        try:
            # `enable_fallback` off: a provider that fails must not become CPU in silence.
            session = self._ort.InferenceSession(
                str(path),
                self._options(path.stem),
                providers=[self.provider_name],
                enable_fallback=0,
                disabled_optimizers=list(self.disabled_optimizers),
            )
        except Exception as error:  # the library raises its own unrelated classes
            raise self._failure(path, error) from error
        self._check_provider(path, session.get_providers())
        check_interface(path, spec, session)
        return session

    def end_profiles(self) -> dict[str, Path]:
        """Stop profiling; the file with every graph's events, by the graph's name."""
        opened = {name: graph for name, graph in self._graphs.items() if graph.is_open}
        return {name: graph.end_profile() for name, graph in opened.items()}

    def _options(self, graph: str) -> Any:
        """Session options of the named graph."""
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.log_severity_level = 3
        for key, value in SPINNING.items():
            options.add_session_config_entry(key, value)
        # An arena of its own would keep what a session's largest call took, and twice that.
        options.enable_cpu_mem_arena = False
        if self._profiles is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(self._profiles / graph)
        return options

    def _check_available(self, path: Path) -> None:
        available = self._ort.get_available_providers()
        if self.provider_name not in available:
            # Asked first: ONNX Runtime itself only warns, and then runs on another provider.
            raise ProviderError(
                f"{path} was asked to run on {self.provider_name}, which this build of ONNX "
                f"Runtime does not have (it has {', '.join(available)}). Install a build that does."
            )

    def _failure(self, path: Path, error: Exception) -> DflashOnnxError:
        """A user's error for one of the library's: of the bundle's files, or of the provider."""
        if type(error).__name__ in FILE_FAILURES:
            return ManifestError(
                f"{path} cannot be loaded: {_first_line(error)}. Export the bundle again."
            )
        return ProviderError(
            f"{path} cannot run on {self.provider_name} of ONNX Runtime {self.version}: "
            f"{_first_line(error)}. Try another provider or version."
        )

    def _check_provider(self, path: Path, providers: list[str]) -> None:
        if providers[0] != self.provider_name:
            raise ProviderError(
                f"{path} was asked to run on {self.provider_name} but ONNX Runtime chose "
                f"{providers[0]}; a library that the provider needs is missing."
            )


class HeldBindings(threading.local):
    """One thread's bindings of a graph by their input shapes, the newest last."""

    def __init__(self) -> None:
        self.by_shapes: dict[tuple, Binding] = {}


class Graph:
    """A graph of the bundle; its session is made once, by the first who needs it."""

    def __init__(self, ort: Any, make_session: Callable[[], Any], spec: GraphSpec) -> None:
        self._ort = ort
        self._make_session = make_session
        self._session: Any = None
        self._opening = threading.Lock()
        self._spec = spec
        self._threads = HeldBindings()
        self.clock = Clock()
        self.outputs = tuple(o.name for o in spec.outputs)

    @property
    def is_open(self) -> bool:
        """Whether the session is there, with its weights."""
        return self._session is not None

    def open(self) -> None:
        """Make the session unless it is there; the errors are those of `Runtime.open`."""
        with self._opening:
            if self._session is None:
                self._session = self._make_session()

    def bind(self) -> Binding:
        """A new set of inputs and outputs for one caller."""
        self.open()
        return Binding(self._ort, self._session, self.clock)

    def end_profile(self) -> Path:
        """Stop profiling and return the file with the events of all runs."""
        return Path(self._session.end_profiling())

    def run(
        self,
        feeds: Mapping[str, Array],
        fetch: Iterable[str] | None = None,
        constants: Mapping[str, Array] | None = None,
    ) -> list[Array]:
        """Run on host arrays, which are copied, and return the fetched outputs in order.

        `constants` are inputs that the caller keeps and never changes; they are not copied.
        """
        binding = self._binding_for(tuple(array.shape for array in feeds.values()))
        for name, array in feeds.items():
            binding.feed(name, array)
        for name, array in (constants or {}).items():
            binding.attach(name, array)
        return binding.run(self.outputs if fetch is None else tuple(fetch))

    def _binding_for(self, shapes: tuple[tuple[int, ...], ...]) -> Binding:
        """One binding per thread and shapes, of which a few recur: making one is not cheap."""
        held = self._threads.by_shapes
        binding = held.pop(shapes) if shapes in held else self.bind()
        held[shapes] = binding
        if len(held) > MAX_BINDINGS:
            del held[next(iter(held))]
        return binding


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
