"""The answer's token ids to text, one token at a time, and where the answer stops.

Knows about characters split over tokens and about stop strings. Knows no sampling, no limits on
the answer's length, and looks at a bounded stretch of text per token, however long the answer.
"""

from __future__ import annotations

import codecs
from typing import Literal

from ..models.errors import PromptError
from .tokenizer import Tokenizer

FinishReason = Literal["stop"]


class OutputText:
    """Text of one answer, handed out in pieces that never have to be taken back."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: frozenset[int], stop_strings: tuple[str, ...] = ()
    ) -> None:
        """Start an empty answer; PromptError if a stop string is empty or no text."""
        _check_stop_strings(stop_strings)
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stop_strings = stop_strings
        # Holds back an incomplete character, at most three bytes, until its fate is known.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._settled: list[str] = []
        self._taken = 0
        # Text that may turn out to be the beginning of a stop string.
        self._held = ""
        self._closed = False
        self._finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The text so far, cut before a completed stop string."""
        return "".join(self._settled) + self._held

    @property
    def finish_reason(self) -> FinishReason | None:
        """The value "stop" after a stop token or stop string, None before."""
        return self._finish_reason

    def push(self, token_id: int) -> bool:
        """Take the next token; True when it finishes the answer. Later tokens are ignored."""
        if self._closed:
            return True
        if token_id in self._stop_ids:
            self._close()
            self._finish_reason = "stop"
        elif token_id not in self._tokenizer.special_ids:
            self._add(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return self._closed

    def take_delta(self) -> str:
        """Return the text that became safe to show since the last call."""
        delta = "".join(self._settled[self._taken :])
        self._taken = len(self._settled)
        return delta

    def finish(self) -> str:
        """End the answer and return all text not yet taken; a cut-off character is U+FFFD."""
        self._close()
        return self.take_delta()

    def _close(self) -> None:
        if not self._closed:
            self._add(self._utf8.decode(b"", final=True))
            self._settle(self._held, "")
            self._closed = True

    def _add(self, new: str) -> None:
        if not new:
            return
        if not self._stop_strings:
            self._settled.append(new)
            return
        window = self._held + new
        cut = _first_stop(window, self._stop_strings)
        if cut is None:
            keep = _possible_stop_length(window, self._stop_strings)
            self._settle(window[: len(window) - keep], window[len(window) - keep :])
        else:
            self._settle(window[:cut], "")
            self._closed = True
            self._finish_reason = "stop"

    def _settle(self, text: str, held: str) -> None:
        if text:
            self._settled.append(text)
        self._held = held


def _check_stop_strings(stop_strings: tuple[str, ...]) -> None:
    for index, stop in enumerate(stop_strings):
        if not isinstance(stop, str) or not stop:
            raise PromptError(
                f"Stop string {index} is {stop!r}. "
                "Expected a text of at least one character; remove it or write it out."
            )


def _first_stop(window: str, stop_strings: tuple[str, ...]) -> int | None:
    """Where the stop string that completes first begins, the longest of equals."""
    found = [(window.find(stop), len(stop)) for stop in stop_strings]
    # By its end, not its beginning: that is what pushing one character at a time would find.
    ends = [(start + length, start) for start, length in found if start >= 0]
    return min(ends)[1] if ends else None


def _possible_stop_length(window: str, stop_strings: tuple[str, ...]) -> int:
    """Number of characters at the end of `window` that may begin a stop string."""
    lengths = (_overlap(window, stop) for stop in stop_strings)
    return max(lengths, default=0)


def _overlap(window: str, stop: str) -> int:
    for length in range(min(len(window), len(stop) - 1), 0, -1):
        if window.endswith(stop[:length]):
            return length
    return 0
