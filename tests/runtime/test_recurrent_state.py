"""The state of recurrent layers: whatever was rejected, it is that of the committed rows.

Calls of one target over one cache, without the loop; what conversations make of it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_hybrid import HYBRID, Feeder, difference, relative, same_bits, states, windows

from dflash_onnx.models.positions import Row
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.target_cache import MAX_SNAPSHOTS

BundleMaker = Callable[..., Path]
IDS = np.random.default_rng(0).integers(20, 480, 1100).tolist()
WRONG = np.random.default_rng(1).integers(20, 480, 16).tolist()
START, MOST = 9, 7
PORTABLE_BOUND = 1e-6
# Bytes of the tiny target: 3 layers, each 4 heads of 8 x 16 and 3 rows of 96 channels.
STATE_BYTES = 3 * 4 * (4 * 8 * 16 + 3 * 96)


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return Model(make_bundle(target=HYBRID, drafts=[]), threads=1)


@pytest.fixture(scope="module")
def portable(make_bundle: BundleMaker) -> Model:
    return Model(make_bundle(target=HYBRID, drafts=[]), threads=1, portable=True)


def verified(model: Model, drafts: int, accepted: int) -> Feeder:
    """A cache after a prompt and one block: the anchor, right drafts, and wrong ones after."""
    feeder = Feeder(model)
    feeder.call(IDS[:START], certain=True)
    kept = accepted + 1
    block = IDS[START : START + kept] + WRONG[: drafts - accepted]
    feeder.call(block, certain=False, kept=kept)
    return feeder


def plain(model: Model, num_rows: int) -> Feeder:
    """A cache after the same prompt and plain steps."""
    feeder = Feeder(model)
    feeder.call(IDS[:START], certain=True)
    feeder.one_by_one(IDS[START:num_rows])
    return feeder


@pytest.mark.parametrize("drafts", range(1, MOST + 1))
def test_state_is_that_of_the_accepted_rows(model: Model, drafts: int) -> None:
    """A state cannot be cropped, so a rejected draft that entered it would stay for ever: after
    every count of accepted drafts, state, window and next rows are those of plain steps."""
    for accepted in range(drafts + 1):
        rows = START + accepted + 1
        expected = plain(model, rows)
        for certain in (True, False):
            ours = verified(model, drafts, accepted)
            assert ours.cache.num_rows == rows
            assert same_bits(windows(ours.cache), windows(expected.cache))
            after = plain(model, rows)
            step = after.call(IDS[rows : rows + 1], certain=True)
            block = IDS[rows : rows + 1] + ([] if certain else WRONG[:3])
            hidden = ours.call(block, certain, kept=1)
            # An uncertain call replays what was accepted and keeps its own rows out.
            reached = after if certain else expected
            assert same_bits(states(ours.cache), states(reached.cache))
            assert same_bits(windows(ours.cache), windows(after.cache))
            assert same_bits([hidden[:1]], [step])


def test_a_masked_row_is_no_row(model: Model, portable: Model) -> None:
    """Where shapes must not change, a whole block is replayed and a mask ends at the accept point:
    the state is that of the accepted rows alone."""
    for one in (model, portable):
        ours, expected = verified(one, 5, 2), verified(one, 5, 2)
        whole = Feeder(one)
        whole.call(IDS[:START], certain=True)
        whole.call(IDS[START : START + 3] + WRONG[:3], certain=False)
        state, block = ours.cache.state, whole.cache.state
        assert state is not None and block is not None
        kept = block._pending
        mask = np.array([1, 1, 1, 0, 0, 0], np.float32)
        for i, rows in zip(state._layers, kept, strict=True):
            assert len(rows) == 6
            state._binding.attach(f"replay.{i}", rows)
        state._binding.attach("replay_mask", mask)
        state._replay = lambda rows: None  # type: ignore[method-assign]
        hidden = ours.call(IDS[12:13], certain=True)
        assert difference([hidden], [expected.call(IDS[12:13], certain=True)]) <= 1e-5
        bound = 0 if one is model else PORTABLE_BOUND
        assert difference(states(ours.cache), states(expected.cache)) <= bound


@pytest.mark.parametrize("drafts", range(1, MOST + 1))
def test_portable_state_is_that_of_the_accepted_rows(portable: Model, drafts: int) -> None:
    """The portable form sums in another order when a block is replayed; its state stays within
    rounding of plain steps, and the window's bits are the same."""
    for accepted in range(drafts + 1):
        rows = START + accepted + 1
        ours, after = verified(portable, drafts, accepted), plain(portable, rows)
        hidden = ours.call(IDS[rows : rows + 1], certain=True)
        step = after.call(IDS[rows : rows + 1], certain=True)
        pairs = [(read(ours.cache), read(after.cache)) for read in (states, windows)]
        # The first layer's rows are the same bits; those of later layers are rounded on the way.
        first = max(difference(a[:1], b[:1]) for a, b in pairs)
        worst = max(relative(a, b) for a, b in pairs)
        print(f"[state] portable {drafts} {accepted}: {first:.1e} {worst:.1e}")
        assert first <= PORTABLE_BOUND and worst <= 5 * PORTABLE_BOUND
        assert difference([hidden], [step]) <= 1e-5


