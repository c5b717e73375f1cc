"""The controller of draft lengths on simulated drafters and cost curves; no clock is asked.

What it chooses must pay; what it says must be true; and no length may ever change a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from support_oracle import endless
from support_prompts import BundleMaker, lay_out, text

from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.draft_length import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LOSS,
    AdaptiveLength,
    DraftLength,
    FixedLength,
)
from dflash_onnx.runtime.options import make_options

# Seconds of drafting and verifying `n` drafts, in plain steps.
CURVES: dict[str, Callable[[int], tuple[float, float]]] = {
    "rows are nearly free": lambda n: (0.1 * (n > 0), 1 + 0.02 * n),
    "rows cost a little": lambda n: (0.15 * (n > 0), 1 + 0.1 * n),
    "rows cost a lot": lambda n: (0.1 * (n > 0), 1 + 0.35 * n),
    "drafts come one by one": lambda n: (0.12 * n, 1 + 0.05 * n),
    "a step after four rows": lambda n: (0.1 * (n > 0), 1 + 0.5 * (n > 3) + 0.02 * n),
}
MOST, SEEDS = 7, range(20)


@dataclass
class Simulation:
    """Rounds of a drafter whose every draft is right with `chance`; `log` has drafts per round."""

    length: DraftLength
    curve: Callable[[int], tuple[float, float]]
    chance: float
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    slow: Iterator[float] = field(default_factory=lambda: cycle([1.0]))
    tokens: int = 0
    seconds: float = 0.0
    log: list[int] = field(default_factory=list)

    def round(self, most: int = MOST) -> None:
        """One round; the controller sees times that are `slow` times too long."""
        drafts = self.length.choose(most)
        assert 0 <= drafts <= most
        accepted = 0
        while accepted < drafts and self.rng.random() < self.chance:
            accepted += 1
        draft, verify = self.curve(drafts)
        factor = next(self.slow)
        self.length.record(drafts, accepted, draft * factor, verify * factor)
        self.tokens += accepted + 1
        self.seconds += draft + verify
        self.log.append(drafts)

    def run(self, tokens: int) -> float:
        """Tokens per plain step of an answer."""
        while self.tokens < tokens:
            self.round(min(MOST, tokens - self.tokens - 1))
        return self.tokens / self.seconds


def mean_speed(
    make: Callable[[], DraftLength], curve: str, chance: float, tokens: int, **options: Any
) -> float:
    """Mean over seeds of tokens per plain step."""
    runs = (
        Simulation(make(), CURVES[curve], chance, np.random.default_rng(s), **options)
        for s in SEEDS
    )
    return float(np.mean([run.run(tokens) for run in runs]))


@pytest.mark.parametrize("curve", CURVES)
def test_a_useless_drafter_costs_little(curve: str) -> None:
    """Nothing is ever accepted: 200 tokens take at most a twentieth longer than plain steps."""
    assert mean_speed(AdaptiveLength, curve, 0.0, 200) >= 0.95


def test_a_useless_drafter_costs_little_with_rows_of_four_bits() -> None:
    """A round of one draft takes about three plain steps there and one of three four, so a second
    try within 200 tokens would cost the twentieth that all of them may."""
    run = Simulation(AdaptiveLength(), lambda n: (1.4 * (n > 0), 1 + 0.5 * n), 0.0)
    assert run.run(200) >= 0.96


def test_whole_blocks_wait_for_a_draft_that_is_right() -> None:
    """Half a block of wrong drafts is followed by a single one, and then by a plain step."""
    run = Simulation(AdaptiveLength(), CURVES["rows are nearly free"], 0.0)
    for _ in range(3):
        run.round()
    assert run.log == [MOST // 2, 1, 0]


@pytest.mark.parametrize("curve", CURVES)
def test_a_perfect_drafter_drafts_whole_blocks(curve: str) -> None:
    """All rounds but the first, which has half of it, and the rest of the budget; not one is spent
    on measuring a plain step."""
    run = Simulation(AdaptiveLength(), CURVES[curve], 1.0)
    run.run(300)
    assert run.log[0] == MOST // 2 and set(run.log[1:-1]) == {MOST}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.7, 0.9])
def test_close_to_the_best_fixed_length(curve: str, chance: float) -> None:
    """Over 400 tokens within a tenth of what the best number, known beforehand, would give."""
    fixed = [mean_speed(lambda n=n: FixedLength(n), curve, chance, 400) for n in range(MOST + 1)]
    assert mean_speed(AdaptiveLength, curve, chance, 400) >= 0.9 * max(fixed)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
def test_interruptions_do_not_mislead(chance: float) -> None:
    """Every seventh round takes five times as long because of something else on the machine."""
    curve = "rows cost a little"
    calm = mean_speed(AdaptiveLength, curve, chance, 400)
    speeds = [
        Simulation(
            AdaptiveLength(),
            CURVES[curve],
            chance,
            np.random.default_rng(seed),
            cycle([1.0] * 6 + [5.0]),
        ).run(400)
        for seed in SEEDS
    ]
    assert np.mean(speeds) >= 0.9 * calm


def pauses(log: list[int]) -> list[int]:
    """Lengths of the runs of rounds without drafts that lie between others."""
    drafted = np.flatnonzero(log)
    gaps = np.diff(drafted) - 1
    return [int(gap) for gap in gaps if gap > 5]


def test_parks_and_tries_again_ever_more_seldom() -> None:
    """A drafter that stays useless is tried once, then left alone for twice as long each time, up
    to a limit."""
    run = Simulation(AdaptiveLength(), CURVES["rows cost a little"], 0.0)
    for _ in range(2000):
        run.round()
    found = pauses(run.log)
    wanted = [min(FIRST_PAUSE * 2**k, LONGEST_PAUSE) for k in range(len(found))]
    assert len(found) > 5 and all(
        abs(pause - rounds) <= 1 for pause, rounds in zip(found, wanted, strict=True)
    )
    assert sum(run.log[60:]) <= 2 * len(found), "a try is one round, as short as it can be"
    assert "now parked" in run.length.describe()
    assert f"parked for {run.log.count(0) - 1} rounds" in run.length.describe()


@pytest.mark.parametrize("row", [0.5, 0.7, 0.8, 1.0])
def test_what_was_dear_is_tried_later(row: float) -> None:
    """4-bit weights make rows dear, and so are the first rounds of a useless drafter: it is left
    alone until what they lost is a small part of the time."""
    run = Simulation(AdaptiveLength(), lambda n: (row * n, 1 + row * n), 0.0)
    while not pauses(run.log):
        run.round()
    lost = sum(sum(run.curve(drafts)) - 1 for drafts in run.log[:3])
    assert FIRST_PAUSE < int(lost / LOSS) - 1 <= pauses(run.log)[0] <= int(lost / LOSS) + 1


@pytest.mark.parametrize("curve", ["rows are nearly free", "drafts come one by one"])
@pytest.mark.parametrize("rounds", [20, 60, 1000])
def test_comes_back_when_drafts_are_right_again(curve: str, rounds: int) -> None:
    """After the end of the pause it is in a few rounds' time back to whole blocks."""
    run = Simulation(AdaptiveLength(), CURVES[curve], 0.0)
    for _ in range(rounds):
        run.round()
    assert run.log[-5:] == [0] * 5
    run.chance = 1.0
    waited = 0
    while not run.log[-1]:
        run.round()
        waited += 1
    assert waited <= min(max(2 * rounds, FIRST_PAUSE), LONGEST_PAUSE)
    for _ in range(20):
        run.round()
    assert run.log[-5:] == [MOST] * 5
    assert "now 7" in run.length.describe()


