"""Options of a request are checked by type and range, and none is dropped in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support_images import make_image

from dflash_onnx.models.errors import PromptError
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.prompt_rows import EncodedMedia


@pytest.mark.parametrize(
    ("option", "value"),
    [(o, v) for o in ("max_new_tokens", "chunk") for v in (2.5, "5", True, -1)]
    + [("max_new_tokens", None)],
)
def test_counts_are_whole_numbers(option: str, value: Any) -> None:
    """2.5 tokens used to run on to the context limit; "5" was a bare TypeError."""
    with pytest.raises(PromptError, match=f"{option} must be a whole number"):
        make_options(**{option: value})


@pytest.mark.parametrize("stop", ["END", 5, None, ["a", 3], [""], [None]])
def test_stop_is_a_list_of_texts(stop: Any) -> None:
    """A single string would be taken letter by letter."""
    with pytest.raises(PromptError, match="stop must be a list of non-empty strings"):
        make_options(stop=stop)


def test_unknown_options_are_type_errors(tiny_model: Model) -> None:
    """A misspelt option must not be ignored (nano-vllm filters them)."""
    with pytest.raises(TypeError, match="temprature"):
        tiny_model.generate("hi", temprature=0.5)


@pytest.mark.parametrize("value", [2.5, "3", True, 8, -1])
def test_draft_tokens(tiny_model: Model, value: Any) -> None:
    """2.5 drafts used to turn drafting off without a word."""
    with pytest.raises(PromptError, match="draft_tokens must lie between 0 and 7"):
        tiny_model.conversation("dflash", draft_tokens=value)


@pytest.mark.parametrize("images", [make_image(64, 64, 1), "page.png", b"png"])
def test_one_picture_is_not_a_list(tiny_model: Model, images: Any) -> None:
    """An array used to be read as 64 pictures of one line each, a path letter by letter."""
    with pytest.raises(PromptError, match="images must be a list"):
        tiny_model.plan("hi", images)


def test_pictures_inside_messages(tiny_model: Model) -> None:
    """Messages in the usual layout carry their pictures; two places at once are refused."""
    image = make_image(64, 64, 1)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "hi"}]
    messages = [{"role": "user", "content": parts}]
    carried, given = tiny_model.plan(messages), tiny_model.plan("hi", [image])
    assert np.array_equal(carried.token_ids, given.token_ids)
    assert carried.keys() == given.keys()
    with pytest.raises(PromptError, match="both in messages and in images"):
        tiny_model.plan(messages, [image])


def encoding_calls(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each run of the vision tower from now on."""
    calls: list[int] = []
    encode = model.target.encode_patches
    monkeypatch.setattr(
        model.target, "encode_patches", lambda p, g: calls.append(1) or encode(p, g)
    )
    return calls


def test_a_picture_used_twice_is_encoded_once(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page images are re-sent every turn (claude-code#81792); the tower runs once for each."""
    calls = encoding_calls(tiny_model, monkeypatch)
    one, two = make_image(64, 64, 1), make_image(64, 64, 2)
    conversation = tiny_model.conversation()
    first = conversation.generate("hi", [one, two, one], max_new_tokens=3).result()
    assert len(calls) == 2
    again = conversation.generate("hi", [one, two, one], max_new_tokens=3).result()
    assert len(calls) == 2 and again.token_ids == first.token_ids


def test_rows_of_old_pages_go(tiny_model: Model) -> None:
    """Thirty pages must not hold thirty pages' rows: the ones read longest ago are forgotten."""
    pages = [make_image(64, 64, i) for i in range(3)]
    plan = tiny_model.plan("hi", pages)
    media = [m for m in plan.media if m is not None]
    encoded = EncodedMedia(2 * media[0].encode().num_bytes)
    for page in (*media, media[1]):
        encoded.rows(page)
    encoded.shrink()
    assert list(encoded._rows) == [media[2].digest, media[1].digest]
    result = tiny_model.generate("hi", pages, max_new_tokens=2).result()
    assert result.memory.image_bytes == 3 * media[0].encode().num_bytes


def test_a_page_of_an_earlier_turn_is_not_encoded_again(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that goes back to an earlier page, or starts over with it, knows its rows."""
    calls = encoding_calls(tiny_model, monkeypatch)
    page, conversation = make_image(64, 64, 1), tiny_model.conversation()
    for words in ("hi", "something else", "hi"):
        messages = [{"role": "user", "content": [{"type": "text", "text": words}, page_part(page)]}]
        conversation.generate(messages, max_new_tokens=2).result()
    assert len(calls) == 1


def page_part(page: object) -> dict[str, object]:
    return {"type": "image", "image": page}
