"""A thin builder over onnx.helper: named values in, one ModelProto out.

Knows opset, IR version, external data and constants; knows no network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..stored import StoredTensor, Tensors

# The highest level at which every operator used here has a kernel on CPU, WebGPU and DirectML.
OPSET = 17
IR_VERSION = 8
CONTRIB = "com.microsoft"

DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
}

Shape = Sequence[int | str]


class GraphBuilder:
    """Collects nodes of one graph; weights are external, looked up by name in `tensors`."""

    def __init__(self, name: str, tensors: Tensors) -> None:
        self._name = name
        self._tensors = tensors
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._weights: dict[str, str] = {}
        self._count = 0

    def input(self, name: str, dtype: str, shape: Shape) -> str:
        """Declare a graph input with symbolic dimensions as strings."""
        self._inputs.append(helper.make_tensor_value_info(name, DTYPES[dtype], list(shape)))
        return name

    def output(self, value: str, name: str, shape: Shape, dtype: str = "float32") -> None:
        """Declare `value` as graph output `name`."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"out/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, DTYPES[dtype], list(shape)))

    def direct_output(self, name: str, shape: Shape, dtype: str = "float32") -> None:
        """Declare an output that a node already writes by name (no copy, e.g. caches)."""
        self._outputs.append(helper.make_tensor_value_info(name, DTYPES[dtype], list(shape)))

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output and return that value."""
        return self.ops(op_type, *inputs, count=1, domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: str,
        count: int = 1,
        names: Sequence[str] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node with `count` outputs (or the given names) and return the values."""
        self._count += 1
        node_name = f"{op_type}_{self._count}"
        outputs = list(names) if names else [f"{node_name}:{i}" for i in range(count)]
        node = helper.make_node(
            op_type, list(inputs), outputs, name=node_name, domain=domain, **attributes
        )
        self._nodes.append(node)
        return outputs

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A small inline constant; equal constants are stored once."""
        array = np.asarray(value, dtype=dtype)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        name = f"const/{array.dtype}{list(array.shape)}/{digest}"
        self._initializers.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def stored(self, name: str) -> StoredTensor:
        """Where a weight of the bundle lies, and in what form."""
        return self._tensors[name]

    def raw(self, stored: StoredTensor) -> str:
        """A weight as it is stored."""
        self._initializers[stored.name] = _external(stored)
        return stored.name

    def weight(self, name: str) -> str:
        """A weight of the bundle as float32."""
        return self.floats(self._tensors[name])

    def floats(self, stored: StoredTensor) -> str:
        """A weight, or some rows of one, as float32; half-precision files are cast at load."""
        if stored.name not in self._weights:
            value = self.raw(stored)
            if stored.dtype != "float32":
                value = self.op("Cast", value, to=TensorProto.FLOAT)
            self._weights[stored.name] = value
        return self._weights[stored.name]

    def model(self) -> onnx.ModelProto:
        """The finished model; weights point at data files next to it."""
        graph = helper.make_graph(
            self._nodes,
            self._name,
            self._inputs,
            self._outputs,
            initializer=list(self._initializers.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="dflash-onnx"
        )


def _external(stored: StoredTensor) -> TensorProto:
    tensor = TensorProto(
        name=stored.name,
        dims=stored.shape,
        data_type=DTYPES[stored.dtype],
        data_location=TensorProto.EXTERNAL,
    )
    entries = (("location", stored.file), ("offset", stored.offset), ("length", stored.num_bytes))
    for key, value in entries:
        tensor.external_data.add(key=key, value=str(value))
    return tensor
