"""The covering array of the exactness suite, and proof that the suite notices a broken loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from exactness import Suite
from support_cases import (
    DRAFTS,
    PLAIN,
    SAMPLING,
    TARGETS,
    Case,
    all_cases,
    covering_array,
    pairs,
)
from support_layouts import LAYOUTS

from dflash_onnx.models.positions import Position
from dflash_onnx.runtime import answer
from dflash_onnx.runtime.drafters.base import Request
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.sampling import History
from dflash_onnx.runtime.target_cache import TargetCache
from dflash_onnx.runtime.verify import Verdict, accept_equal

ADVERSARY = replace(PLAIN, drafter="adversary", block=8)
ORACLE = replace(PLAIN, drafter="oracle", media="one image", block=3)
FIRST_K = replace(ORACLE, drafter="first-k", block=8)
COVERING = [case for target in TARGETS for case in covering_array(target)]


class Suites:
    """The suite of a case's target, opened when it is first needed."""

    def __init__(self, make_bundle: Callable[..., Any]) -> None:
        self._make_bundle = make_bundle
        self._suites: dict[str, Suite] = {}

    def of(self, case: Case) -> Suite:
        """The suite that runs the case."""
        if case.target not in self._suites:
            drafts = list(DRAFTS.values())
            bundle = self._make_bundle(target=TARGETS[case.target], drafts=drafts)
            self._suites[case.target] = Suite(bundle)
        return self._suites[case.target]


@pytest.fixture(scope="module")
def suites(make_bundle: Callable[..., Any]) -> Suites:
    return Suites(make_bundle)


@pytest.fixture(scope="module")
def suite(suites: Suites) -> Suite:
    return suites.of(PLAIN)


@pytest.mark.parametrize("target", TARGETS)
def test_the_covering_array_holds_every_pair_of_values(target: str) -> None:
    """Whatever two choices go together in some case go together in one that is run here."""
    wanted = {pair for case in all_cases(target) for pair in pairs(case)}
    assert {pair for case in covering_array(target) for pair in pairs(case)} == wanted
    assert len(covering_array(target)) < 200


@pytest.mark.parametrize("case", COVERING, ids=lambda c: "-".join(map(str, vars(c).values())))
def test_equals_the_plain_run(suites: Suites, case: Case) -> None:
    """Ids, text, finish reason, every cache row and the state are those without a drafter."""
    assert not suites.of(case).difference(case)


@pytest.mark.parametrize("target", TARGETS)
def test_plain_answers_are_worth_comparing(suites: Suites, target: str) -> None:
    """The answers vary, and one ends by its stop token, so that equality says something."""
    cases = {(c.media, c.sampling): c for c in covering_array(target)}.values()
    outcomes = [suites.of(case).plain(case) for case in cases]
    assert len({o.ids for o in outcomes}) == len(outcomes) == len(LAYOUTS) * len(SAMPLING)
    assert {o.finish_reason for o in outcomes} == {"stop", "length"}
    assert min(len(set(o.ids)) for o in outcomes) >= 5


def one_row_too_many(patch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    commit = TargetCache.commit
    patch.setattr(
        TargetCache, "commit", lambda c, n: commit(c, n + (1 if c.num_rows >= prompt_rows else 0))
    )


def position_after_a_round_off_by_one(patch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    right = answer.advanced
    patch.setattr(answer, "advanced", lambda p, n: Position(right(p, n) + 1))


def an_image_counts_as_one_position(patch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    patch.setattr(answer, "next_position", lambda p: Position(int(p[0].max()) + 1))


def every_draft_accepted(patch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    def accept(sampler: Any, rows: Any, drafts: list[int], first: int) -> Verdict:
        bonus = accept_equal(sampler, rows, drafts, first).tokens[-1]
        return Verdict((*drafts, bonus), len(drafts))

    patch.setattr(answer, "accept_equal", accept)


def one_draft_too_many(patch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    def accept(sampler: Any, rows: Any, drafts: list[int], first: int) -> Verdict:
        verdict = accept_equal(sampler, rows, drafts, first)
        count = min(verdict.accepted + 1, len(drafts))
        return Verdict((*drafts[:count], verdict.tokens[-1]), count)

    patch.setattr(answer, "accept_equal", accept)


def draws_not_keyed_by_index(patch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    late = lambda s, r, d, i: accept_equal(s, r, d, i + len(d))  # noqa: E731
    patch.setattr(answer, "accept_equal", late)


def drafts_stay_in_the_history(patch: pytest.MonkeyPatch, prompt_rows: int) -> None:
    patch.setattr(History, "pop", lambda history: None)


PENALISED = replace(ORACLE, sampling="greedy penalised")
BREAKS_THE_TEXT = [
    (one_row_too_many, ADVERSARY),
    (one_row_too_many, FIRST_K),
    (position_after_a_round_off_by_one, ADVERSARY),
    (an_image_counts_as_one_position, replace(ADVERSARY, media="image last")),
    (every_draft_accepted, ADVERSARY),
    (one_draft_too_many, FIRST_K),
    (draws_not_keyed_by_index, replace(ADVERSARY, sampling="seeded filtered")),
    (drafts_stay_in_the_history, PENALISED),
]


@pytest.mark.parametrize(("mutate", "case"), BREAKS_THE_TEXT)
def test_a_broken_loop_changes_the_ids(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, mutate: Callable[..., None], case: Case
) -> None:
    """Each mutation of the loop is seen in the token ids; without it the same case is equal."""
    assert not suite.difference(case)
    right, plan = suite.plain(case), suite.prompt(case.media).plan
    mutate(monkeypatch, plan.num_rows)
    monkeypatch.setattr("exactness.check_drafter", lambda *_: None)
    assert suite.run_case(case).ids != right.ids


@pytest.mark.parametrize("field", ["row", "position", "output_index"])
def test_a_drafter_asked_at_the_wrong_place_is_noticed(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """The text stays right, since the target verifies, but the oracle is no longer believed."""
    assert not suite.difference(ORACLE)

    def shifted(**values: Any) -> Request:
        return Request(**{**values, field: values[field] + 1})

    monkeypatch.setattr(answer, "Request", shifted)
    assert "AssertionError: (1, 1" in suite.difference(ORACLE)


@pytest.mark.parametrize("drafter", ["guided full", "guided mixed", "guided sliding"])
@pytest.mark.parametrize("policy", ["seed", "index"])
def test_a_block_at_the_wrong_position_is_noticed(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, drafter: str, policy: str
) -> None:
    """A DFlash block one position too far has nothing accepted, and a failing one is not hidden."""
    case = replace(PLAIN, drafter=drafter, media="long image", block=8, policy=policy)
    assert not suite.difference(case)
    with monkeypatch.context() as patch:
        patch.setattr(
            answer,
            "Request",
            lambda **v: Request(**{**v, "row": v["row"] + 1, "position": v["position"] + 1}),
        )
        assert "AssertionError" in suite.difference(case)
    monkeypatch.setattr(DFlash, "_flush", lambda self: 1 // 0)
    assert "off: crop failed" in suite.difference(case)
