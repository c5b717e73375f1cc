"""Whether a session has the inputs and outputs that the manifest states.

Knows names, types and shapes; opens and runs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..models.errors import ManifestError
from ..models.interfaces import shapes_fit
from ..models.manifest import GraphSpec, TensorSpec

# How ONNX Runtime names its element types.
ELEMENT_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
}


def check_interface(path: Path, spec: GraphSpec, session: Any) -> None:
    """The graph must have exactly the inputs and outputs that the manifest states."""
    for kind, stated, found in (
        ("input", spec.inputs, session.get_inputs()),
        ("output", spec.outputs, session.get_outputs()),
    ):
        ours = {t.name: t for t in stated}
        theirs = {t.name: t for t in found}
        for name in sorted(ours.keys() | theirs.keys()):
            if not _same_tensor(ours.get(name), theirs.get(name)):
                raise ManifestError(
                    f"{path}: {kind} '{name}' is {_form(theirs.get(name))} in the graph and "
                    f"{_form(ours.get(name))} in the manifest; the files belong to different "
                    "exports. Export the bundle again."
                )


def _same_tensor(stated: TensorSpec | None, found: Any) -> bool:
    if stated is None or found is None:
        return False
    same_type = ELEMENT_TYPES.get(stated.dtype) == found.type
    return same_type and shapes_fit(stated.shape, found.shape)


def _form(tensor: Any) -> str:
    """A tensor of the manifest or of ONNX Runtime, for people."""
    if tensor is None:
        return "not there"
    dtype = tensor.type if hasattr(tensor, "type") else tensor.dtype
    names = {theirs: ours for ours, theirs in ELEMENT_TYPES.items()}
    return f"{names.get(dtype, dtype)} {list(tensor.shape)}"
