"""The drafter's cache against a plain list, its masks, and what the block graph makes of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support_images import random_features
from support_prompts import BundleMaker, image, lay_out, text

from dflash_onnx.models.draft_config import DraftLayer
from dflash_onnx.models.positions import Ints, Position, Row
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.draft_cache import FREE, DraftCache
from dflash_onnx.runtime.drafters.networks import MASKED, DFlashNetworks, _mask
from dflash_onnx.runtime.drafters.policy import HolePolicy
from dflash_onnx.runtime.drafters.rows import Float, HostWriter
from dflash_onnx.runtime.options import make_options

MIXED = {
    "layers": 3,
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
    "sliding_window": 16,
}
WIDTH = 64


@pytest.fixture(scope="module")
def bundle(make_bundle: BundleMaker) -> Path:
    return make_bundle(drafts=[MIXED])


@pytest.fixture(scope="module")
def networks(bundle: Path) -> DFlashNetworks:
    return Model(bundle).networks["dflash"]


class PlainList:
    """What a cache should hold: every row in a dict, the oldest dropped one by one."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.rows: dict[int, tuple[float, bool]] = {}
        self.lost: set[int] = set()

    def append(self, tags: list[float], positions: list[int], visible: bool) -> None:
        for tag, position in zip(tags, positions, strict=True):
            self.rows[position] = (tag, visible)
        while self.window is not None and len(self.rows) > self.window - 1:
            oldest = min(self.rows)
            del self.rows[oldest]
            self.lost.add(oldest)

    def crop(self, position: int) -> set[int]:
        """Drop rows; returns those that a query at `position` should see and that are gone."""
        self.rows = {p: row for p, row in self.rows.items() if p < position}
        self.lost = {p for p in self.lost if p < position}
        return {p for p in self.lost if position - p < (self.window or 0)}


def contents(cache: DraftCache) -> dict[int, tuple[float, bool]]:
    cache.check()
    used = np.flatnonzero(cache.positions != FREE)
    for store in (*cache.keys, *cache.values):
        assert np.array_equal(store[0, 0, used, 0], cache.keys[0][0, 0, used, 0])
    tags = cache.keys[0][0, 0, :, 0]
    return {int(cache.positions[s]): (float(tags[s]), bool(cache.valid[s])) for s in used}


def append(cache: DraftCache, tags: list[float], positions: list[int], visible: bool) -> None:
    rows = np.array(tags, np.float32).reshape(1, 1, -1, 1)
    cache.append([rows] * 2, [rows] * 2, np.array(positions, np.int64), visible)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 16])
@pytest.mark.parametrize("seed", range(6))
def test_cache_is_a_list(window: int | None, seed: int) -> None:
    """Evicted rows must be dropped, never redirected to another slot (local-inference-lab#24)."""
    rng = np.random.default_rng(seed)
    cache, plain, start, tag = DraftCache(2, 1, 1, window, HostWriter()), PlainList(window), 0, 0
    for _ in range(120):
        if rng.random() < 0.25 and start:
            start = int(rng.integers(max(0, start - 20), start + 1))
            gone, hole = plain.crop(start), cache.crop(Position(start))
            reported = set() if hole is None else set(range(hole.start, hole.stop))
            assert gone <= reported and not reported & plain.rows.keys()
            plain.lost -= reported
            if hole is not None and rng.random() < 0.5:  # seed what was lost
                seeds = list(range(hole.start, hole.stop))
                append(cache, [-1.0] * len(seeds), seeds, False)
                plain.append([-1.0] * len(seeds), seeds, False)
        else:
            start += int(rng.integers(0, 5))
            count = int(rng.integers(1, 30))
            tags, positions = [float(tag + i) for i in range(count)], [*range(start, start + count)]
            visible = bool(rng.random() < 0.7)
            append(cache, tags, positions, visible)
            plain.append(tags, positions, visible)
            start, tag = start + count, tag + count
        assert contents(cache) == plain.rows and cache.num_rows == len(plain.rows)


def test_ring_holds_the_last_rows_of_a_long_prompt(make_bundle: BundleMaker) -> None:
    """Drafting must cost the window, not the context: 12 vs 71 t/s at 185k (club-3090#1096)."""
    model = Model(make_bundle(drafts=[{"sliding_window": 64}]))
    conversation = model.conversation()
    options = make_options(max_new_tokens=3, chunk=100)
    conversation.generate_plan(lay_out(model, [text(640)]), options).result()
    drafter = conversation.draft.drafter
    assert isinstance(drafter, DFlash)
    drafter.crop(Row(4096), Position(4096))  # drops nothing, but injects what is pending
    (cache,) = drafter.caches
    assert sorted(cache.positions.tolist()) == list(range(642 - 63, 642))
    assert cache.keys[0].shape[2] == 63


def test_crop_reports_what_a_ring_has_lost() -> None:
    """A second prompt that shares only the start of a long one finds no rows left (thread 1)."""
    cache = DraftCache(2, 1, 1, 16, HostWriter())
    append(cache, [0.0] * 100, list(range(100)), True)
    hole = cache.crop(Position(90))
    assert hole is not None and (hole.start, hole.stop) == (75, 85)
    assert cache.crop(Position(90)) is None, "a hole is reported once"
    hole = cache.crop(Position(40))
    assert hole is not None and (hole.start, hole.stop) == (25, 40) and cache.num_rows == 0


def test_one_cache_and_mask_per_kind(networks: DFlashNetworks) -> None:
    """Layers of one window and causality share a ring; another kind never sees its mask."""
    assert networks.kinds == (DraftLayer(16, True), DraftLayer(None, False))
    caches = [networks.new_cache(kind) for kind in networks.kinds]
    assert [len(cache.keys) for cache in caches] == [2, 1]
    assert [cache.window for cache in caches] == [16, None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4, 12])
