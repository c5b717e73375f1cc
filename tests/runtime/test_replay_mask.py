"""Memory that stays bound between calls: a replay's mask, whatever the lengths before it were.

Calls of one hybrid target over one cache; which rows are replayed is the state's own test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from support_hybrid import HYBRID, Feeder, same_bits, states, windows

from dflash_onnx.runtime import Model
from dflash_onnx.runtime.recurrent_state import RecurrentState

IDS = np.random.default_rng(2).integers(20, 480, 400).tolist()
BLOCK = 4
# Rows kept of every block, so many are replayed by the next call; 0 is a plain step in between.
LENGTHS = {
    "the same": [3, 3, 3, 3],
    "one and more": [1, 3, 1, 2, 1, 4, 4, 1],
    "nothing between": [1, 0, 1, 0, 3, 0, 0, 3, 1, 0, 2],
}


@pytest.fixture(scope="module", params=[False, True], ids=["fused", "portable"])
def model(make_bundle: Callable[..., Path], request: pytest.FixtureRequest) -> Model:
    """The portable form gets one masked row where there is nothing to replay."""
    return Model(make_bundle(target=HYBRID, drafts=[]), threads=1, portable=request.param)


def state_of(feeder: Feeder) -> RecurrentState:
    assert feeder.cache.state is not None
    return feeder.cache.state


def bind_anew(state: RecurrentState, rows: list[np.ndarray]) -> None:
    """Bind rows to replay and a mask of their own."""
    fill = np.zeros if rows is state._nothing else np.ones
    state._binding.attach("replay_mask", fill(len(rows[0]), np.float32))
    for i, kept in zip(state._layers, rows, strict=True):
        state._binding.attach(f"replay.{i}", kept)


def rounds(feeder: Feeder, lengths: list[int], refresh: bool) -> Iterator[list[np.ndarray]]:
    """What each round leaves behind; with `refresh` every call gets a mask made for it."""
    if refresh:
        state = state_of(feeder)
        state._replay = partial(bind_anew, state)  # type: ignore[method-assign]
    feeder.call(IDS[:9], certain=True)
    for kept in lengths:
        start = feeder.cache.num_rows
        ids = IDS[start : start + BLOCK] if kept else IDS[start : start + 1]
        hidden = feeder.call(ids, certain=not kept, kept=kept or 1)
        yield [hidden, *states(feeder.cache), *windows(feeder.cache)]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_answers_do_not_depend_on_a_kept_mask(model: Model, lengths: list[int]) -> None:
    """Replays of other lengths than the one before, and of as many rows as stand for nothing:
    a mask left from before would drop a row."""
    many = [kept for kept, _ in zip(cycle(lengths), range(24), strict=False)]
    pairs = zip(rounds(Feeder(model), many, False), rounds(Feeder(model), many, True), strict=True)
    for kept, fresh in pairs:
        assert same_bits(kept, fresh)


def test_two_caches_have_masks_of_their_own(model: Model) -> None:
    """Conversations whose drafts fare differently take turns on one target."""
    first, second = [3, 1, 3, 3, 2], [1, 3, 3, 0, 4]
    alone = [list(rounds(Feeder(model), lengths, False)) for lengths in (first, second)]
    turns = zip(
        rounds(Feeder(model), first, False), rounds(Feeder(model), second, False), strict=True
    )
    for i, ours in enumerate(turns):
        assert all(same_bits(got, expected[i]) for got, expected in zip(ours, alone, strict=True))


def test_a_mask_of_the_same_length_stays_bound(model: Model) -> None:
    """A binding costs as much as a small copy ten times over, in every round of an answer."""
    feeder = Feeder(model)
    masks = []
    for _ in rounds(feeder, [3, 3, 3, 3, 2, 3], False):
        masks.append(state_of(feeder)._binding._inputs["replay_mask"][0])
    # The first call replays nothing, the second what the first has kept.
    assert [len(mask) for mask in masks[1:]] == [3, 3, 3, 3, 2]
    assert masks[1] is masks[2] is masks[3] is masks[4]
