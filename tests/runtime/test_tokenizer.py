"""Text to ids and back, against the tokenizers library, and user text that plays special token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support_tokenizer import PLAIN_ADDED, SPECIALS, save, small_tokenizer
from tokenizers import AddedToken, decoders

from dflash_onnx.models.errors import ManifestError, PromptError
from dflash_onnx.runtime.chat import ChatTemplate, guard_text, normalise_messages
from dflash_onnx.runtime.tokenizer import Tokenizer, encode_chat

TEMPLATES = Path(__file__).parents[1] / "golden" / "templates"
REAL_TEMPLATES = {
    path.stem: ChatTemplate(path.read_text("utf-8"), path.name)
    for path in sorted(TEMPLATES.glob("*.jinja"))
}
LIBRARY = small_tokenizer()
TOKENIZER = Tokenizer(small_tokenizer(), "tokenizer.json")
WORDS = (
    "the ",
    "cat",
    " sat",
    "\n",
    "\n\n",
    "  ",
    "👍🏽",
    "日本",
    "é",
    "e\u0301",
    "\t",
    "im_end",
    "<|",
)
PIECES = st.sampled_from([*WORDS, *SPECIALS, *PLAIN_ADDED]) | st.text(max_size=3)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
HOSTILE = st.lists(
    st.sampled_from([*SPECIALS[:3], "<|image_pad|>", "<|im", "<|", "|>", "_end|>", "<", "x", " "]),
    max_size=8,
).map("".join)


def plain_ids(text: str) -> list[int]:
    """The ids the library gives where no special token is looked for."""
    library = small_tokenizer()
    library.encode_special_tokens = True
    return library.encode(text, add_special_tokens=False).ids


def special_sequence(ids: list[int]) -> list[int]:
    return [id for id in ids if id in TOKENIZER.special_ids]


@given(TEXTS)
def test_trusted_text_is_encoded_as_by_the_library(text: str) -> None:
    """Without marks, splitting at the specials ourselves changes no id."""
    assert TOKENIZER.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


@given(st.lists(st.integers(0, 400)), st.booleans())
def test_decode_is_the_library_s(ids: list[int], skip: bool) -> None:
    """Any ids decode, unknown ones to nothing."""
    assert TOKENIZER.decode(ids, skip) == LIBRARY.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 400)))
def test_token_bytes_join_to_the_decoded_text(ids: list[int]) -> None:
    """The bytes of single tokens, put together, are what the library decodes."""
    joined = b"".join(TOKENIZER.token_bytes(id) for id in ids)
    assert joined.decode(errors="replace") == LIBRARY.decode(ids, skip_special_tokens=False)


def test_bytes_of_an_added_token_outside_the_byte_alphabet() -> None:
    """A token such as DeepSeek's with fullwidth bars stands for itself."""
    library = small_tokenizer()
    library.add_tokens(["<｜a b｜>"])
    id = library.token_to_id("<｜a b｜>")
    assert Tokenizer(library, "t").token_bytes(id).decode() == library.decode([id]) == "<｜a b｜>"


def test_guarded_special_is_ordinary_text() -> None:
    """A marked special gives the ids of its letters, an unmarked one its own id."""
    text = guard_text("see <|im_end|>", SPECIALS, "\ue000")
    ids = TOKENIZER.encode(text + "<|im_end|>", "\ue000")
    assert ids == [*plain_ids("see <|im_end|>"), LIBRARY.token_to_id("<|im_end|>")]


@given(HOSTILE)
def test_guarded_text_has_the_ids_of_plain_text(text: str) -> None:
    """However specials are nested, user text is encoded as if none existed."""
    guarded = guard_text(text, SPECIALS, "\ue000")
    assert TOKENIZER.encode(guarded, "\ue000") == plain_ids(text)


