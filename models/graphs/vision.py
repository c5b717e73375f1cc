"""The Qwen3-VL vision tower: patches of one image to embedding rows and DeepStack rows.

Everything that depends on the grid (position-table lookup, rotary tables) is computed in NumPy
and fed, so one graph serves every image size.
"""

from __future__ import annotations

from onnx import ModelProto

from ..config import VisionConfig
from ..stored import Tensors
from . import ops
from .builder import CONTRIB, GraphBuilder

# Fixed in the architecture's code, not in any config.json.
NORM_EPS = 1e-6


def build_vision(vision: VisionConfig, tensors: Tensors) -> ModelProto:
    """The vision graph: patches [n, C*t*p*p] to image_embeds and deepstack.{k}, [rows, H]."""
    g = GraphBuilder("vision", tensors)
    patches = g.input("patches", "float32", ["patches", vision.patch_dim])
    tables = ops.rotary_inputs(g, "patches", vision.head_dim // 2)
    hidden = ops.linear(g, patches, "patch_embed.proj.weight", "patch_embed.proj.bias")
    hidden = g.op("Add", hidden, _positions(g))
    deepstack = {}
    for i in range(vision.depth):
        hidden = _block(g, vision, i, hidden, tables)
        if i in vision.deepstack_layers:
            k = vision.deepstack_layers.index(i)
            deepstack[k] = _merger(g, vision, f"deepstack_merger_list.{k}", hidden, True)
    merged = _merger(g, vision, "merger", hidden, False)
    g.output(merged, "image_embeds", ["rows", vision.out_hidden_size])
    for k, value in sorted(deepstack.items()):
        g.output(value, f"deepstack.{k}", ["rows", vision.out_hidden_size])
    return g.model()


def _positions(g: GraphBuilder) -> str:
    """Learned positions resampled to the grid: weighted sum of four table rows per patch."""
    indices = g.input("table_indices", "int64", ["patches", 4])
    weights = g.input("table_weights", "float32", ["patches", 4])
    corners = g.op("Gather", g.weight("pos_embed.weight"), indices, axis=0)
    weighted = g.op("Mul", corners, g.op("Unsqueeze", weights, g.constant([-1])))
    return g.op("ReduceSum", weighted, g.constant([1]), keepdims=0)


def _block(g: GraphBuilder, vision: VisionConfig, i: int, hidden: str, tables: ops.Tables) -> str:
    name = f"blocks.{i}"
    normed = ops.layer_norm(g, hidden, f"{name}.norm1", NORM_EPS)
    hidden = g.op("Add", hidden, _attention(g, vision, f"{name}.attn", normed, tables))
    normed = ops.layer_norm(g, hidden, f"{name}.norm2", NORM_EPS)
    inner = ops.linear(g, normed, f"{name}.mlp.linear_fc1.weight", f"{name}.mlp.linear_fc1.bias")
    outer = ops.linear(
        g, ops.gelu_tanh(g, inner), f"{name}.mlp.linear_fc2.weight", f"{name}.mlp.linear_fc2.bias"
    )
    return g.op("Add", hidden, outer)


def _attention(g: GraphBuilder, vision: VisionConfig, name: str, x: str, tables: ops.Tables) -> str:
    """Every patch of the image sees every other; the kernel's memory is linear in patches."""
    width = vision.hidden_size
    qkv = ops.linear(g, x, f"{name}.qkv.weight", f"{name}.qkv.bias")
    parts = g.ops("Split", qkv, g.constant([width] * 3), count=3, axis=-1)
    q, k, v = (ops.reshape(g, part, 1, -1, width) for part in parts)
    q, k = (
        ops.rotary(g, part, tables, vision.num_heads, vision.head_dim, vision.head_dim)
        for part in (q, k)
    )
    attended = g.op("MultiHeadAttention", q, k, v, domain=CONTRIB, num_heads=vision.num_heads)
    flat = ops.reshape(g, attended, -1, width)
    return ops.linear(g, flat, f"{name}.proj.weight", f"{name}.proj.bias")


def _merger(
    g: GraphBuilder, vision: VisionConfig, name: str, hidden: str, norm_merged: bool
) -> str:
    """Join merge x merge patches into one row; DeepStack mergers normalise after joining."""
    width = vision.hidden_size * vision.merge_size**2
    if norm_merged:
        x = ops.layer_norm(g, ops.reshape(g, hidden, -1, width), f"{name}.norm", NORM_EPS)
    else:
        x = ops.reshape(g, ops.layer_norm(g, hidden, f"{name}.norm", NORM_EPS), -1, width)
    x = ops.gelu(g, ops.linear(g, x, f"{name}.linear_fc1.weight", f"{name}.linear_fc1.bias"))
    return ops.linear(g, x, f"{name}.linear_fc2.weight", f"{name}.linear_fc2.bias")
