"""What each hole policy puts into the draft cache, and how a conversation changes policies."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from support_oracle import FULL, OracleNetworks, acceptance, endless, find_truth
from support_prompts import BundleMaker, Part, image, lay_out, text

from dflash_onnx.models.draft_config import DraftLayer
from dflash_onnx.models.errors import PromptError
from dflash_onnx.models.positions import Position, Row, Span, advancing_positions
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.conversation import Conversation, Generation
from dflash_onnx.runtime.drafters.base import Observed
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.draft_cache import FREE, DraftCache
from dflash_onnx.runtime.drafters.policy import HolePolicy, HoleSettings
from dflash_onnx.runtime.options import make_options

POLICIES = pytest.mark.parametrize("policy", HolePolicy, ids=lambda p: p.value)
DRAFTING = [p for p in HolePolicy if p is not HolePolicy.OFF]
# Text positions 0..19, an image of 24 rows at 20 (hole [20, 28)), text from 28 on.
PROMPT = [text(20), image(3, 8), text(6)]


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle()))


@pytest.fixture(scope="module")
def windowed(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle(drafts=[{"sliding_window": 16}])))


def answer(conversation: Conversation, parts: Sequence[Part], tokens: int = 12) -> Generation:
    plan = lay_out(conversation.model, parts)
    generation = conversation.generate_plan(plan, make_options(max_new_tokens=tokens))
    generation.result()
    assert conversation.draft.is_on, conversation.draft.state
    return generation


def only_cache(conversation: Conversation) -> DraftCache:
    """The one cache of the drafter, pending rows injected."""
    drafter = conversation.draft.drafter
    assert isinstance(drafter, DFlash)
    drafter.crop(Row(4096), Position(4096))
    (cache,) = drafter.caches
    cache.check()
    return cache


def is_zero(cache: DraftCache, position: int) -> bool:
    (slot,) = np.flatnonzero(cache.positions == position)
    return not any(store[:, :, slot].any() for store in (*cache.keys, *cache.values))


def held(cache: DraftCache) -> list[int]:
    return sorted(p for p in cache.positions.tolist() if p != FREE)


@POLICIES
@pytest.mark.parametrize("hole_rows", [None, 5])
def test_image_hole(model: Model, policy: HolePolicy, hole_rows: int | None) -> None:
    """The first thread's fix is one policy of five; zero features make zero keys and values."""
    hole_rows = hole_rows if policy.uses_rows else None
    conversation = model.conversation(holes=policy.value, hole_rows=hole_rows)
    draft = answer(conversation, PROMPT).result().draft
    cache = only_cache(conversation)
    seeded = list(range(28 - (hole_rows or 8), 28)) if policy.seeds else []
    last = 50 + 12 if policy.ruler == "index" else 34 + 12
    real = sorted(set(range(last - 1)) - set(range(20, 28) if policy.ruler == "text" else []))
    assert held(cache) == sorted(real + seeded)
    assert [p for p in held(cache) if is_zero(cache, p)] == seeded
    hidden = sorted(cache.positions[~cache.valid & (cache.positions != FREE)].tolist())
    assert hidden == (seeded if policy is HolePolicy.SEED_MASKED else [])
    assert (draft.policy, draft.seeded_rows) == (policy.value, len(seeded))
    expected = (((20, 28),), 1) if policy.ruler == "text" else ((), 0)
    assert (draft.holes, draft.skipped_spans) == expected


@POLICIES
def test_wide_hole_in_a_ring(windowed: Model, policy: HolePolicy) -> None:
    """Seeds come after the rows before the hole, so the ring keeps its newest W - 1 rows."""
    conversation = windowed.conversation(holes=policy.value)
    answer(conversation, [text(20), image(30, 2), text(4)], tokens=2)
    cache = only_cache(conversation)
    last_rows = {
        "text": [*range(10, 20), *range(50, 55)],
        "index": list(range(70, 85)),
    }
    assert held(cache) == (list(range(40, 55)) if policy.seeds else last_rows[policy.ruler])
    zero = list(range(40, 50)) if policy.seeds else []
    assert [p for p in held(cache) if is_zero(cache, p)] == zero