def test_a_thousand_rejecting_rounds_do_not_drift(model: Model) -> None:
    """Each round replays one row from what the round before kept aside; after a thousand the bits
    are still those of plain steps."""
    ours, steps = Feeder(model), Feeder(model)
    for feeder in (ours, steps):
        feeder.call(IDS[:START], certain=True)
    for row in range(START, START + 1000):
        block = IDS[row : row + 1] + WRONG[row % 13 :][:3]
        hidden = ours.call(block, certain=False, kept=1)
        assert same_bits([hidden[:1]], [steps.call(IDS[row : row + 1], certain=True)])
    last = IDS[START + 1000 : START + 1001]
    assert same_bits([ours.call(last, True)], [steps.call(last, True)])
    assert same_bits(states(ours.cache), states(steps.cache))
    assert same_bits(windows(ours.cache), windows(steps.cache))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 200])
def test_prefill_in_any_chunks(model: Model, chunk: int) -> None:
    """How a prompt is cut into calls is a question of memory; its state has the same bits."""
    whole, cut = Feeder(model), Feeder(model)
    hidden = whole.call(IDS[:200], certain=True)
    rows = [cut.call(IDS[i : min(i + chunk, 200)], True) for i in range(0, 200, chunk)]
    assert same_bits([np.concatenate(rows)], [hidden])
    assert same_bits(states(cut.cache), states(whole.cache))
    assert same_bits(windows(cut.cache), windows(whole.cache))


def test_portable_equals_fused(model: Model, portable: Model) -> None:
    """The two forms of one bundle agree on hidden rows and states after 60 rows in one call and
    60 in single steps."""
    fused, other = Feeder(model), Feeder(portable)
    for feeder in (fused, other):
        feeder.hidden = feeder.call(IDS[:60], certain=True)  # type: ignore[attr-defined]
    worst = difference([fused.one_by_one(IDS[60:120])], [other.one_by_one(IDS[60:120])])
    worst = max(worst, difference(states(fused.cache), states(other.cache)))
    print(f"[state] portable against fused: {worst:.1e}")
    assert 0 < worst <= 1e-4


class Interrupted(Exception):
    """What ends a call in these tests."""