def test_mask_is_its_definition(window: int | None, causal: bool) -> None:
    """Visible iff q - k < W, k <= q if causal, and never a free or a masked seed row."""
    cache = DraftCache(2, 1, 1, window, HostWriter())
    append(cache, [0.0] * 9, list(range(9)), True)
    append(cache, [0.0] * 2, [9, 10], False)
    append(cache, [0.0] * 3, [20, 21, 22], True)
    queries = list(range(23, 31))
    mask = _mask(DraftLayer(window, causal), cache, np.array(queries))
    reach = window or 10**9
    for i, q in enumerate(queries):
        for slot, k in enumerate(cache.positions.tolist()):
            seen = k != FREE and k not in (9, 10) and q - k < reach
            assert mask[i, slot] == (0 if seen else MASKED)
        for j, k in enumerate(queries):
            seen = abs(q - k) < reach and (k <= q or not causal)
            assert mask[i, cache.positions.size + j] == (0 if seen else MASKED)


def filled(networks: DFlashNetworks, positions: Ints, chunk: int = 512) -> list[DraftCache]:
    """Caches of the rows of one feature file at `positions`."""
    features = random_features(3, positions.size, WIDTH * len(networks.taps))
    caches = [networks.new_cache(kind) for kind in networks.kinds]
    for start in range(0, positions.size, chunk):
        part = slice(start, start + chunk)
        taps = np.split(features[part], len(networks.taps), axis=1)
        keys, values = networks.inject(taps, positions[part])
        for kind, cache in zip(networks.kinds, caches, strict=True):
            own = [i for i, layer in enumerate(networks.layers) if layer == kind]
            cache.append([keys[i] for i in own], [values[i] for i in own], positions[part], True)
    return caches


def hidden_of(networks: DFlashNetworks, start: int, caches: list[DraftCache]) -> Float:
    """The block's hidden rows, for an anchor at `start`."""
    return networks.block(77, np.arange(start, start + networks.block_size), caches).hidden


@pytest.mark.parametrize("shift", [1, 47, 1410, 4000])
def test_only_distances_matter(networks: DFlashNetworks, shift: int) -> None:
    """Moving context and block together changes nothing, so the ruler's origin is free."""
    positions = np.concatenate([np.arange(30), np.arange(77, 90)])
    here = hidden_of(networks, 90, filled(networks, positions))
    there = hidden_of(networks, 90 + shift, filled(networks, positions + shift))
    assert np.abs(here - there).max() < 1e-4
    wrong = hidden_of(networks, 90 + shift, filled(networks, positions))
    assert np.abs(here - wrong).max() > 1e-2


def test_slot_order_does_not_matter(networks: DFlashNetworks) -> None:
    """A ring overwrites in place, so rows lie in any order."""
    caches = filled(networks, np.arange(90))
    here = hidden_of(networks, 90, caches)
    for cache in caches:
        order = np.random.default_rng(0).permutation(cache.positions.size)
        cache.positions, cache.valid = cache.positions[order], cache.valid[order]
        for stores in (cache.keys, cache.values):
            stores[:] = [np.ascontiguousarray(store[:, :, order]) for store in stores]
    assert np.abs(here - hidden_of(networks, 90, caches)).max() < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_injecting_in_chunks_is_one_call(networks: DFlashNetworks, chunk: int) -> None:
    """A non-causal encode wider than the micro-batch asserted (beellama.cpp#97)."""
    num_rows = 5000 if chunk == 512 else 300
    whole = filled(networks, np.arange(num_rows), num_rows)
    for one, cut in zip(whole, filled(networks, np.arange(num_rows), chunk), strict=True):
        for a, b in zip((*one.keys, *one.values), (*cut.keys, *cut.values), strict=True):
            order = [np.argsort(c.positions)[-one.num_rows :] for c in (one, cut)]
            assert np.array_equal(a[:, :, order[0]], b[:, :, order[1]])


@pytest.mark.parametrize("policy", HolePolicy, ids=lambda p: p.value)
def test_append_graph_equals_host_writes(bundle: Path, policy: HolePolicy) -> None:
    """The append graph scatters into the shared buffer; the host path is its reference."""
    found = []
    for by_graph in (False, True):
        model = Model(bundle, append_by_graph=by_graph)
        conversation = model.conversation(holes=policy.value)
        plan = lay_out(model, [text(90), image(5, 40), text(70)])
        generation = conversation.generate_plan(plan, make_options(max_new_tokens=20))
        generation.result()
        drafter = conversation.draft.drafter
        assert isinstance(drafter, DFlash) and conversation.draft.is_on
        stores = [s.tobytes() for c in drafter.caches for s in (*c.keys, *c.values)]
        found.append(([r.to_json() for r in generation.rounds], stores))
    assert found[0] == found[1]
    assert any(r["drafted"] for r in found[0][0])


def test_a_ring_takes_no_more_slots_than_it_needs() -> None:
    """A block reads every slot, so a short chat must not pay for the whole window."""
    cache = DraftCache(1, 1, 4, 2048, HostWriter())
    sizes = []
    for start in range(0, 4096, 32):
        rows = [np.full((1, 1, 32, 4), start, np.float32)]
        cache.append(rows, rows, np.arange(start, start + 32), True)
        sizes.append(cache.positions.size)
        cache.check()
    assert sizes[0] == 64 and sizes[3] == 128 and sizes[-1] == 2047
    assert cache.num_rows == 2047 and cache.positions.min() == 4096 - 2047
