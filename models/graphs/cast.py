"""A graph that rounds numbers to half precision, for an export that has a runtime at hand.

Part of no bundle; knows no network.
"""

from __future__ import annotations

from onnx import TensorProto

from .builder import GraphBuilder


def half_cast_model() -> bytes:
    """`values` [n] in fp32 to `halves` [n] in fp16, to the nearest; serialised."""
    g = GraphBuilder("half_cast", {})
    g.ops("Cast", g.input("values", "float32", ["n"]), names=["halves"], to=TensorProto.FLOAT16)
    g.direct_output("halves", ["n"], "float16")
    return g.model().SerializeToString()
