"""A graph that rounds numbers to half precision, for an export that has a runtime at hand.

Part of no bundle; knows no network.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto

from .builder import GraphBuilder


def build_half_cast() -> ModelProto:
    """`values` [n] in fp32 to `halves` [n] in fp16, to the nearest."""
    g = GraphBuilder("half_cast", {})
    g.ops("Cast", g.input("values", "float32", ["n"]), names=["halves"], to=TensorProto.FLOAT16)
    g.direct_output("halves", ["n"], "float16")
    return g.model()
