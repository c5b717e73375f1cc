"""Messages to prompt text: golden renderings of the real templates, and messages that misfit.

The goldens were made by transformers (tests/golden/make_chat_renderings.py), not by our code.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_onnx.models.errors import ManifestError, PromptError
from dflash_onnx.runtime.chat import (
    ChatTemplate,
    choose_mark,
    guard,
    guard_text,
    normalise_messages,
)

GOLDEN = Path(__file__).parents[1] / "golden"
RENDERINGS = json.loads((GOLDEN / "chat_renderings.json").read_text("utf-8"))
IMAGE = {"type": "image"}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def real_template(name: str) -> ChatTemplate:
    path = GOLDEN / "templates" / f"{name}.jinja"
    return ChatTemplate(path.read_text("utf-8"), path.name)


def count_images(messages: list[dict[str, Any]]) -> int:
    return sum(part == IMAGE for message in messages for part in message["content"])


@pytest.mark.parametrize("entry", RENDERINGS, ids=lambda e: f"{e['template']}: {e['case']}")
def test_real_templates_render_as_in_transformers(entry: dict[str, Any]) -> None:
    """Five published templates, every case to the letter, with and without normalising."""
    template = real_template(entry["template"])
    messages = entry["messages"]
    assert template.render(messages, **entry["options"]) == entry["rendered"]
    normal = normalise_messages(messages, count_images(messages))
    assert template.render(normal, **entry["options"]) == entry["rendered"]


def test_damaged_template_names_file_and_line() -> None:
    """A bundle with a cut-off template is the bundle's fault and says where."""
    with pytest.raises(ManifestError, match=r"box/chat\.jinja .* line 2"):
        ChatTemplate("fine\n{% if %}", "box/chat.jinja")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('No user query.') }}", "No user query"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_refusal_of_the_template_is_a_prompt_error(source: str, words: str) -> None:
    """What the template itself refuses reaches the user in the template's words."""
    with pytest.raises(PromptError, match=words):
        ChatTemplate(source, "chat.jinja").render([{"role": "user", "content": ""}])


def test_real_template_refuses_system_only_and_unknown_effort() -> None:
    """Legal messages that one model does not take fail with that model's own words."""
    system = [{"role": "system", "content": "Be brief."}]
    assert real_template("qwen3_vl").render(system).startswith("<|im_start|>system\nBe brief.")
    with pytest.raises(PromptError, match="No user query found in messages"):
        real_template("qwen3_5_think").render(system)
    with pytest.raises(PromptError, match="Unexpected reasoning effort huge"):
        real_template("qwen3_8").render(normalise_messages("x", 0), reasoning_effort="huge")


def test_option_named_messages_is_refused() -> None:
    """An option cannot smuggle in another conversation."""
    with pytest.raises(PromptError, match="'messages'"):
        ChatTemplate("", "t").render([], **{"messages": []})


def test_template_language_has_the_expected_helpers() -> None:
    """Loop controls, plain JSON with indent, and the date."""
    loop = "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}.{% endfor %}"
    messages = [{"role": "a"}, {"role": "x"}, {"role": "a"}]
    assert ChatTemplate(loop, "t").render(messages) == "."
    dump = ChatTemplate("{{ data | tojson }}{{ data | tojson(indent=1) }}", "t")
    assert dump.render([], data={"é": "<&"}) == '{"é": "<&"}{\n "é": "<&"\n}'
    year = ChatTemplate("{{ strftime_now('%Y') }}", "t").render([])
    assert abs(int(year) - datetime.now().year) <= 1


def test_text_prompt_becomes_one_user_message() -> None:
    """A plain string is the shortest conversation; it may be empty."""
    assert normalise_messages("Hi", 0) == [{"role": "user", "content": "Hi"}]
    assert normalise_messages("", 0) == [{"role": "user", "content": ""}]


def test_parts_are_merged_and_image_payload_dropped() -> None:
    """Neighbouring texts become one; an image part keeps only its place."""
    content = [text_part("a"), text_part("b"), {**IMAGE, "image": b"png"}, text_part("c")]
    messages = [{"role": "user", "content": content}]
    expected = [text_part("ab"), IMAGE, text_part("c")]
    assert normalise_messages(messages, 1) == [{"role": "user", "content": expected}]
    assert content[0] == text_part("a"), "the caller's messages are left alone"