def break_run(cache: Any, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Let the next graph call raise, before it starts or after it has written its buffers."""
    run = cache.binding.run_in_place

    def broken(fetch: Any) -> Any:
        if after:
            run(fetch)
        raise Interrupted

    monkeypatch.setattr(cache.binding, "run_in_place", broken)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("snapshot", [None, 5])
def test_a_broken_call_is_not_built_upon(
    model: Model, monkeypatch: pytest.MonkeyPatch, snapshot: int | None, certain: bool, after: bool
) -> None:
    """A call that broke may have written the state or not; only a snapshot or row 0 is certain,
    and from there everything is as in a fresh cache."""
    ours, fresh = Feeder(model), Feeder(model)
    ours.call(IDS[:5], certain=True)
    if snapshot:
        ours.cache.snapshot()
    ours.call(IDS[5:9] + WRONG[:2], certain=False, kept=4)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        break_run(ours.cache, patch, after)
        ours.call(WRONG[:3], certain)
    reached = snapshot or 0
    assert ours.cache.state is not None and not ours.cache.state.is_whole
    assert ours.cache.reachable(Row(9)) == reached
    assert ours.cache.crop(Row(9)) == ours.cache.num_rows == reached
    assert ours.cache.state.is_whole
    hidden = fresh.call(IDS[:40], certain=True)
    assert same_bits([ours.call(IDS[reached:40], True)], [hidden[reached:]])
    assert same_bits(states(ours.cache), states(fresh.cache))


def test_an_interrupt_before_the_commit_loses_nothing(model: Model) -> None:
    """A verify block that nobody committed left the state alone but took the replayed rows in:
    every committed row is still there."""
    ours = verified(model, 4, 2)
    positions = np.tile(np.arange(12, 16), (3, 1))
    model.target.forward(
        ours.cache, model.target.embed(np.array(WRONG[:4])), positions, None, (), certain=False
    )
    assert ours.cache.reachable(Row(12)) == ours.cache.crop(Row(12)) == 12
    expected = plain(model, 12)
    assert same_bits(states(ours.cache), states(expected.cache))
    assert same_bits([ours.call(IDS[12:20], True)], [expected.call(IDS[12:20], True)])
    assert same_bits(states(ours.cache), states(expected.cache))


def test_snapshots(model: Model) -> None:
    """The two newest rows that were marked can be come back to, and going on from there is going
    on from a fresh cache; an older one is forgotten."""
    ours = Feeder(model)
    for first, stop in ((0, 10), (10, 17), (17, 22)):
        ours.call(IDS[first:stop], certain=True)
        ours.cache.snapshot()
    assert list(ours.cache.snapshots) == [17, 22] and len(ours.cache.snapshots) == MAX_SNAPSHOTS
    assert ours.cache.snapshot_bytes == 2 * STATE_BYTES
    ours.call(IDS[22:25] + WRONG[:2], certain=False, kept=3)
    assert [ours.cache.reachable(Row(row)) for row in (25, 24, 21, 16)] == [25, 22, 17, 0]
    assert ours.cache.crop(Row(21)) == 17 and list(ours.cache.snapshots) == [17]
    fresh = plain(model, 17)
    assert same_bits(states(ours.cache), states(fresh.cache))
    assert same_bits([ours.call(IDS[17:60], True)], [fresh.call(IDS[17:60], True)])
    assert ours.cache.crop(Row(3)) == 0 and not ours.cache.snapshots
    assert same_bits([ours.call(IDS[:9], True)], [Feeder(model).call(IDS[:9], True)])


@pytest.mark.parametrize("drafts", [1, 4, 15])
def test_memory_is_one_state(model: Model, drafts: int) -> None:
    """Engines that keep a state per draft pay for it with gigabytes; here a round holds one state
    and, until it is committed, the block's rows."""
    ours = verified(model, drafts, 0)
    # Of an accepted row, for the next call: keys, values and two gates to replay.
    waiting = 3 * 4 * (16 + 64 + 8)
    assert ours.cache.state_bytes == STATE_BYTES + waiting == 9600 + 1056
    positions = np.tile(np.arange(10, 11 + drafts), (3, 1))
    embeds = model.target.embed(np.array([7] * (drafts + 1)))
    model.target.forward(ours.cache, embeds, positions, None, (), certain=False)
    # Of a row: 96 channels of the convolution, and keys, values and two gates to replay.
    rows = 3 * 4 * ((drafts + 1) * (96 + 16 + 64 + 8) + 3 * 96)
    assert ours.cache.state_bytes == STATE_BYTES + waiting + rows
    ours.cache.commit(1)
    assert ours.cache.state_bytes == STATE_BYTES + waiting
