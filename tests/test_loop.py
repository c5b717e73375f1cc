"""The loop at its edges: budgets, stops inside a block, context limits, closing, sharing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from exactness import cache_digest
from support_cases import DRAFTS, TARGET
from support_drafters import Adversary, FirstK, Known, Oracle
from support_layouts import make_prompt

from dflash_onnx.runtime import ContextError, Conversation, Model, PromptError, Result
from dflash_onnx.runtime.drafters.base import Drafter, NoDraft
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.plan import PromptPlan

BLOCK = 8
NUM_TOKENS = 24
Make = Callable[[Known], Drafter | str]
DRAFTERS: dict[str, Make] = {
    "oracle": lambda known: Oracle(known, BLOCK - 1),
    "adversary": lambda known: Adversary(known, BLOCK - 1),
    "first-k": lambda known: FirstK(known, BLOCK - 1, range(BLOCK)),
    "lookup": lambda known: "lookup",
    "dflash": lambda known: "dflash",
}
drafters = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)


@pytest.fixture(scope="module")
def bundle(make_bundle: Callable[..., Path]) -> Path:
    return make_bundle(target=TARGET, drafts=list(DRAFTS.values()))


@pytest.fixture(scope="module")
def model(bundle: Path) -> Model:
    return Model(bundle, threads=1)


@pytest.fixture(scope="module")
def plan(model: Model) -> PromptPlan:
    return make_prompt(model, "one image").plan


@pytest.fixture(scope="module")
def known(model: Model, plan: PromptPlan) -> Known:
    ids = run(model, plan, NoDraft())[0].token_ids
    return Known(ids, plan.num_rows, int(plan.mrope_positions.max()) + 1)


def run(model: Model, plan: PromptPlan, draft: Drafter | str, **options: Any) -> tuple[Result, str]:
    """The result in a conversation of its own, and the digest of the rows it left."""
    conversation = model.conversation(draft)
    made = make_options(**{"max_new_tokens": NUM_TOKENS, **options})
    result = conversation.generate_plan(plan, made).result()
    assert result.draft.state == "on"
    return result, cache_digest(conversation)


def same(first: tuple[Result, str], second: tuple[Result, str]) -> bool:
    """Whether ids, text, finish reason and cache rows are equal."""

    def essence(of: tuple[Result, str]) -> tuple:
        return of[0].token_ids, of[0].text, of[0].finish_reason, of[1]

    return essence(first) == essence(second)


def with_stops(model: Model, *stop_ids: int) -> Model:
    """The same model with other stop ids."""
    changed = copy.copy(model)
    changed.manifest = replace(model.manifest, stop_ids=stop_ids)
    return changed


@drafters
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 8, 9])
def test_budget(model: Model, plan: PromptPlan, known: Known, make: Make, budget: int) -> None:
    """Exactly as many tokens as asked, although the block is larger; the block shrinks to fit."""
    result, digest = run(model, plan, make(known), max_new_tokens=budget)
    assert same((result, digest), run(model, plan, NoDraft(), max_new_tokens=budget))
    assert result.token_ids == known.ids[:budget]
    assert result.finish_reason == "length"
    assert result.draft.drafted <= max(0, budget - 2) * BLOCK
    if budget < 3:
        assert result.draft.drafted == 0


@drafters
def test_a_stop_id_anywhere_in_a_block(
    model: Model, plan: PromptPlan, known: Known, make: Make
) -> None:
    """Each token of the answer in turn is declared a stop id; nothing after it is kept."""
    for token in dict.fromkeys(known.ids):
        stopping = with_stops(model, token)
        got, want = run(stopping, plan, make(known)), run(stopping, plan, NoDraft())
        assert same(got, want)
        assert want[0].finish_reason == "stop"
        assert want[0].token_ids == known.ids[: known.ids.index(token) + 1]


@drafters
def test_stop_strings_across_block_borders(
    model: Model, plan: PromptPlan, known: Known, make: Make
) -> None:
    """Every three-character piece of the answer as a stop string cuts ids and text as if plain."""
    text = run(model, plan, NoDraft())[0].text
    for start in range(0, len(text) - 2, 2):
        stop = text[start : start + 3]
        got = run(model, plan, make(known), stop=[stop])
        assert same(got, run(model, plan, NoDraft(), stop=[stop]))
        assert got[0].text == text[: text.index(stop)]
        assert got[0].finish_reason == "stop"


@drafters
def test_deltas_are_the_answer(model: Model, plan: PromptPlan, known: Known, make: Make) -> None:
    """Deltas joined are the result, and no delta shows text that a stop string takes back."""
    stop = run(model, plan, NoDraft())[0].text[7:11]
    for stops in ([], [stop]):
        options = make_options(max_new_tokens=NUM_TOKENS, stop=stops)
        generation = model.conversation(make(known)).generate_plan(plan, options)
        deltas = list(generation)
        result = generation.result()
        assert "".join(d.text for d in deltas) == result.text
        assert tuple(i for d in deltas for i in d.token_ids) == result.token_ids


@drafters
@pytest.mark.parametrize("left", [1, 2, 3, 9])
def test_context_limit(bundle: Path, plan: PromptPlan, known: Known, make: Make, left: int) -> None:
    """A block of 8 never asks the target for more rows than the context has left."""
    small = Model(bundle, threads=1, context_limit=plan.num_rows + left)
    got = run(small, plan, make(known))
    assert same(got, run(small, plan, NoDraft()))
    assert got[0].token_ids == known.ids[:left]


def test_a_prompt_that_fills_the_context(bundle: Path, plan: PromptPlan) -> None:
    """Without a row to spare there is an error that names the limit, before anything runs."""
    small = Model(bundle, threads=1, context_limit=plan.num_rows)
    with pytest.raises(ContextError, match=str(plan.num_rows)):
        run(small, plan, NoDraft())


@drafters
@pytest.mark.parametrize("num_deltas", [0, 1, 2, 3])
def test_closing_and_generating_again(
    model: Model, plan: PromptPlan, known: Known, make: Make, num_deltas: int
) -> None:
    """An answer abandoned midway leaves a conversation that answers like a fresh one."""
    conversation = model.conversation(make(known))
    options = make_options(max_new_tokens=NUM_TOKENS)
    for other in (plan, make_prompt(model, "two images").plan, plan):
        abandoned = conversation.generate_plan(other, options)
        for _, _ in zip(range(num_deltas), abandoned, strict=False):
            pass
        abandoned.close()
        if num_deltas:
            with pytest.raises(PromptError, match="closed"):
                abandoned.result()
        result = conversation.generate_plan(plan, options).result()
        assert same((result, cache_digest(conversation)), run(model, plan, NoDraft()))
        assert conversation.draft.is_on


def steps(conversation: Conversation, plan: PromptPlan) -> Any:
    """An answer in progress, as a generator of deltas."""
    return iter(conversation.generate_plan(plan, make_options(max_new_tokens=NUM_TOKENS)))


@pytest.mark.parametrize("first", ["dflash", "dflash-2", "lookup", "none"])
def test_interleaved_conversations(model: Model, plan: PromptPlan, first: str) -> None:
    """Two conversations on one model, a delta of each in turn, answer as if they were alone."""
    plans, drafts = [plan, make_prompt(model, "adjacent images").plan], [first, "dflash-3"]
    conversations = [model.conversation(draft) for draft in drafts]
    running = [steps(c, p) for c, p in zip(conversations, plans, strict=True)]
    deltas: list[list] = [[], []]
    waiting = [0, 1]
    while waiting:
        for i in list(waiting):
            delta = next(running[i], None)
            waiting.remove(i) if delta is None else deltas[i].append(delta)
    for i, conversation in enumerate(conversations):
        result, digest = run(model, plans[i], NoDraft())
        assert tuple(t for d in deltas[i] for t in d.token_ids) == result.token_ids
        assert cache_digest(conversation) == digest


def test_conversations_in_threads(bundle: Path) -> None:
    """Four threads share a model of two intra-op threads, and two of them one plan object."""
    shared = Model(bundle, threads=2)
    one, two = (make_prompt(shared, layout).plan for layout in ("one image", "two images"))
    jobs = [(one, "dflash"), (two, "dflash-2"), (two, "dflash-3"), (one, "none")]
    results: dict[int, list[tuple[Result, str]]] = {}

    def work(i: int) -> None:
        results[i] = [run(shared, *jobs[i]) for _ in range(5)]

    threads = [Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (plan, _) in enumerate(jobs):
        alone = run(shared, plan, NoDraft())
        assert len(results[i]) == 5
        assert all(same(result, alone) for result in results[i])


def test_one_answer_at_a_time(model: Model, plan: PromptPlan) -> None:
    """A second answer in the same conversation is refused and harms the first one in no way."""
    conversation = model.conversation("dflash")
    running = steps(conversation, plan)
    ids = list(next(running).token_ids)
    with pytest.raises(PromptError, match="already generating"):
        next(steps(conversation, plan))
    for delta in running:
        ids += delta.token_ids
    result, digest = run(model, plan, NoDraft())
    assert (tuple(ids), cache_digest(conversation)) == (result.token_ids, digest)
    assert next(steps(conversation, plan)).token_ids == result.token_ids[:1]


def test_statistics_belong_to_one_answer(model: Model, plan: PromptPlan) -> None:
    """Answers made ready together and run one after the other count their own holes only."""
    options, end = make_options(max_new_tokens=4), int(plan.mrope_positions.max())
    conversation = model.conversation("dflash")
    first, second, third = (conversation.generate_plan(plan, options) for _ in range(3))
    assert first.result().draft.skipped_spans == 1
    second.result()
    conversation.use_draft(draft="dflash-2")
    third.result()
    stats = [generation.result().draft for generation in (first, second, third)]
    assert [s.name for s in stats] == ["dflash", "dflash", "dflash-2"]
    assert [s.skipped_spans for s in stats] == [1, 0, 0]
    assert [s.holes for s in stats] == [((4, 7),), (), ((0, end),)]