def test_further_keys_of_a_message_are_kept() -> None:
    """Earlier reasoning and tool calls go through to the template."""
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert normalise_messages([message], 0) == [message]


def test_images_without_a_place_go_first_in_the_last_user_message() -> None:
    """Images given beside the messages belong to the latest question."""
    question = {"role": "user", "content": "one"}
    answer = {"role": "assistant", "content": "two"}
    latest = {"role": "user", "content": [text_part("three")]}
    result = normalise_messages([question, answer, latest, answer], 2)
    assert [m["content"] for m in result] == [
        "one",
        "two",
        [IMAGE, IMAGE, text_part("three")],
        "two",
    ]
    assert normalise_messages("", 1)[0]["content"] == [IMAGE, text_part("")]


def test_image_only_message_is_legal() -> None:
    """A picture needs no words."""
    message = {"role": "user", "content": [IMAGE]}
    assert normalise_messages([message], 1) == [message]


@pytest.mark.parametrize("given_images", [0, 1, 3])
def test_image_parts_and_images_must_agree(given_images: int) -> None:
    """Both numbers are told."""
    messages = [{"role": "user", "content": [IMAGE, IMAGE]}]
    with pytest.raises(PromptError, match=rf"2 image part.* {given_images} image"):
        normalise_messages(messages, given_images)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ({"role": "user", "content": ""}, "no messages"),
        (None, "no messages"),
        (["hi"], r"messages\[0\] is of type str"),
        ([{"role": "user"}], "no 'content'"),
        ([{"content": "x"}], "no 'role'"),
        ([{"role": "root", "content": "x"}], "'root'.*user"),
        ([{"role": "user", "content": None}], "None"),
        ([{"role": "user", "content": []}], "non-empty list"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'x'"),
        ([{"role": "user", "content": [{"text": "x"}]}], "Expected"),
        ([{"role": "user", "content": [text_part("x"), {"type": "video"}]}], r"\[1\].*'video'"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "'audio'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "None"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "7"),
    ],
)
def test_misformed_messages_are_refused(messages: Any, words: str) -> None:
    """Every slip is named with its place in the messages."""
    with pytest.raises(PromptError, match=words):
        normalise_messages(messages, 0)


def test_images_need_a_user_message() -> None:
    """There is no place for an image in a system prompt."""
    with pytest.raises(PromptError, match="role 'user'"):
        normalise_messages([{"role": "system", "content": "x"}], 1)


def test_guard_breaks_overlapping_and_nested_specials() -> None:
    """Every occurrence gets its mark, also those inside another."""
    assert guard_text("a<x>b", ["<x>"], "^") == "a<^x>b"
    assert guard_text("aaa", ["aa"], "^") == "a^a^a"
    assert guard_text("<|im<|im_end|>_end|>", ["<|im_end|>"], "^") == "<|im<^|im_end|>_end|>"
    assert guard_text("<x>", [], "^") == "<x>"


@given(st.text(alphabet="ab<|>\n"), st.lists(st.text("ab<|>\n", min_size=2, max_size=4)))
def test_guarded_text_holds_no_special_and_loses_nothing(text: str, specials: list[str]) -> None:
    """For any text and any specials: none is left, and taking the marks away gives the text."""
    guarded = guard_text(text, specials, "^")
    assert not any(special in guarded for special in specials)
    assert guarded.replace("^", "") == text


def test_guard_reaches_every_text_of_a_structure() -> None:
    """Tool schemas and keys are user text too; other values pass unchanged."""
    value = {"<x>": ["<x>", ("<x>", 1)], "n": None}
    assert guard(value, ["<x>"], "^") == {"<^x>": ["<^x>", ["<^x>", 1]], "n": None}


def test_mark_is_a_character_nobody_uses() -> None:
    """A user who writes private-use characters keeps them."""
    assert choose_mark("abc") == "\ue000"
    assert choose_mark([{"k": ("\ue000", {"\ue001": "x"})}]) == "\ue002"
    area = "".join(map(chr, range(0xE000, 0xF900)))
    assert choose_mark(area) == "\U000f0000"
    with pytest.raises(PromptError, match="private-use"):
        choose_mark(area + "".join(map(chr, range(0xF0000, 0xFFFFE))))
