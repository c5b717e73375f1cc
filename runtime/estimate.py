"""How long a prompt's images will take: floating-point work, at a speed measured on the spot.

A rough figure for a warning; knows the cost of the networks' layers and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from ..models.config import TextConfig, VisionConfig
from ..models.grid import Grid
from ..models.positions import Position, advancing_positions
from .model import Model
from .plan import PromptPlan

# Above this many image rows the user is told before the work starts.
WARN_ROWS = 4000
PROBE_SIDE = 16
PROBE_ROWS = 64


def vision_work(vision: VisionConfig, num_patches: int) -> float:
    """Multiply-adds of the vision tower; attention is quadratic in patches."""
    width = vision.hidden_size
    linear = width * (4 * width + 2 * vision.intermediate_size) * vision.depth
    attention = 2 * num_patches * width * vision.depth
    return float(num_patches) * (linear + attention + width * vision.patch_dim)


def text_work(text: TextConfig, num_rows: int, past_rows: int) -> float:
    """Multiply-adds of the decoder for `num_rows` rows after `past_rows`."""
    heads = text.num_heads * text.head_dim
    kv_heads = text.num_kv_heads * text.head_dim
    projections = text.hidden_size * ((2 + text.output_gate) * heads + 2 * kv_heads)
    attention = projections + 2 * heads * (past_rows + num_rows / 2)
    recurrent, linear = 0, text.linear
    if linear is not None:
        # State is read, written and read again per value.
        recurrent = 3 * linear.value_width * linear.key_dim
        recurrent += text.hidden_size * (linear.conv_width + 2 * linear.value_width)
    mlp = 3 * text.hidden_size * text.intermediate_size * text.num_layers
    layers = len(text.attention_layers) * attention + len(text.linear_layers) * recurrent
    return float(num_rows) * (mlp + layers)


def prefill_seconds(model: Model, plan: PromptPlan) -> float:
    """Estimated seconds until the first token of a prompt."""
    target = model.manifest.target
    seconds = text_work(target.text, plan.num_rows, 0) * _text_pace(model)
    if target.vision is not None:
        merge = target.vision.merge_size**2
        patches = [merge * span.num_rows for span in plan.spans if span.kind == "image"]
        work = sum(vision_work(target.vision, n) for n in patches)
        seconds += work * _vision_pace(model, target.vision)
    return seconds


def _vision_pace(model: Model, vision: VisionConfig) -> float:
    """Seconds per multiply-add of the vision tower."""
    side = PROBE_SIDE * vision.merge_size
    grid = Grid(side, side, vision.merge_size)
    patches = np.zeros((grid.num_patches, vision.patch_dim), np.float32)
    return _seconds(lambda: model.target.encode_patches(patches, grid)) / vision_work(
        vision, grid.num_patches
    )


def _text_pace(model: Model) -> float:
    """Seconds per multiply-add of the decoder."""
    target = model.target
    rows = min(PROBE_ROWS, model.context_limit, target.max_rows)
    embeds = np.zeros((rows, target.config.text.hidden_size), np.float32)
    positions = advancing_positions(Position(0), rows)
    cache = target.new_cache(rows)
    run = lambda: target.forward(cache, embeds, positions, None, (), certain=False)  # noqa: E731
    return _seconds(run) / text_work(target.config.text, rows, 0)


def _seconds(run: Callable[[], object]) -> float:
    """The second of two runs: the first pays for one-time allocations."""
    run()
    started = perf_counter()
    run()
    return perf_counter() - started
