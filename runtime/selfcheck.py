"""The export's self-check: a few rows through every graph of a finished bundle.

Finds what a file check cannot: values that are not finite, taps that repeat each other, a drafter
whose graphs do not fit its target.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..models.errors import ExportError
from ..models.grid import Grid
from ..models.positions import Position, Row, Span, advancing_positions
from .drafters.base import Observed, Request
from .drafters.dflash import DFlash
from .drafters.policy import HolePolicy, HoleSettings
from .images import PreparedImage
from .model import Model
from .target import TargetRows

NUM_ROWS = 5


def self_check(folder: Path) -> None:
    """Run every graph of the bundle on a few rows; `ExportError` says which one is wrong."""
    model = Model(folder, mapped=True)
    _check_vision(model)
    rows, token_ids = _check_target(model)
    for name in model.networks:
        _check_draft(model, name, rows, token_ids)


def _check_vision(model: Model) -> None:
    vision = model.manifest.target.vision
    grid = Grid(2 * vision.merge_size, vision.merge_size, vision.merge_size)
    values = np.linspace(-1, 1, grid.num_patches * vision.patch_dim, dtype=np.float32)
    patches = values.reshape(grid.num_patches, vision.patch_dim)
    encoded = model.target.encode_image(PreparedImage(patches, grid, "self-check"))
    _finite("vision", encoded.embeds)
    _finite("vision (DeepStack)", encoded.deepstack)


def _check_target(model: Model) -> tuple[TargetRows, np.ndarray]:
    usable = np.setdiff1d(np.arange(model.manifest.tokenizer_size), model.manifest.banned_ids)
    token_ids = usable[:: max(1, usable.size // NUM_ROWS)][:NUM_ROWS]
    taps = model.manifest.tap_layers
    target = model.target
    rows = target.forward(
        target.new_cache(NUM_ROWS + 1),
        target.embed(token_ids),
        advancing_positions(Position(0), token_ids.size),
        None,
        taps,
    )
    _finite("target", rows.hidden)
    for tap in taps:
        _finite(f"target, tap {tap}", rows.taps[tap])
    _check_distinct(rows)
    head = target.head.rows(rows.hidden, np.arange(token_ids.size), True)
    assert head.logits is not None
    if not np.isfinite(head.logits).any(axis=1).all():
        raise ExportError("self-check: the head gives no finite logit; the weights are damaged.")
    return rows, token_ids


def _check_distinct(rows: TargetRows) -> None:
    taps = sorted(rows.taps)
    for i, first in enumerate(taps):
        for second in taps[i + 1 :]:
            if np.array_equal(rows.taps[first], rows.taps[second]):
                raise ExportError(
                    f"self-check: the target's taps {first} and {second} are identical; a layer "
                    "between them does nothing or the taps are wired wrongly."
                )


def _check_draft(model: Model, name: str, rows: TargetRows, token_ids: np.ndarray) -> None:
    networks = model.networks[name]
    count = token_ids.size
    drafter = DFlash(name, networks, HoleSettings(HolePolicy.GAP))
    positions = advancing_positions(Position(0), count)
    span = Span(Row(0), count, "text", False)
    drafter.observe(Observed(Row(0), token_ids, positions, rows.taps, span))
    request = Request(
        anchor=int(token_ids[-1]),
        max_drafts=drafter.max_drafts,
        row=Row(count),
        position=Position(count),
        output_index=1,
        tokens=token_ids.tolist(),
    )
    ids = drafter.propose(request).token_ids
    for cache in drafter.caches:
        for array in (*cache.keys, *cache.values):
            _finite(f"drafter {name} (inject)", array)
    vocab_size = model.manifest.target.text.vocab_size
    if len(ids) != drafter.max_drafts or not all(0 <= i < vocab_size for i in ids):
        raise ExportError(f"self-check: drafter {name} drafted {ids}, which are no token ids.")


def _finite(what: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise ExportError(
            f"self-check: {what} gives values that are not finite; the weights are damaged or "
            "overflow this precision (try --precision fp32)."
        )
