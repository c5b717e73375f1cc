"""Conversations on a hybrid target: whatever rows are reused, answers are those of a fresh one.

A recurrent state cannot be cropped, so turns go on from the present row or from a snapshot; rows
are laid out by hand, or rendered by the chat template where that matters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_hybrid import HYBRID, Feeder, same_bits, states, windows
from support_images import make_image
from support_prompts import Part, image, lay_out, text, words

from dflash_onnx.models.positions import Row
from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.conversation import Conversation
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.target_cache import MAX_SNAPSHOTS

BundleMaker = Callable[..., Path]
TOKENS = 12
DRAFTS = ("none", "lookup", "mtp")
PICTURE = make_image(64, 96, 1)


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return Model(make_bundle(target=HYBRID | {"mtp": True}, drafts=[]), threads=1)


def end_of(model: Model) -> int:
    """The token that ends a message."""
    return model.manifest.stop_ids[0]


def answer(conversation: Conversation, parts: list[Part], **options: Any) -> Result:
    plan = lay_out(conversation.model, parts)
    made = make_options(max_new_tokens=TOKENS, **options)
    return conversation.generate_plan(plan, made).result()


def fresh(model: Model, parts: list[Part], **options: Any) -> tuple[int, ...]:
    return answer(model.conversation("none"), parts, **options).token_ids


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "first", [[text(40)], [text(9), image(2, 3), text(8)]], ids=["text", "image"]
)
def test_a_repeated_turn_is_reused_to_the_last_row(
    model: Model, first: list[Part], draft: str
) -> None:
    """Engines that checkpoint states at fixed distances compute a turn of a thousand rows again;
    here every row of the turns before is reused, those of the answer included."""
    conversation = model.conversation(draft)
    parts = first
    for turn in range(4):
        rows = conversation.cache.num_rows
        result = answer(conversation, parts)
        assert result.timings.reused_rows == rows
        assert result.token_ids == fresh(model, parts)
        # The last token of an answer has no row yet.
        cached = sum(part.num_rows for part in parts) + len(result.token_ids) - 1
        assert conversation.cache.num_rows == cached
        parts = [*parts, words(result.token_ids), text(6 + turn, seed=turn)]


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_edited_message_goes_back_to_a_message_end(model: Model, draft: str) -> None:
    """A user edits the last question of a chat about a picture: the state is taken from the end of
    the message before, and the rows after it are computed again."""
    end = words([end_of(model)])
    before = [text(20), image(2, 3), text(5), end]
    boundary = sum(part.num_rows for part in before)
    conversation = model.conversation(draft)
    answer(conversation, [*before, text(9), end, text(3)])
    assert list(conversation.cache.snapshots) == [boundary, boundary + 10]
    for seed in (1, 2):
        edited = [*before, text(4), text(7, seed=seed), end, text(3)]
        result = answer(conversation, edited)
        assert result.timings.reused_rows == boundary
        assert result.token_ids == fresh(model, edited)


def test_an_edit_before_every_snapshot_starts_over(model: Model) -> None:
    """Where no snapshot is left, the state of no row is the only true one."""
    end = words([end_of(model)])
    conversation = model.conversation("none")
    answer(conversation, [text(20), end, text(9), end, text(5), end, text(3)])
    assert list(conversation.cache.snapshots) == [31, 37]
    edited = [text(20), end, text(8), end, text(5), end, text(3)]
    result = answer(conversation, edited)
    assert result.timings.reused_rows == 0 and result.token_ids == fresh(model, edited)


def test_the_same_prompt_again_comes_from_its_snapshot(model: Model) -> None:
    """Asking again, say at another seed, reuses all up to the last message end."""
    end = words([end_of(model)])
    parts = [text(20), image(3, 2), end, text(3)]
    conversation = model.conversation("none")
    for seed, reused in ((1, 0), (2, 27), (1, 27)):
        sampled = {"temperature": 1.0, "rng_seed": seed}
        result = answer(conversation, parts, **sampled)
        assert result.timings.reused_rows == reused
        assert result.token_ids == fresh(model, parts, **sampled)


def test_any_edits_give_the_answers_of_a_fresh_conversation(model: Model) -> None:
    """Thirty turns that keep, cut or change what was said at any row, pictures among it, with
    rounds that reject in between: no answer differs, and most reuse something."""
    rng, end = np.random.default_rng(3), words([end_of(model)])
    conversation, reused = model.conversation("mtp"), 0
    parts: list[Part] = [text(12), end]
    for turn in range(30):
        kept = len(parts) if rng.random() < 0.5 else int(rng.integers(0, len(parts) + 1))
        new = text(int(rng.integers(1, 9)), seed=turn)
        media = [image(2, 2, seed=turn)] if rng.random() < 0.3 else []
        parts = [*parts[:kept], *media, new, end, text(2)]
        chunk = int(rng.integers(1, 20))
        result = answer(conversation, parts, chunk=chunk)
        assert result.token_ids == fresh(model, parts), turn
        assert len(conversation.cache.snapshots) <= MAX_SNAPSHOTS
        reused += result.timings.reused_rows > 0
        parts = [*parts, words(result.token_ids), end]
    assert reused >= 15


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_rendered_chat_about_a_picture(model: Model, draft: str) -> None:
    """Through template and tokenizer: a second question, then the same one in other words."""
    conversation = model.conversation(draft)
    content = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    options: dict[str, Any] = {"max_new_tokens": TOKENS}
    first = conversation.generate(messages, [PICTURE], **options).result()
    start = messages + [{"role": "assistant", "content": first.text}]
    for turn, question in enumerate(("And who is there?", "And how many are there?")):
        messages = start + [{"role": "user", "content": question}]
        plan = model.plan(messages, [PICTURE])
        result = conversation.generate(messages, [PICTURE], **options).result()
        assert (
            result.timings.reused_rows >= plan.message_ends(model.manifest.stop_ids, Row(0))[turn]
        )
        alone = model.generate(messages, [PICTURE], draft="none", **options).result()
        assert result.token_ids == alone.token_ids


class Interrupted(BaseException):
    """Like KeyboardInterrupt: nothing in the loop may catch it."""


def break_call(
    target: Any, name: str, number: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let one call of a method raise, before or after it has done its work."""
    method, left = getattr(target, name), [number]

    def broken(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            if after:
                method(*args, **kwargs)
            raise Interrupted
        return method(*args, **kwargs)

    monkeypatch.setattr(target, name, broken)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("where", ["graph", "head", "commit", "state", "bind"])
def test_an_interrupted_answer_leaves_no_wrong_state(
    model: Model, monkeypatch: pytest.MonkeyPatch, where: str, number: int, after: bool
) -> None:
    """Ctrl-C in any call of the first rounds, prefill included: the answer to the same prompt and
    to one that goes on from the rows that are there equal a fresh conversation's."""
    end = words([end_of(model)])
    parts = [text(14), end, text(5)]
    conversation = model.conversation("mtp")
    places = {
        "graph": (conversation.cache.binding, "run_in_place"),
        "head": (model.target.head, "rows"),
        "commit": (conversation.cache, "commit"),
        "state": (conversation.cache.state, "commit"),
        "bind": (conversation.cache.state, "_kept_states"),
    }
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        break_call(*places[where], number, after, patch)
        answer(conversation, parts, chunk=8)
    keys = [int(key) for key in conversation.row_keys if isinstance(key, int)]
    onward = [words([*keys, 33, 44, 55])]
    for prompt in (onward, parts, onward):
        result = answer(conversation, prompt)
        assert result.draft.state == "on"
        assert result.token_ids == fresh(model, prompt)


def test_an_interrupt_between_verify_and_commit_loses_no_row(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of all rounds before are reused, and their state has the bits of plain steps."""
    conversation = model.conversation("mtp")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        break_call(model.target.head, "rows", 4, False, patch)
        answer(conversation, [text(14)])
    keys = [int(key) for key in conversation.row_keys if isinstance(key, int)]
    assert 14 < len(keys) == conversation.cache.num_rows
    feeder = Feeder(model)
    feeder.one_by_one(keys)
    assert same_bits(states(conversation.cache), states(feeder.cache))
    assert same_bits(windows(conversation.cache), windows(feeder.cache))
    result = answer(conversation, [words([*keys, 33])])
    assert result.timings.reused_rows == len(keys)


def test_rows_to_replay_lie_where_no_call_writes(model: Model) -> None:
    """Which operator of a graph runs first is not ours to say, so its input must not be its
    output; the same holds for what a call returns, which the next one must not change."""
    feeder = Feeder(model)
    feeder.call(range(20, 30), certain=True)
    for kept in (2, 2, 3, 1, 1):
        hidden = feeder.call([40, 41, 42], certain=False, kept=kept)
        state, written = feeder.cache.state, feeder.cache.binding._outputs or []
        assert state is not None and len(state._pending) == len(state._layers)
        for rows in (hidden, *state._pending, *state._windows):
            assert not any(np.shares_memory(rows, output) for output in written)