@POLICIES
def test_prefix_never_seen(model: Model, policy: HolePolicy) -> None:
    """A reused prefix is one hole from 0, bounded by R; under `index` it stays a gap."""
    conversation = model.conversation("none")
    answer(conversation, [text(40)])
    rows = 15 if policy.uses_rows else None
    conversation.use_draft(draft="dflash", holes=policy.value, hole_rows=rows)
    generation = answer(conversation, [text(40), text(7, seed=1)])
    cache, draft = only_cache(conversation), generation.result().draft
    seeded = list(range(25, 40)) if policy.seeds else []
    assert held(cache) == seeded + list(range(40, 47 + 11))
    assert [p for p in held(cache) if is_zero(cache, p)] == seeded
    assert (draft.holes, draft.seeded_rows) == (((0, 40),), len(seeded))
    drafting = [i for i, r in enumerate(generation.rounds) if r.drafted]
    assert drafting[0] == (15 - 7 if policy is HolePolicy.OFF else 0)


@pytest.mark.parametrize(("fixture", "pause"), [("model", 64), ("windowed", 15)])
def test_off_pauses_and_resumes(request: pytest.FixtureRequest, fixture: str, pause: int) -> None:
    """`off` drafts again once min(R, 64) text rows follow the hole."""
    conversation = request.getfixturevalue(fixture).conversation(holes="off")
    rounds = answer(conversation, PROMPT, tokens=70).rounds
    quiet = next(i for i, r in enumerate(rounds) if r.drafted)
    assert quiet == pause - 6, "six text rows follow the image in the prompt"
    assert all(r.drafted for r in rounds[quiet:-1])


@POLICIES
def test_trace_lines(model: Model, policy: HolePolicy) -> None:
    """A trace line says where the block started and which hole was met."""
    conversation = model.conversation(holes=policy.value)
    generation = answer(conversation, PROMPT)
    lines = [json.loads(json.dumps(r.to_json())) for r in generation.rounds]
    on_text = policy.ruler == "text"
    assert lines[0] == {
        "round": 0,
        "rows": 50,
        "block_start": 34 if on_text else 50,
        "anchor": generation.result().token_ids[0],
        "drafted": lines[0]["drafted"],
        "accepted": 0,
        "produced": 1,
        "hole": [20, 28] if on_text else None,
    }
    assert lines[1]["hole"] is None and lines[1]["rows"] == 51
    assert len(lines[0]["drafted"]) == (0 if policy is HolePolicy.OFF else 7)


@pytest.mark.parametrize("first", HolePolicy, ids=lambda p: p.value)
@pytest.mark.parametrize("second", [HolePolicy.SEED, HolePolicy.INDEX], ids=lambda p: p.value)
def test_switching_policy_in_a_chat(model: Model, first: HolePolicy, second: HolePolicy) -> None:
    """A cache on one ruler means nothing on the other: what was seen becomes a hole."""
    conversation = model.conversation(holes=first.value)
    answer(conversation, PROMPT)
    conversation.use_draft(holes=second.value)
    parts = [*PROMPT, text(9, seed=3)]
    result = answer(conversation, parts).result()
    start = 50 if second.ruler == "index" else 34
    holes = () if first.ruler == second.ruler else ((0, start),)
    assert (result.draft.policy, result.draft.holes) == (second.value, holes)
    assert result.timings.reused_rows == 50 and result.draft.drafted > 0
    assert result.token_ids == answer(model.conversation("none"), parts).result().token_ids


def test_switching_keeps_a_given_drafter(model: Model) -> None:
    """use_draft copied the caller's drafter, sessions and all, and died in pickle."""
    drafter = DFlash("mine", model.networks["dflash"], HoleSettings(HolePolicy.GAP))
    conversation = model.conversation(drafter)
    conversation.use_draft(draft=drafter)
    assert conversation.draft.drafter is drafter
    with pytest.raises(PromptError, match="draft_tokens=3 has no meaning for drafter 'mine'"):
        conversation.use_draft(draft_tokens=3)


