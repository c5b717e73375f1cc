"""Runs the networks of a loaded bundle outside the loop, as the comparisons with references need.

Knows the runtime's own pieces and the formats of the golden files; knows no reference code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_onnx.models.positions import Row
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.base import BlockRows
from dflash_onnx.runtime.drafters.draft_cache import DraftCache
from dflash_onnx.runtime.drafters.networks import DFlashNetworks
from dflash_onnx.runtime.plan import PromptPlan
from dflash_onnx.runtime.target import TargetRows

Float = NDArray[np.float32]


@dataclass(frozen=True)
class Prefill:
    """All rows of a prompt: final hidden [R, H], taps {layer: [R, H]}, logits [R, V]."""

    hidden: Float
    taps: dict[int, Float]
    logits: Float


def as_messages(parts: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """One user message from ("text", words) and ("image", name) parts."""
    content = [{"type": "text", "text": v} if k == "text" else {"type": k} for k, v in parts]
    return [{"role": "user", "content": content}]


def prefill(
    model: Model,
    plan: PromptPlan,
    taps: Collection[int] = (),
    *,
    chunk: int = 512,
    with_deepstack: bool = True,
) -> Prefill:
    """Run a whole prompt in chunks; banned columns of the logits are -inf."""
    target = model.target
    cache = target.new_cache(model.context_limit)
    parts = []
    for batch in plan.batches(Row(0), chunk):
        embeds, deepstack = target.embed(batch.token_ids), None
        if batch.media is not None:
            rows = slice(batch.offset, batch.offset + batch.token_ids.size)
            media = batch.media.encode()
            embeds, deepstack = media.embeds[rows], media.deepstack[:, rows]
        if not with_deepstack:
            deepstack = None
        new = target.forward(cache, embeds, batch.mrope_positions, deepstack, taps, certain=True)
        parts.append(TargetRows(new.hidden.copy(), {i: tap.copy() for i, tap in new.taps.items()}))
        cache.commit(batch.token_ids.size)
    hidden = np.concatenate([part.hidden for part in parts])
    tapped = {i: np.concatenate([part.taps[i] for part in parts]) for i in taps}
    return Prefill(hidden, tapped, logits_of(model, hidden))


def logits_of(model: Model, hidden: Float) -> Float:
    """Full logits of hidden rows through the bundle's head."""
    logits = model.target.head.rows(hidden, np.arange(hidden.shape[0]), True).logits
    assert logits is not None
    return logits


def filled_caches(
    networks: DFlashNetworks, features: Float, *, chunk: int = 512
) -> list[DraftCache]:
    """Caches with context rows of `features` [n, T*H] at positions 0..n-1."""
    caches = [networks.new_cache(kind) for kind in networks.kinds]
    rows = features.shape[0]
    for start in range(0, rows, chunk):
        positions = np.arange(start, min(start + chunk, rows))
        parts = np.split(features[positions], len(networks.taps), axis=1)
        keys, values = networks.inject(parts, positions)
        for kind, cache in zip(networks.kinds, caches, strict=True):
            own = [i for i, layer in enumerate(networks.layers) if layer == kind]
            cache.append([keys[i] for i in own], [values[i] for i in own], positions, True)
    return caches


def draft_hidden(
    networks: DFlashNetworks, features: Float, anchor: int, block: int, *, chunk: int = 512
) -> Float:
    """Hidden rows [block, H] after context rows of `features` [n, T*H] at positions 0..n-1."""
    return draft_rows(networks, features, anchor, block, chunk=chunk).hidden


def draft_rows(
    networks: DFlashNetworks, features: Float, anchor: int, block: int, *, chunk: int = 512
) -> BlockRows:
    """What a block computes after context rows of `features` [n, T*H] at positions 0..n-1."""
    rows = features.shape[0]
    caches = filled_caches(networks, features, chunk=chunk)
    return networks.block(anchor, np.arange(rows, rows + block), caches)


def max_difference(ours: NDArray, theirs: NDArray, banned: Collection[int] = ()) -> float:
    """Largest absolute difference of two arrays of one shape, without the banned columns."""
    assert ours.shape == theirs.shape, f"shapes {ours.shape} and {theirs.shape}"
    difference = np.abs(ours.astype(np.float64) - theirs)
    kept = np.delete(difference, list(banned), axis=-1) if banned else difference
    return float(kept.max())
