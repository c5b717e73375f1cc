"""Tokens to text piece by piece: split characters, bad bytes, stop tokens and stop strings."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_tokenizer import SPECIALS, small_tokenizer, spelled, substring_tokenizer

from dflash_onnx.models.errors import PromptError
from dflash_onnx.runtime.output_text import OutputText
from dflash_onnx.runtime.tokenizer import Tokenizer

TOKENIZER = Tokenizer(small_tokenizer(), "t")
STORY = "ob 👍🏽 ke 똻 日本"
STRETCHES = Tokenizer(substring_tokenizer(STORY), "t")
BYTE_IDS = {
    TOKENIZER.token_bytes(id): id
    for id in range(TOKENIZER.vocab_size)
    if len(TOKENIZER.token_bytes(id)) == 1
}
EOS = TOKENIZER.token_id("<|im_end|>") or 0


def byte_ids(data: bytes) -> list[int]:
    """One token per byte."""
    return [BYTE_IDS[bytes([value])] for value in data]


def stretch_ids(word: str, cuts: tuple[int, ...]) -> list[int]:
    """The tokens of `word` cut at these offsets in bytes."""
    edges = [0, *cuts, len(word)]
    ids = [STRETCHES.token_id(word[a:b]) for a, b in zip(edges, edges[1:], strict=False) if a < b]
    return [id for id in ids if id is not None]


def deltas_of(output: OutputText, ids: list[int]) -> list[str]:
    """Push until the answer is finished; the text after every token and the rest."""
    deltas = []
    for id in ids:
        done = output.push(id)
        deltas.append(output.take_delta())
        if done:
            break
    return [*deltas, output.finish()]


@pytest.mark.parametrize("cuts", [1, 2])
def test_every_split_of_the_story(cuts: int) -> None:
    """Wherever the tokens end, pieces are whole characters and join to the story."""
    word = spelled(STORY)
    for where in combinations(range(1, len(word)), cuts):
        deltas = deltas_of(OutputText(STRETCHES, frozenset()), stretch_ids(word, where))
        assert "".join(deltas) == STORY
        assert "\ufffd" not in "".join(deltas)
        assert deltas[-1] == ""


def test_characters_appear_with_their_last_byte() -> None:
    """Byte by byte, a character is shown exactly when it is complete."""
    data = STORY.encode()
    output = OutputText(TOKENIZER, frozenset())
    for count, id in enumerate(byte_ids(data), start=1):
        output.push(id)
        output.take_delta()
        assert output.text == data[:count].decode(errors="ignore")


@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 5)), st.data())
def test_any_tokens_give_the_library_s_text(ids: list[int], data: st.DataObject) -> None:
    """Specials, unknown ids and broken bytes in any order, taken at any time."""
    output = OutputText(TOKENIZER, frozenset())
    shown = ""
    for id in ids:
        assert not output.push(id)
        if data.draw(st.booleans()):
            shown += output.take_delta()
    assert shown + output.finish() == output.text == TOKENIZER.decode(ids)


@given(st.binary())
def test_any_bytes_give_the_library_s_text(data: bytes) -> None:
    """Bytes that are no UTF-8 become the same U+FFFD as in the library."""
    ids = byte_ids(data)
    assert "".join(deltas_of(OutputText(TOKENIZER, frozenset()), ids)) == TOKENIZER.decode(ids)


def test_bad_bytes_drain() -> None:
    """Bytes that can never become a character are shown at once, however many."""
    output = OutputText(TOKENIZER, frozenset())
    for id in byte_ids(b"\xff" * 40):
        output.push(id)
        assert output.take_delta() == "\ufffd"


def test_cut_off_character_is_shown_at_the_end_only() -> None:
    """Two of three bytes are held back while there is hope."""
    output = OutputText(TOKENIZER, frozenset())
    for id in byte_ids("日".encode()[:2]):
        output.push(id)
        assert output.take_delta() == output.text == ""
    assert output.finish() == output.text == "\ufffd"
    assert output.finish() == ""


def test_immediate_end_gives_no_text() -> None:
    """An answer may be empty."""
    output = OutputText(TOKENIZER, frozenset({EOS}))
    assert output.finish_reason is None
    assert output.push(EOS)
    assert (output.finish(), output.text, output.finish_reason) == ("", "", "stop")


def test_stop_token_without_special_meaning_gives_no_text() -> None:
    """Any id may be a stop id; tokens pushed after it are ignored."""
    a, b = byte_ids(b"ab")
    output = OutputText(TOKENIZER, frozenset({b}))
    assert [output.push(id) for id in (a, b, a)] == [False, True, True]
    assert output.finish() == output.text == "a"


def test_special_tokens_give_no_text_unless_they_are_plain_added_ones() -> None:
    """Chat markers are skipped, <think> is shown."""
    ids = TOKENIZER.encode("a<|im_start|><think>b")
    assert "".join(deltas_of(OutputText(TOKENIZER, frozenset()), ids)) == "a<think>b"


def test_stop_token_releases_what_was_held() -> None:
    """The beginning of a stop string that does not come is part of the answer."""
    output = OutputText(TOKENIZER, frozenset({EOS}), ("END",))
    ids = byte_ids(b"xEN")
    assert "".join(deltas_of(output, ids[:])) == output.text == "xEN"
    output = OutputText(TOKENIZER, frozenset({EOS}), ("END",))
    assert deltas_of(output, [*ids, EOS]) == ["x", "", "", "EN", ""]


def test_stop_string_across_every_split() -> None:
    """Found wherever two or three tokens divide it, never shown in part."""
    word = spelled(STORY)
    for stop, kept in ((" ke", "ob 👍🏽"), ("👍🏽 k", "ob "), ("똻 日", "ob 👍🏽 ke "), ("ob", "")):
        for where in combinations(range(1, len(word)), 2):
            output = OutputText(STRETCHES, frozenset(), (stop,))
            ids = stretch_ids(word, where)
            ends = [*where, len(word)]
            needed = len((kept + stop).encode())
            completing = next(i for i, end in enumerate(ends) if end >= needed)
            assert [output.push(id) for id in ids[: completing + 1]][-1]
            assert "".join(deltas_of(output, ids)) == output.text == kept
            assert output.finish_reason == "stop"


def test_stop_string_within_a_block_of_tokens() -> None:
    """Sixteen tokens pushed one by one: the fourth finishes, the others do not count."""
    output = OutputText(TOKENIZER, frozenset({EOS}), ("\n\n",))
    done = [output.push(id) for id in byte_ids(b"ab\n\ncdefgh\n\n1234")]
    assert done == [False] * 3 + [True] * 13
    assert output.finish() == output.text == "ab"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4)), st.data())
def test_stop_strings_do_not_depend_on_the_split(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Overlapping stop strings cut at the one completed first, in whatever pieces they come."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    end = min(ends, default=len(text))
    cut = max((len(s) for s in stops if text[:end].endswith(s)), default=0) if ends else 0
    library = small_tokenizer()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
    edges = [0, *cuts, len(text)]
    pieces = [piece for a, b in zip(edges, edges[1:], strict=False) if (piece := text[a:b])]
    library.add_tokens(sorted(set(pieces)))
    output = OutputText(Tokenizer(library, "t"), frozenset(), tuple(stops))
    ids = [library.token_to_id(piece) for piece in pieces]
    assert "".join(deltas_of(output, ids)) == output.text == text[: end - cut]
    assert output.finish_reason == ("stop" if ends else None)


@pytest.mark.parametrize(
    ("stops", "kept"),
    [(("bcd", "c"), "ab"), (("d", "bcd"), "a"), (("bcx", "cd"), "ab"), (("ax",), "abcde")],
)
@pytest.mark.parametrize("in_one_token", [True, False])
def test_stop_string_completed_first_cuts(
    stops: tuple[str, ...], kept: str, in_one_token: bool
) -> None:
    """One token may complete several; the result is that of single characters."""
    library = small_tokenizer()
    library.add_tokens(["abcde"])
    ids = [library.token_to_id("abcde")] if in_one_token else byte_ids(b"abcde")
    output = OutputText(Tokenizer(library, "t"), frozenset(), stops)
    assert "".join(deltas_of(output, ids)) == output.text == kept


@pytest.mark.parametrize("stops", [("",), ("a", ""), (7,)])
def test_empty_stop_string_is_refused(stops: tuple[str, ...]) -> None:
    """It would stop everywhere."""
    with pytest.raises(PromptError, match="[Ss]top string"):
        OutputText(TOKENIZER, frozenset(), stops)


def test_all_special_tokens_are_skipped() -> None:
    """Whatever chat markers a model emits in the middle, the text has none."""
    ids = [id for id in map(TOKENIZER.token_id, SPECIALS) if id is not None]
    assert deltas_of(OutputText(TOKENIZER, frozenset()), ids) == [""] * (len(SPECIALS) + 1)