@pytest.mark.parametrize("name", REAL_TEMPLATES)
@given(texts=st.lists(HOSTILE, min_size=3, max_size=3))
def test_hostile_messages_add_no_special_token(name: str, texts: list[str]) -> None:
    """With any text in any place, the prompt has the template's special tokens and no others."""
    chat = REAL_TEMPLATES[name]

    def specials_of(system: str, first: str, second: str) -> list[int]:
        content = [{"type": "text", "text": first}, {"type": "image"}]
        content += [{"type": "text", "text": second[:3]}, {"type": "text", "text": second[3:]}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        normal = normalise_messages(messages, 1)
        return special_sequence(encode_chat(chat, TOKENIZER, normal))

    assert specials_of(*texts) == specials_of("s", "a", "b")


def test_special_split_over_two_parts_stays_text() -> None:
    """Two harmless parts do not join to a harmful one."""
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    messages = normalise_messages([{"role": "user", "content": parts}], 0)
    ids = encode_chat(ChatTemplate("{{ messages[0].content[0].text }}", "t"), TOKENIZER, messages)
    assert ids == plain_ids("<|im_end|>")


def test_hostile_tool_schema_adds_no_special_token() -> None:
    """Template options carry user text as well."""
    messages = normalise_messages("hi", 0)

    def count(text: str) -> int:
        tools = [{"function": {"name": text, text: [text]}}]
        ids = encode_chat(REAL_TEMPLATES["qwen3_vl"], TOKENIZER, messages, tools=tools)
        return len(special_sequence(ids))

    assert count("<|im_end|>") == count("x")


def test_private_use_characters_of_the_user_survive() -> None:
    """The mark is chosen so that no character of the message is lost."""
    content = "\ue000<|im_end|>\ue001"
    messages = normalise_messages(content, 0)
    ids = encode_chat(ChatTemplate("{{ messages[0].content }}", "t"), TOKENIZER, messages)
    assert TOKENIZER.decode(ids, skip_special=False) == content


@pytest.mark.parametrize("chat", REAL_TEMPLATES.values(), ids=REAL_TEMPLATES)
def test_encoded_chat_is_the_rendered_prompt(chat: ChatTemplate) -> None:
    """For harmless messages nothing changes: one placeholder per image, the library's ids."""
    messages = normalise_messages("What is 日本 <think>?", 2)
    ids = encode_chat(chat, TOKENIZER, messages, enable_thinking=False)
    rendered = chat.render(messages, enable_thinking=False)
    assert ids == LIBRARY.encode(rendered, add_special_tokens=False).ids
    assert ids.count(LIBRARY.token_to_id("<|image_pad|>")) == 2


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_flags_of_special_tokens_are_heeded(flags: dict[str, Any]) -> None:
    """Tokens that take in the spaces around them, or stand alone, do so as in the library."""

    def library() -> tokenizers.Tokenizer:
        made = small_tokenizer()
        made.add_special_tokens([AddedToken("[M]", normalized=False, **flags)])
        return made

    for text in ("a [M] b", "[M]", "  [M]\n\nx[M]", "a[M]b [M]", "[M][M] [M]"):
        expected = library().encode(text, add_special_tokens=False).ids
        assert Tokenizer(library(), "t").encode(text) == expected, text


def test_longest_special_wins_and_a_single_character_can_be_guarded() -> None:
    """A special token inside a longer one, and one too short for a mark in its middle."""
    library = small_tokenizer()
    library.add_special_tokens(["€", "€€x"])
    tokenizer = Tokenizer(library, "t")
    short, long = library.token_to_id("€"), library.token_to_id("€€x")
    assert tokenizer.encode("€€x€") == [long, short]
    guarded = guard_text("€€x€", tokenizer.special_strings, "\ue000")
    assert not set(tokenizer.encode(guarded, "\ue000")) & {short, long}


def test_tokenizer_without_specials() -> None:
    """A tokenizer.json without added tokens is legal."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    library.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(library, "t")
    assert tokenizer.encode("aa") == [0, 0]
    assert tokenizer.special_ids == frozenset() and tokenizer.special_strings == ()


def test_facts_of_the_vocabulary(tmp_path: Path) -> None:
    """Sizes, ids and special tokens come from the file."""
    tokenizer = Tokenizer.from_file(save(LIBRARY, tmp_path))
    assert tokenizer.vocab_size == LIBRARY.get_vocab_size()
    assert tokenizer.token_id("<think>") == LIBRARY.token_to_id("<think>")
    assert tokenizer.token_id("no such token") is None
    assert set(tokenizer.special_strings) == set(SPECIALS)
    assert tokenizer.special_ids == {LIBRARY.token_to_id(special) for special in SPECIALS}


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    """Settings for training do not cut prompts."""
    library = small_tokenizer()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    text = "the cat sat on the mat"
    assert Tokenizer.from_file(save(library, tmp_path)).encode(text) == TOKENIZER.encode(text)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    """A bundle problem names the file and what to do."""
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ManifestError, match=re.escape(f"{path} is missing")):
        Tokenizer.from_file(path)
    path.write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ManifestError, match=re.escape(str(path)) + " cannot be read"):
        Tokenizer.from_file(path)


def test_other_kinds_of_tokenizer_are_refused() -> None:
    """A SentencePiece-like decoder would make wrong text; it is refused by name."""
    library = small_tokenizer()
    library.decoder = decoders.ByteFallback()
    with pytest.raises(ManifestError, match="ByteFallback"):
        Tokenizer(library, "t")


def test_lone_surrogate_is_a_prompt_error() -> None:
    """Half a character, as from a badly decoded file, is refused in words."""
    with pytest.raises(PromptError, match="lone surrogate"):
        TOKENIZER.encode("a\ud800")
