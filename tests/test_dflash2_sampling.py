"""Sampled answers with a DFlash2 drafter and the rejection rule, through the loop that users run.

Drafts are drawn from q and judged against q, so the answers must have the target's distribution;
a drafter that draws from anything else must show.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2
from support_checkpoint import edit_tensors, export
from support_networks import prefill
from support_prompts import lay_out, words
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters import choosers
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.sampling import Distribution, History, Sampler

PROMPT = list(range(30, 42))
# Eight tokens that win nearly everywhere, so that target and drafter have candidates in common.
LOUD = [50, 81, 112, 143, 174, 205, 236, 267]
SAMPLING: dict[str, Any] = {"temperature": 4.0, "top_k": 5}
DRAFT = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 8}
ANSWERS, COMPARED = 600, 3
Tokens = tuple[int, ...]


def amplify(tensors: dict[str, np.ndarray]) -> None:
    """Let a few columns of the head win."""
    tensors["lm_head.weight"][LOUD] *= 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("rejection")
    make_target(folder / "target", seed=6, tied=False)
    edit_tensors(folder / "target", amplify)
    make_draft(folder / "draft", folder / "target", **DRAFT)
    return Model(export(folder), threads=1)


def next_token(model: Model, answer: Tokens) -> Distribution:
    """What the target's next token is drawn from, from one call without a drafter or a cache."""
    plan = lay_out(model, [words([*PROMPT, *answer])])
    hidden = prefill(model, plan).hidden
    rows = model.target.head.rows(hidden, np.array([len(hidden) - 1]), True)
    return Sampler(make_options(**SAMPLING).sampling, History.start([], 512)).distribution(rows, 0)


def exact(model: Model, answer: Tokens = (), share: float = 1.0) -> dict[Tokens, float]:
    """The probability of every answer's first tokens."""
    if len(answer) == COMPARED:
        return {answer: share}
    q, result = next_token(model, answer), {}
    for token, p in zip(q.ids.tolist(), q.probs.tolist(), strict=True):
        result |= exact(model, (*answer, token), share * p)
    return result


def sampled(model: Model, draft: str, accept: str) -> tuple[Counter[Tokens], float]:
    """First tokens of many answers, one per seed, and the share of drafts accepted."""
    conversation, plan = model.conversation(draft), lay_out(model, [words(PROMPT)])
    counts: Counter[Tokens] = Counter()
    accepted = drafted = 0
    for seed in range(ANSWERS):
        # One token more than compared: the last one is never drafted.
        options = make_options(
            max_new_tokens=COMPARED + 1, rng_seed=seed, accept=accept, **SAMPLING
        )
        result = conversation.generate_plan(plan, options).result()
        assert result.draft.state == "on" and result.finish_reason == "length"
        counts[result.token_ids[:COMPARED]] += 1
        accepted, drafted = accepted + result.draft.accepted, drafted + result.draft.drafted
    return counts, accepted / drafted


def excess(counts: Counter[Tokens], want: dict[Tokens, float]) -> float:
    """Chi-square over its 0.1 % limit, with all rarely expected answers taken as one."""
    assert set(counts) <= set(want)
    expected = ANSWERS * np.array(list(want.values()))
    got = np.array([counts[answer] for answer in want])
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    got = np.append(got[~rare], got[rare].sum())
    statistic = ((got - expected) ** 2 / expected).sum()
    print(f"[rejection] chi-square {statistic:.1f} with {got.size} cells")
    return float(statistic / chi2.ppf(0.999, got.size - 1))


def test_answers_keep_the_target_distribution(model: Model) -> None:
    """The first three tokens together, of 600 answers whose drafts were drawn from q.
    Enough drafts are accepted for a wrong rule to matter."""
    counts, acceptance = sampled(model, "dflash2", "rejection")
    print(f"[rejection] {acceptance:.0%} of drafts accepted, {len(counts)} different answers")
    assert excess(counts, exact(model)) < 1
    assert acceptance > 0.15


def test_drafts_not_drawn_from_q_would_show(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a walk that takes the middle of q every time and still reports q.
    The text drifts towards the drafter, and the test above sees it."""
    monkeypatch.setattr(choosers, "uniform", lambda seed, index, purpose: 0.5)
    counts, _ = sampled(model, "dflash2", "rejection")
    assert excess(counts, exact(model)) > 1


def test_equality_needs_no_draws(model: Model) -> None:
    """Under the equality rule drafts stay greedy, and answers are those of the plain run.
    The drafter changes how they are made and not what they are."""
    plan, accepted = lay_out(model, [words(PROMPT)]), 0
    drafts: dict[int, set[tuple[int, ...]]] = {}
    for seed in range(20):
        options = make_options(max_new_tokens=12, rng_seed=seed, **SAMPLING)
        generation = model.conversation("dflash2").generate_plan(plan, options)
        result = generation.result()
        plain = model.conversation("none").generate_plan(plan, options).result()
        assert result.token_ids == plain.token_ids
        accepted += result.draft.accepted
        first = generation.rounds[0]
        drafts.setdefault(first.anchor, set()).add(first.drafted)
    assert accepted > 0 and len(drafts) < 20
    assert {len(different) for different in drafts.values()} == {1}
