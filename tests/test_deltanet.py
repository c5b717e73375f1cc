"""The gated delta rule and its convolution as emitted, without a model around them.

Both forms of the recurrence against the rule itself, written in float64 below; the fused form bit
for bit against itself; the convolution against ONNX Runtime's own operator.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from support_networks import max_difference

from dflash_onnx.models.graphs import ops, recurrence
from dflash_onnx.models.graphs.builder import CONTRIB, IR_VERSION, OPSET, GraphBuilder
from dflash_onnx.models.graphs.recurrence import GatedRows, Recurrence
from dflash_onnx.models.text_config import LinearConfig
from dflash_onnx.runtime.binding import Binding, Clock

HEADS = {
    "two values a key": LinearConfig(2, 4, 8, 16, 4),
    "one value a key": LinearConfig(3, 3, 8, 8, 4),
    "one key for all": LinearConfig(1, 4, 16, 8, 4),
}
FORMS: tuple[Recurrence, ...] = ("fused", "chunked")
COUNTS = (1, 2, 5, 16, 63, 64)
KINDS = ("usual", "equal keys", "no decay", "strong decay")
PARTS = ("query", "key", "value", "decay", "beta")
BOUND = 2e-6
Array = NDArray[np.float32]
Rows = dict[str, Array]


def session_of(model: ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@cache
def rule_session(linear: LinearConfig, how: Recurrence) -> Any:
    """A graph that is nothing but the recurrence."""
    g, heads = GraphBuilder("rule", {}), linear.num_value_heads
    widths = (linear.key_width, linear.key_width, linear.value_width, heads, heads)
    parts = [g.input(p, "float32", ["rows", w]) for p, w in zip(PARTS, widths, strict=True)]
    state = g.input("state", "float32", [1, heads, linear.key_dim, linear.value_dim])
    batch = g.constant([0])
    rows = GatedRows(*(g.op("Unsqueeze", part, batch) for part in parts))
    output = g.op("Squeeze", recurrence.emit(g, linear, how, rows, state, "after"), batch)
    g.output(output, "output", ["rows", linear.value_width])
    return session_of(g.model())


def run(linear: LinearConfig, how: Recurrence, rows: Rows, state: Array) -> tuple[Array, Array]:
    """Outputs [n, value width] and the new state."""
    output, after = rule_session(linear, how).run(["output", "after"], {**rows, "state": state})
    return output, after


def make_rows(linear: LinearConfig, num_rows: int, kind: str = "usual") -> Rows:
    """Random rows with normed keys and queries; equal keys come with beta 1 and no decay."""
    rng = np.random.default_rng([num_rows, KINDS.index(kind)])
    heads, d = linear.num_key_heads, linear.key_dim
    query, key = rng.normal(size=(2, num_rows, heads, d))
    if kind == "equal keys":
        key[:] = key[0]
    normed = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    value = rng.normal(size=(num_rows, linear.value_width))
    shape = (num_rows, linear.num_value_heads)
    fall = {"strong decay": 30.0, "usual": 1.0}.get(kind, 0.0)
    beta = np.ones(shape) if kind == "equal keys" else rng.uniform(size=shape)
    parts = (*normed, value, -fall * rng.uniform(size=shape), beta)
    flat = (np.float32(x.reshape(num_rows, int(np.prod(x.shape[1:])))) for x in parts)
    return dict(zip(PARTS, flat, strict=True))


def make_state(linear: LinearConfig) -> Array:
    shape = (1, linear.num_value_heads, linear.key_dim, linear.value_dim)
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def delta_rule(linear: LinearConfig, rows: Rows, start: Array) -> tuple[NDArray, NDArray]:
    """S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q / sqrt(d), head by head."""
    state = start[0].astype(np.float64)
    num_rows = len(rows["key"])
    query, key = (rows[p].reshape(num_rows, linear.num_key_heads, -1) for p in ("query", "key"))
    value = rows["value"].reshape(num_rows, linear.num_value_heads, -1)
    output = np.zeros(value.shape)
    for t, h in np.ndindex(num_rows, linear.num_value_heads):
        shared = h * linear.num_key_heads // linear.num_value_heads
        k, q = key[t, shared].astype(np.float64), query[t, shared].astype(np.float64)
        state[h] *= np.exp(np.float64(rows["decay"][t, h]))
        update = rows["beta"][t, h] * (value[t, h] - state[h].T @ k)
        state[h] += np.outer(k, update)
        output[t, h] = state[h].T @ q / np.sqrt(linear.key_dim)
    return output.reshape(num_rows, -1), state[None]


def part(rows: Rows, which: slice) -> Rows:
    return {name: array[which] for name, array in rows.items()}


def same_bits(first: Array, second: Array) -> bool:
    return first.shape == second.shape and first.tobytes() == second.tobytes()


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_rule_equals_a_naive_one(heads: str, kind: str, how: Recurrence) -> None:
    """Both forms, at every length a call can have, compute the rule of the paper, also on equal
    keys, where a careless inverse loses every digit."""
    linear = HEADS[heads]
    for num_rows in COUNTS:
        rows, state = make_rows(linear, num_rows, kind), make_state(linear)
        answers = run(linear, how, rows, state), delta_rule(linear, rows, state)
        for ours, theirs in zip(*answers, strict=True):
            difference = max_difference(ours, theirs)
            print(f"[rule] {how} {kind} {num_rows}: {difference:.2e} of {abs(theirs).max():.1f}")
            assert difference <= BOUND


@pytest.mark.parametrize("heads", HEADS)
def test_forms_equal_each_other(heads: str) -> None:
    """A bundle holds both forms of a target; which one a provider runs must not show."""
    linear = HEADS[heads]
    for num_rows in COUNTS:
        rows, state = make_rows(linear, num_rows), make_state(linear)
        fused, chunked = (run(linear, how, rows, state) for how in FORMS)
        for ours, theirs in zip(fused, chunked, strict=True):
            assert max_difference(ours, theirs) <= BOUND


def test_no_rows_leave_the_state() -> None:
    """Most calls have nothing to replay: the fused form takes no rows and changes no bit."""
    linear = HEADS["two values a key"]
    state = make_state(linear)
    output, after = run(linear, "fused", make_rows(linear, 0), state)
    assert output.shape == (0, linear.value_width) and same_bits(after, state)


@pytest.mark.parametrize("how", FORMS)
def test_masked_rows_leave_the_state(how: Recurrence) -> None:
    """A masked row, decay and beta zero, is as good as no row, bit for bit; the portable target
    replays one masked row where there is none."""
    linear = HEADS["two values a key"]
    rows, state = make_rows(linear, 7), make_state(linear)
    for kept in range(8):
        masked = dict(rows)
        for gate in ("decay", "beta"):
            masked[gate] = rows[gate].copy()
            masked[gate][kept:] = 0
        _, after = run(linear, how, masked, state)
        if how == "fused":
            assert same_bits(after, run(linear, how, part(rows, slice(kept)), state)[1])
        elif kept:
            sliced = run(linear, how, part(rows, slice(kept)), state)[1]
            assert max_difference(after, sliced) <= 1e-6
        else:
            assert same_bits(after, state)


@pytest.mark.parametrize("heads", HEADS)
def test_rows_in_any_calls_are_the_same(heads: str) -> None:
    """One call, calls of one row and calls of any lengths end in the same bits: this is what makes
    a replayed state the state of plain decoding."""
    linear = HEADS[heads]
    rows, start = make_rows(linear, 64), make_state(linear)
    whole = run(linear, "fused", rows, start)
    for sizes in ([1] * 64, [2] * 32, [7, 1, 30, 26], [63, 1]):
        state, outputs, first = start, [], 0
        for size in sizes:
            output, state = run(linear, "fused", part(rows, slice(first, first + size)), state)
            outputs.append(output)
            first += size
        assert same_bits(np.concatenate(outputs), whole[0]) and same_bits(state, whole[1])


@pytest.mark.parametrize("how", FORMS)
def test_state_in_place(how: Recurrence) -> None:
    """The runtime binds one buffer as the state's input and output; the kernel reads it before it
    writes it, call after call."""
    linear = HEADS["two values a key"]
    shared, state = make_state(linear), make_state(linear)
    binding = Binding(onnxruntime, rule_session(linear, how), Clock())
    binding.share("state", "after", shared)
    for num_rows in (5, 1, 64):
        rows = make_rows(linear, num_rows)
        for name, array in rows.items():
            binding.feed(name, array)
        (output,) = binding.run(("output",))
        expected, state = run(linear, how, rows, state)
        assert same_bits(output, expected) and same_bits(shared, state)


class WeightInputs(GraphBuilder):
    """A builder whose weights are graph inputs."""

    def weight(self, name: str) -> str:
        """The input of that name."""
        return name


@cache
def conv_sessions(channels: int, kernel: int) -> tuple[Any, Any]:
    """Our shifted products, and ONNX Runtime's operator."""
    g = WeightInputs("conv", {})
    rows = g.input("rows", "float32", ["window_and_rows", channels])
    g.input("weight", "float32", [channels, kernel])
    g.output(ops.silu(g, ops.causal_conv(g, rows, "weight", kernel)), "mixed", ["rows", channels])
    names = {"x": [1, "n", channels], "w": [channels, 1, kernel], "past": [1, "k", channels]}
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in names.items()]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "last")]
    how = {"domain": CONTRIB, "channels_last": 1, "activation": "silu", "ndim": 1}
    node = helper.make_node("CausalConvWithState", ["x", "w", "", "past"], ["y", "last"], **how)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    graph = helper.make_graph([node], "theirs", infos, outputs)
    theirs = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return session_of(g.model()), session_of(theirs)


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_convolution_equals_the_operator(kernel: int) -> None:
    """Shifted products and SiLU against CausalConvWithState, which also takes the window along;
    cut into calls at any row they stay the same bits."""
    rng, channels = np.random.default_rng(kernel), 40
    window, rows = (rng.normal(size=(n, channels)).astype(np.float32) for n in (kernel - 1, 64))
    weight = rng.normal(size=(channels, kernel)).astype(np.float32)
    ours, theirs = conv_sessions(channels, kernel)
    padded = np.concatenate([window, rows])

    def mixed(first: int, stop: int) -> Array:
        feeds = {"rows": padded[first : stop + kernel - 1], "weight": weight}
        return ours.run(["mixed"], feeds)[0]

    whole = mixed(0, 64)
    feeds = {"x": rows[None], "w": weight[:, None], "past": window[None]}
    expected, last = theirs.run(["y", "last"], feeds)
    difference = max_difference(whole, expected[0])
    print(f"[conv] {kernel} taps: {difference:.2e}")
    assert difference <= 1e-6
    assert same_bits(np.ascontiguousarray(last[0]), padded[1 - kernel :])
    for size in (1, 2, 5, 63):
        cut = [mixed(first, min(first + size, 64)) for first in range(0, 64, size)]
        assert same_bits(np.concatenate(cut), whole)
