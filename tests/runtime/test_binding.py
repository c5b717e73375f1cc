"""Bindings that live across calls: which arrays are copied, which are seen, which are updated.

A graph of a few operators stands for all; that real graphs are bound right, every other test says.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from dflash_onnx.models.graphs.builder import GraphBuilder
from dflash_onnx.models.manifest import GraphSpec, TensorSpec
from dflash_onnx.runtime.binding import Binding, Clock
from dflash_onnx.runtime.session import MAX_BINDINGS, Graph

Float = NDArray[np.float32]
OUTPUTS = ("double", "shifted", "state_out")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """double = 2 x [n, 3]; shifted = x + offset [3]; state_out = state + offset."""
    g = GraphBuilder("small", {})
    x = g.input("x", "float32", ["n", 3])
    offset, state = (g.input(name, "float32", [3]) for name in ("offset", "state"))
    g.output(g.op("Add", x, x), "double", ["n", 3])
    g.output(g.op("Add", x, offset), "shifted", ["n", 3])
    g.ops("Add", state, offset, names=["state_out"])
    g.direct_output("state_out", [3])
    path: Path = tmp_path_factory.mktemp("graph") / "small.onnx"
    path.write_bytes(g.model().SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    outputs = tuple(TensorSpec(name, "float32", (3,)) for name in OUTPUTS)
    return Graph(onnxruntime, lambda: session, GraphSpec(path.name, "", (), outputs))


@pytest.fixture
def binding(graph: Graph) -> Binding:
    """Offset 1 and state 0; x is each test's own."""
    binding = graph.bind()
    binding.feed("offset", np.ones(3, np.float32))
    binding.feed("state", np.zeros(3, np.float32))
    return binding


def rows(count: int, start: float = 0.0) -> Float:
    return (np.arange(count * 3, dtype=np.float32) + np.float32(start)).reshape(count, 3)


@pytest.mark.parametrize("runs", [0, 1, 3])
def test_feed_copies(binding: Binding, runs: int) -> None:
    """The caller may change its array at once, whether or not the binding is warm."""
    for _ in range(runs):
        binding.feed("x", rows(2, 9))
        binding.run(OUTPUTS)
    x = rows(2)
    binding.feed("x", x)
    x[:] = 77
    np.testing.assert_array_equal(binding.run(["double"])[0], 2 * rows(2))


def test_feed_takes_any_layout(binding: Binding) -> None:
    """A view across memory has its values, not its bytes, bound; also into a warm binding."""
    for start in (0, 5):
        wide = np.stack([rows(4, start), rows(4, 90)], axis=-1)
        binding.feed("x", wide[::2, :, 0])
        np.testing.assert_array_equal(binding.run(["double"])[0], 2 * rows(4, start)[::2])


def test_attach_sees_changes(binding: Binding) -> None:
    """The array itself is bound; another one of the same shape takes its place."""
    x = rows(2)
    binding.attach("x", x)
    for value in (1, 2, 3):
        x[:] = value
        binding.attach("x", x)
        assert (binding.run(["double"])[0] == 2 * value).all()
    binding.attach("x", rows(2))
    np.testing.assert_array_equal(binding.run(["double"])[0], 2 * rows(2))


def test_feed_after_attach_leaves_the_array_alone(binding: Binding) -> None:
    """What is fed must not be copied into an array that the caller attached."""
    mine = rows(2)
    binding.feed("x", rows(2, 9))
    binding.run(["double"])
    binding.attach("x", mine)
    binding.run(["double"])
    binding.feed("x", rows(2, 50))
    np.testing.assert_array_equal(binding.run(["double"])[0], 2 * rows(2, 50))
    np.testing.assert_array_equal(mine, rows(2))


def test_shapes_change_and_change_back(binding: Binding) -> None:
    """Every number of rows, and warm runs in between; outputs have the shapes of their run."""
    for count in (2, 5, 5, 5, 1, 2, 2, 5, 0, 3):
        binding.feed("x", rows(count, count))
        double, shifted = binding.run(["double", "shifted"])
        np.testing.assert_array_equal(double, 2 * rows(count, count))
        np.testing.assert_array_equal(shifted, rows(count, count) + 1)


def test_zero_rows(binding: Binding) -> None:
    """An empty input gives empty outputs, again and again."""
    for _ in range(3):
        binding.feed("x", rows(0))
        double, state = binding.run(["double", "state_out"])
        assert double.shape == (0, 3) and (state == 1).all()


