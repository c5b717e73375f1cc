"""Proof that the exactness suite notices recurrent state that is not that of the committed rows.

State cannot be cropped, so these are the ways in which a hybrid target goes wrong by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from exactness import Suite, cache_digest, have_turn
from support_cases import DRAFTS, HYBRID, HYBRID_PLAIN, Case

from dflash_onnx.models.positions import Row
from dflash_onnx.runtime.binding import Binding
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.plan import common_rows
from dflash_onnx.runtime.recurrent_state import RecurrentState, StateCopy
from dflash_onnx.runtime.target_cache import TargetCache

Mutation = Callable[[pytest.MonkeyPatch], None]
ADVERSARY = replace(HYBRID_PLAIN, drafter="adversary", block=8)
FIRST_K = replace(HYBRID_PLAIN, drafter="first-k", media="one image", block=8)
GUIDED = replace(FIRST_K, drafter="mtp guided")
SNAPSHOT = replace(FIRST_K, media="reused to a snapshot")


@pytest.fixture(scope="module")
def suite(make_bundle: Callable[..., Any]) -> Suite:
    return Suite(make_bundle(target=HYBRID, drafts=list(DRAFTS.values())))


def test_a_hybrid_goes_on_after_all_rows_or_from_a_snapshot(suite: Suite) -> None:
    """Recurrent state can be reused whole, with accepted rows still to be replayed, or as it was
    where a message ended; the two layouts with an earlier turn do one each."""
    for layout, continues in (("reused", True), ("reused to a snapshot", False)):
        prompt, conversation = suite.prompt(layout), suite.model.conversation("mtp")
        assert prompt.before is not None and prompt.before.continues is continues
        have_turn(conversation, prompt.before)
        cache = conversation.cache
        shared = common_rows(conversation.row_keys, prompt.plan.keys())
        assert 0 < shared <= cache.num_rows and (shared == cache.num_rows) is continues
        assert cache.state is not None and cache.state.is_whole and cache.state._pending
        assert cache.reachable(shared) == (shared if continues else max(cache.snapshots))


def test_a_digest_leaves_the_conversation_as_it_was(suite: Suite) -> None:
    """Rows that wait to be replayed are in the digest, which can be taken again, and after which
    an answer goes on as if it had not been taken."""
    prompt = suite.prompt("reused")
    assert prompt.before is not None
    answers = set()
    for times in (0, 1, 2):
        conversation = suite.model.conversation("mtp")
        have_turn(conversation, prompt.before)
        assert len({cache_digest(conversation) for _ in range(times)}) == min(times, 1)
        options = make_options(max_new_tokens=12)
        result = conversation.generate_plan(prompt.plan, options).result()
        answers.add((result.token_ids, result.timings.reused_rows, cache_digest(conversation)))
    assert len(answers) == 1


def rejected_rows_enter(patch: pytest.MonkeyPatch) -> None:
    share = Binding.share
    patch.setattr(
        Binding, "share", lambda b, i, o, a: share(b, i, o.replace("committed", "all"), a)
    )


def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    commit = RecurrentState.commit
    patch.setattr(RecurrentState, "commit", lambda s, n: commit(s, n + 1))


def nothing_is_replayed(patch: pytest.MonkeyPatch) -> None:
    commit = RecurrentState.commit

    def forgetful(state: RecurrentState, num_rows: int) -> None:
        commit(state, num_rows)
        state._pending = []

    patch.setattr(RecurrentState, "commit", forgetful)


def window_is_not_moved_back(patch: pytest.MonkeyPatch) -> None:
    commit = RecurrentState.commit

    def late(state: RecurrentState, num_rows: int) -> None:
        rows = [kept[len(kept) - len(w) :].copy() for kept, w in _windows(state)]
        commit(state, num_rows)
        for window, kept in zip(state._windows, rows, strict=False):
            window[:] = kept

    patch.setattr(RecurrentState, "commit", late)


def _windows(state: RecurrentState) -> list[tuple]:
    return list(zip(state._conv_rows, state._windows, strict=False))


def snapshots_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    restore = RecurrentState.restore
    patch.setattr(RecurrentState, "restore", lambda s, copy: restore(s, None))


def snapshots_go_on_living(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "copy", lambda s: StateCopy(s._states, s._windows))


def any_row_is_reachable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TargetCache, "reachable", lambda c, n: Row(min(c.num_rows, n)))
    patch.setattr(RecurrentState, "restore", lambda s, copy: None)


BREAKS_THE_TEXT: list[tuple[Mutation, Case]] = [
    (rejected_rows_enter, ADVERSARY),
    (rejected_rows_enter, FIRST_K),
    (rejected_rows_enter, GUIDED),
    (one_row_too_many, ADVERSARY),
    (one_row_too_many, FIRST_K),
    (one_row_too_many, GUIDED),
    (nothing_is_replayed, ADVERSARY),
    (nothing_is_replayed, GUIDED),
    (window_is_not_moved_back, ADVERSARY),
    (window_is_not_moved_back, FIRST_K),
    (snapshots_are_forgotten, SNAPSHOT),
    (snapshots_go_on_living, SNAPSHOT),
    (any_row_is_reachable, SNAPSHOT),
]


@pytest.mark.parametrize(("mutate", "case"), BREAKS_THE_TEXT)
def test_wrong_state_changes_the_answer(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, mutate: Mutation, case: Case
) -> None:
    """Each mutation of the state is seen; without it the same case is equal."""
    assert not suite.difference(case)
    right = suite.plain(case)
    mutate(monkeypatch)
    monkeypatch.setattr("exactness.check_drafter", lambda *_: None)
    got = suite.run_case(case)
    assert got.ids != right.ids and got.cache != right.cache


def test_wrong_state_after_the_last_round_is_seen_by_its_digest(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token comes after the last round's rows; only the state itself tells of them."""
    commit, counts = RecurrentState.commit, [0, 0]

    def counting(state: RecurrentState, num_rows: int) -> None:
        counts[0] += 1
        commit(state, num_rows - (counts[0] == counts[1]))

    right = suite.plain(FIRST_K)
    monkeypatch.setattr(RecurrentState, "commit", counting)
    assert suite.run_case(FIRST_K) == right
    counts[:] = [0, counts[0]]
    wrong = suite.run_case(FIRST_K)
    assert wrong.cache != right.cache and replace(wrong, cache=right.cache) == right
