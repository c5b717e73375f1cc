"""Inputs and outputs of one graph for one caller, bound once and reused from call to call.

A call of the shapes of the one before costs a few copies and nothing else. Knows ONNX Runtime's
IO binding; knows nothing about what a graph computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Clock:
    """Seconds spent inside a graph's runs, and their number, by all callers together."""

    seconds: float = 0.0
    runs: int = 0

    def add(self, seconds: float) -> None:
        """Count one run."""
        self.seconds += seconds
        self.runs += 1


class Binding:
    """IO binding of one graph: inputs stay bound between runs until they are replaced."""

    def __init__(self, ort: Any, session: Any, clock: Clock) -> None:
        self._ort = ort
        self._clock = clock
        self._session = session
        self._binding = session.io_binding()
        # The runtime reads these buffers by address, so they must outlive the run.
        self._inputs: dict[str, tuple[Array, Any]] = {}
        self._copies: set[str] = set()
        self._shared: dict[str, Any] = {}
        self._fetch: tuple[str, ...] = ()
        # Output shapes of the last run, and buffers for the next one; None when they may differ.
        self._shapes: list[tuple[Sequence[int], np.dtype]] | None = None
        self._outputs: list[Array] | None = None

    def feed(self, name: str, array: Array) -> None:
        """Give an input the values of a host array, which may change afterwards."""
        # Copied into place: a binding of its own costs ten times a small copy.
        if name in self._copies:
            held = self._inputs[name][0]
            if held.shape == array.shape and held.dtype == array.dtype:
                np.copyto(held, array)
                return
        self._bind_input(name, np.array(array, order="C"))
        self._copies.add(name)

    def attach(self, name: str, array: Array, shapes_outputs: bool = True) -> None:
        """Bind an input to a contiguous host array itself; later changes of it are seen.

        `shapes_outputs` is False for an input whose shape says nothing about any output's.
        """
        held = self._inputs.get(name)
        if held is None or held[0] is not array:
            self._bind_input(name, array, shapes_outputs)

    def share(self, input_name: str, output_name: str, array: Array) -> None:
        """Bind one buffer as input and output, so that the graph updates it in place."""
        self._forget_outputs()
        self.attach(input_name, array)
        self._shared[output_name] = self._inputs[input_name][1]

    def unshare(self, output_name: str) -> None:
        """Leave an output to itself again; its input keeps its buffer."""
        if output_name in self._shared:
            self._forget_outputs()
            del self._shared[output_name]

    def run(self, fetch: Iterable[str]) -> list[Array]:
        """Run and return copies of the fetched outputs, in the order asked."""
        return [output.copy() for output in self.run_in_place(fetch)]

    def run_in_place(self, fetch: Iterable[str]) -> list[Array]:
        """Run and return the fetched outputs' own memory, which the next run writes to."""
        fetch = tuple(fetch)
        if fetch != self._fetch:
            self._forget_outputs()
            self._fetch = fetch
        if self._outputs is None:
            if self._shapes is None:
                return self._first_run()
            outputs = [np.empty(shape, dtype) for shape, dtype in self._shapes]
            self._bind_outputs([self._value(output) for output in outputs])
            self._outputs = outputs
        self._timed_run()
        return self._outputs

    def _first_run(self) -> list[Array]:
        """A run whose output shapes are not known yet."""
        self._bind_outputs([None] * len(self._fetch))
        self._timed_run()
        values = self._binding.get_outputs()[: len(self._fetch)]
        # Copied: the view's memory belongs to the binding and the next run may reuse it.
        outputs = [np.array(value.numpy()) for value in values]
        self._shapes = [(output.shape, output.dtype) for output in outputs]
        return outputs

    def _timed_run(self) -> None:
        started = perf_counter()
        self._session.run_with_iobinding(self._binding)
        self._clock.add(perf_counter() - started)

    def _bind_outputs(self, values: list[Any]) -> None:
        self._binding.clear_binding_outputs()
        for name, value in zip(self._fetch, values, strict=True):
            if value is None:
                self._binding.bind_output(name, "cpu")
            else:
                self._binding.bind_ortvalue_output(name, value)
        for name, value in self._shared.items():
            self._binding.bind_ortvalue_output(name, value)

    def _bind_input(self, name: str, array: Array, shapes_outputs: bool = True) -> None:
        held = self._inputs.get(name)
        if shapes_outputs and (held is None or held[0].shape != array.shape):
            self._forget_outputs()
        value = self._value(array)
        # Unknown until it is bound: after an interrupt in between it must not look bound.
        self._copies.discard(name)
        self._inputs.pop(name, None)
        self._binding.bind_ortvalue_input(name, value)
        self._inputs[name] = (array, value)

    def _value(self, array: Array) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(array)

    def _forget_outputs(self) -> None:
        self._shapes = self._outputs = None