def test_naming_a_drafter_starts_from_its_defaults(model: Model) -> None:
    """A policy chosen for one drafter must not stand in the way of the next."""
    conversation = model.conversation("dflash", holes="gap", draft_tokens=3)
    conversation.use_draft(draft="none")
    assert conversation.draft.name == "none"


def test_a_pause_ends_with_its_hole(model: Model) -> None:
    """`off` used to stay quiet in a text prompt that no longer had the image."""
    conversation = model.conversation(holes="off")
    answer(conversation, PROMPT)
    rounds = answer(conversation, [text(20), text(9, seed=3)]).rounds
    assert rounds[0].drafted


def test_refused_switch_changes_nothing(model: Model) -> None:
    """A wrong name used to stay in the conversation and break the next, right switch."""
    conversation = model.conversation(holes="gap")
    for wrong in ({"draft": "eagle"}, {"holes": "fill"}, {"draft_tokens": 8}):
        with pytest.raises(PromptError):
            conversation.use_draft(**wrong)
    conversation.use_draft(draft_tokens=3)
    assert answer(conversation, PROMPT).result().draft.policy == "gap"


@POLICIES
def test_shorter_prefix_and_a_ring(windowed: Model, policy: HolePolicy) -> None:
    """Rows a ring has lost to a longer prompt are a hole for the shorter one (thread 1)."""
    conversation = windowed.conversation(holes=policy.value)
    answer(conversation, [text(50), text(50, seed=1)])
    parts = [text(50), text(30, seed=2)]
    result = answer(conversation, parts).result()
    assert (result.timings.reused_rows, result.draft.holes) == (50, ((35, 50),))
    assert result.draft.seeded_rows == (15 if policy.seeds else 0) and result.draft.drafted > 0
    assert result.token_ids == answer(windowed.conversation("none"), parts).result().token_ids


@pytest.mark.parametrize("policy", DRAFTING, ids=lambda p: p.value)
def test_prompts_of_any_length_in_turn(model: Model, policy: HolePolicy) -> None:
    """Long, short, no overlap, identical: counters of the last request survived (#22105)."""
    page = [text(20), image(3, 8)]
    prompts = [
        [*page, text(9)],
        [text(12)],
        page,
        page,
        [image(4, 4), text(3)],
        [image(4, 4), text(3)],
        [*page, image(9, 2), text(2)],
        [*page, image(9, 2, seed=1), text(2)],
    ]
    kinds = (FULL, DraftLayer(128, True), DraftLayer(128, False))
    oracle = OracleNetworks(find_truth(model, prompts[0]), policy.ruler, kinds)
    conversation = model.conversation(DFlash("oracle", oracle, HoleSettings(policy)))
    for parts in prompts:
        oracle.truth = find_truth(model, parts)
        result = answer(conversation, parts, len(oracle.truth.tokens)).result()
        assert [call.fault for call in oracle.drafts if call.fault] == []
        assert (acceptance(result), result.token_ids) == (1.0, oracle.truth.tokens)


@pytest.mark.parametrize(("media", "name"), [(None, "seed"), ("no", "seed"), ("yes", "index")])
def test_default_policy(make_bundle: BundleMaker, media: str | None, name: str) -> None:
    """Real media rows help a drafter trained on them and hurt one that was not."""
    model = Model(make_bundle(draft_media=media))
    assert model.generate("Read", max_new_tokens=2).result().draft.policy == name


def test_features_outlive_the_call_that_gave_them(model: Model) -> None:
    """Taps lie in memory that the target's next call writes to; pending rows must not change."""
    drafter = model.conversation().draft.drafter
    assert isinstance(drafter, DFlash)
    taps = {i: np.ones((2, 4), np.float32) for i in drafter.taps}
    rows, span = np.ones((2, 4), np.float32), Span(Row(0), 2, "text", False)
    positions = advancing_positions(Position(0), 2)
    drafter.observe(Observed(Row(0), np.array([5, 6]), positions, taps, span, rows, rows))
    for tap in taps.values():
        tap[:] = -1
    assert all((feature == 1).all() for features, _ in drafter._pending for feature in features)