def test_fetched_outputs_change_with_the_call(binding: Binding) -> None:
    """Each call names its own outputs, in its own order."""
    binding.feed("x", rows(2))
    expected = {"double": 2 * rows(2), "shifted": rows(2) + 1, "state_out": np.ones(3, np.float32)}
    for names in (OUTPUTS, OUTPUTS[:1], OUTPUTS[:1], OUTPUTS[::-1], OUTPUTS, ("shifted",)):
        for name, output in zip(names, binding.run(names), strict=True):
            np.testing.assert_array_equal(output, expected[name])


def test_outputs_are_copies(binding: Binding) -> None:
    """Kept results do not change in later runs, nor do later runs see what was done to them."""
    kept: list[Float] = []
    for start in range(5):
        binding.feed("x", rows(2, start))
        kept += binding.run(["double"])
    for start, output in enumerate(kept):
        np.testing.assert_array_equal(output, 2 * rows(2, start))
        output[:] = -1
    np.testing.assert_array_equal(binding.run(["double"])[0], 2 * rows(2, 4))


def test_share_updates_in_place(binding: Binding) -> None:
    """One buffer is input and output; unshared, it stays as it is and the output is fetched."""
    state = np.zeros(3, np.float32)
    binding.feed("x", rows(2))
    binding.share("state", "state_out", state)
    for run in (1, 2, 3):
        np.testing.assert_array_equal(binding.run(["double"])[0], 2 * rows(2))
        assert (state == run).all()
    binding.unshare("state_out")
    for _ in range(3):
        (fetched,) = binding.run(["state_out"])
        assert (state == 3).all() and (fetched == 4).all()
    binding.unshare("state_out")
    binding.share("state", "state_out", state)
    binding.run(["double"])
    assert (state == 4).all()


def test_an_input_may_be_declared_to_shape_nothing(binding: Binding) -> None:
    """Then other shapes of it keep the buffers of the outputs; values are right all the same."""
    binding.feed("x", rows(2))
    for value in (1.0, 2.0, 5.0):
        binding.attach("offset", np.full(3, value, np.float32), shapes_outputs=False)
        np.testing.assert_array_equal(binding.run(["shifted"])[0], rows(2) + np.float32(value))


def test_bindings_of_one_graph_are_apart(graph: Graph) -> None:
    """Two callers' inputs do not meet; runs of both are counted together."""
    runs = graph.clock.runs
    both = [graph.bind(), graph.bind()]
    for i, one in enumerate(both):
        one.feed("x", rows(2, 10 * i))
        one.feed("offset", np.ones(3, np.float32))
        one.feed("state", np.zeros(3, np.float32))
    for _ in range(3):
        for i, one in enumerate(both):
            np.testing.assert_array_equal(one.run(["double"])[0], 2 * rows(2, 10 * i))
    assert graph.clock.runs == runs + 6 and graph.clock.seconds > 0


def test_threads_on_one_graph_do_not_mix(graph: Graph) -> None:
    """`Graph.run` from four threads at once, with rows of their own: each gets its own answers."""
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for i in range(200):
            x, offset = (
                rows(1 + (number + i) % 3, 1000 * number + i),
                np.full(3, number, np.float32),
            )
            feeds = {"x": x, "state": np.zeros(3, np.float32)}
            double, shifted = graph.run(feeds, OUTPUTS[:2], {"offset": offset})
            if not (np.array_equal(double, 2 * x) and np.array_equal(shifted, x + offset)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_bindings_used_last_are_kept(graph: Graph) -> None:
    """As many as may be held for their shapes; one that was used again is not the oldest."""
    shapes = [((count, 3),) for count in range(1, MAX_BINDINGS + 2)]
    held = {shape: graph._binding_for(shape) for shape in shapes[:-1]}
    assert graph._binding_for(shapes[0]) is held[shapes[0]]
    graph._binding_for(shapes[-1])
    assert [*graph._threads.by_shapes] == [*shapes[2:-1], shapes[0], shapes[-1]]


def test_the_clock_counts_runs() -> None:
    """Seconds add up over all bindings."""
    clock = Clock()
    clock.add(0.5)
    clock.add(0.25)
    assert (clock.seconds, clock.runs) == (0.75, 2)
