"""Typed configuration of a target's vision tower, with and without DeepStack.

Knows which fields the network needs and which variants are refused; reads no weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .fields import Fields

# Written in the released modelling code, not in config.json, for checkpoints before transformers 5.
VISION_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower of a target; `deepstack_layers` are the blocks whose output is injected."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    out_hidden_size: int
    num_positions: int
    deepstack_layers: tuple[int, ...]
    rope_theta: float

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch, C*t*p*p."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def table_side(self) -> int:
        """Side of the square learned position table."""
        return math.isqrt(self.num_positions)


def parse_vision(vision: Fields, deepstack: bool) -> VisionConfig:
    """The vision tower's section; without `deepstack` its architecture has no such layers."""
    vision.refuse("hidden_act", "gelu_pytorch_tanh")
    if not deepstack:
        vision.refuse("deepstack_visual_indexes", [])
    rope = Fields(vision.where, vision.optional_section("rope_parameters"))
    theta = rope.get("rope_theta")
    config = VisionConfig(
        depth=vision.integer("depth"),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.integer("num_heads"),
        in_channels=vision.integer("in_channels"),
        patch_size=vision.integer("patch_size"),
        merge_size=vision.integer("spatial_merge_size"),
        temporal_patch_size=vision.integer("temporal_patch_size"),
        out_hidden_size=vision.integer("out_hidden_size"),
        num_positions=vision.integer("num_position_embeddings"),
        deepstack_layers=vision.integers("deepstack_visual_indexes") if deepstack else (),
        rope_theta=VISION_ROPE_THETA if theta is None else rope.number("rope_theta"),
    )
    _check(vision, config)
    return config


def _check(vision: Fields, config: VisionConfig) -> None:
    if config.table_side**2 != config.num_positions:
        raise vision.bad("num_position_embeddings", "a square number", config.num_positions)
    if config.hidden_size % (4 * config.num_heads):
        # Each head's width is halved for rows and columns, and each half again for rotation.
        expected = f"a divisor of hidden_size={config.hidden_size} that leaves a multiple of 4"
        raise vision.bad("num_heads", expected, config.num_heads)
    layers = config.deepstack_layers
    if list(layers) != sorted(set(layers)) or not all(0 <= i < config.depth for i in layers):
        # In another order transformers pairs mergers and decoder layers in a way of its own.
        expected = f"increasing block numbers below {config.depth}"
        raise vision.bad("deepstack_visual_indexes", expected, list(layers))