def test_never_more_than_allowed() -> None:
    """Whatever the room, also none; `Simulation` checks every choice."""
    rng, run = (
        np.random.default_rng(5),
        Simulation(AdaptiveLength(), CURVES["rows cost a lot"], 0.8),
    )
    for most in rng.integers(0, 16, 500):
        run.round(int(most))
    assert max(run.log) > MOST and FixedLength(5).choose(3) == 3 and FixedLength().choose(9) == 9


def test_without_proposals() -> None:
    """A drafter that never has anything to say is asked again every round: it costs nothing."""
    length = AdaptiveLength()
    for first in (True, *[False] * 50):
        assert length.choose(MOST) == (MOST // 2 if first else MOST)
        length.record(0, 0, 0.0, 1.0)


@pytest.fixture(scope="module")
def models(make_bundle: BundleMaker) -> list[Model]:
    """An attention target with a drafter, and a hybrid one that has an MTP head too."""
    hybrid = {"architecture": "Qwen3_5ForConditionalGeneration", "mtp": True}
    bundles = make_bundle(), make_bundle(target=hybrid)
    return [endless(Model(bundle, threads=1)) for bundle in bundles]


class Changing(FixedLength):
    """Any length in turn, none among them."""

    def __init__(self) -> None:
        super().__init__()
        self._next = cycle([3, 0, 7, 1, 0, 0, 5, 2])
        self.asked = 0

    def choose(self, most: int) -> int:
        self.asked += 1
        return min(next(self._next), most)


def answer(model: Model, draft: str, length: DraftLength | None, **options: Any) -> Result:
    """An answer of 40 tokens in a new conversation with a controller."""
    conversation = model.conversation(draft)
    conversation.draft.length = length or conversation.draft.length
    made = make_options(max_new_tokens=40, **options)
    return conversation.generate_plan(lay_out(model, [text(12)]), made).result()


SAMPLED: dict[str, Any] = {"temperature": 0.9, "rng_seed": 4}


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_texts_do_not_depend_on_lengths(models: list[Model], options: dict[str, Any]) -> None:
    """Lengths in any order, and those that real times lead to: all texts are the plain one."""
    for model in models:
        plain = answer(model, "none", None, **options).token_ids
        for draft in ("lookup", *model.manifest.draft_names):
            for length in (Changing(), AdaptiveLength()):
                assert answer(model, draft, length, **options).token_ids == plain, draft


def test_lengths_stay_fixed_where_the_text_depends_on_them(models: list[Model]) -> None:
    """Under the rejection rule a seed gives one text, so that no time may choose a length."""
    length = Changing()
    first, again = (
        answer(models[0], "dflash", how, accept="rejection", **SAMPLED) for how in (length, None)
    )
    assert first.token_ids == again.token_ids and length.asked == 0
    assert first.draft.drafted == again.draft.drafted > 7 * 10


def test_statistics_speak_of_lengths(models: list[Model]) -> None:
    """A fixed number, the current one, or that the drafter is parked."""
    parked = Simulation(AdaptiveLength(), CURVES["rows cost a lot"], 0.0)
    for _ in range(180):
        parked.round()
    stats = answer(models[0], "dflash", parked.length).draft
    assert "parked: plain decoding is faster" in stats.length and stats.drafted == 0
    assert answer(models[0], "dflash", FixedLength(4)).draft.length == "4 a round"
    conversation = models[0].conversation("dflash", draft_tokens="auto")
    assert conversation.generate("Hi.", max_new_tokens=9).result().draft.length.startswith("auto")
