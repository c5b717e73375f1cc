"""ONNX files of a bundle: written, checked, and described for the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx

from ..models.errors import ExportError
from ..models.graphs.builder import DTYPES
from ..models.manifest import GraphSpec, TensorSpec

_NAMES = {int(code): name for name, code in DTYPES.items()}


class GraphWriter:
    """Writes `<name>.onnx` files into a bundle folder; `specs` describes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.specs: dict[str, GraphSpec] = {}

    def write(self, name: str, model: onnx.ModelProto) -> None:
        """Save a model whose weights are already in data files, and run the ONNX checker on it."""
        path = self._folder / f"{name}.onnx"
        content = model.SerializeToString()
        path.write_bytes(content)
        try:
            onnx.checker.check_model(str(path))
        except onnx.checker.ValidationError as error:
            raise ExportError(f"the graph {path.name} failed the ONNX checker: {error}") from None
        digest = hashlib.sha256(content).hexdigest()
        inputs = tuple(_spec(value) for value in model.graph.input)
        outputs = tuple(_spec(value) for value in model.graph.output)
        self.specs[name] = GraphSpec(path.name, digest, inputs, outputs)


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    return TensorSpec(value.name, _NAMES[tensor.elem_type], shape)
