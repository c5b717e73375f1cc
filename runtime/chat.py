"""Chat messages and the model's own Jinja template: from what a user sends to the prompt text.

Knows the message format, how images without a place get one, and how text from the user is kept
from spelling special tokens. Knows no token ids and no image sizes: one placeholder per image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from reprlib import repr as brief
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from ..models.errors import ManifestError, PromptError
from ..models.prompt_files import compile_template

Messages = str | Sequence[Mapping[str, Any]]

ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """A compiled chat template; ManifestError if its Jinja source is damaged."""

    def __init__(self, source: str, where: str) -> None:
        """Compile `source`; `where` names its file in error messages."""
        self.source = source
        self._where = where
        try:
            self._template = compile_template(source)
        except TemplateSyntaxError as error:
            raise ManifestError(
                f"The chat template {where} is not valid Jinja at line {error.lineno}: "
                f"{error.message}. "
                "Restore the file from the checkpoint or export the bundle again."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """Return the prompt text; PromptError with the template's words if it refuses."""
        if "messages" in options:
            raise PromptError(
                "The template option 'messages' is taken by the conversation itself. Rename it."
            )
        names = {"messages": messages, "add_generation_prompt": add_generation_prompt, **options}
        try:
            return self._template.render(names)
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError(
                f'The chat template {self._where} refused the messages: "{error}" '
                "Change the messages or the template options."
            ) from error


def normalise_messages(messages: Messages, num_images: int) -> list[dict[str, Any]]:
    """Return messages in one shape, with `num_images` image parts; PromptError if they misfit."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise PromptError(
            "The prompt holds no messages. Expected a text or a non-empty list of messages "
            f"with 'role' and 'content', got {brief(messages)}."
        )
    result = [_normalise_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    found = sum(_count_images(message) for message in result)
    if found == 0 and num_images > 0:
        _put_images_first(result, num_images)
    elif found != num_images:
        raise PromptError(
            f"The messages hold {found} image part(s), but {num_images} image(s) were given. "
            'Give one image per {"type": "image"} part, in the same order.'
        )
    return result


def carried_images(messages: Messages) -> list[Any]:
    """Pictures that image parts carry themselves, {"type": "image", "image": ...}, in order."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return []
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    parts = [p for c in contents if isinstance(c, Sequence) and not isinstance(c, str) for p in c]
    images = [p.get("image") for p in parts if isinstance(p, Mapping) and p.get("type") == "image"]
    return [image for image in images if image is not None]


def guard_text(text: str, specials: Sequence[str], mark: str) -> str:
    """Return `text` with `mark` after the first character of every special string in it."""
    if not specials:
        return text
    # The lookahead takes up one character only, so occurrences inside each other are all marked.
    anywhere = "|".join(re.escape(special) for special in specials)
    return re.sub(f"(?=(?:{anywhere}))(.)", lambda m: m[1] + mark, text, flags=re.DOTALL)


def guard(value: Any, specials: Sequence[str], mark: str) -> Any:
    """Return a copy of nested dicts and lists in which `guard_text` went over every text."""
    if isinstance(value, str):
        return guard_text(value, specials, mark)
    if isinstance(value, Mapping):
        return {guard(k, specials, mark): guard(v, specials, mark) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [guard(item, specials, mark) for item in value]
    return value


def choose_mark(*values: Any) -> str:
    """Return a private-use character found in no text of `values`; PromptError if none is left."""
    used = set(chain.from_iterable(_texts(values)))
    private_use = chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
    for mark in map(chr, private_use):
        if mark not in used:
            return mark
    raise PromptError("The messages use every private-use character; remove some from U+E000 on.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _normalise_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(
            f"{where} is of type {type(message).__name__}. "
            "Expected a dict with 'role' and 'content'."
        )
    for key in ("role", "content"):
        if key not in message:
            raise PromptError(f"{where} has no '{key}'. Found the keys {list(message)}; add it.")
    if message["role"] not in ROLES:
        raise PromptError(
            f"{where} has the role {message['role']!r}. Use one of {', '.join(ROLES)}."
        )
    return {**message, "content": _normalise_content(message["content"], f"{where}.content")}


def _normalise_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or not content:
        raise PromptError(
            f"{where} is {brief(content)}. Expected a text (which may be empty) "
            "or a non-empty list of text and image parts."
        )
    parts: list[dict[str, Any]] = []
    for index, raw in enumerate(content):
        part = _normalise_part(raw, f"{where}[{index}]")
        # Merged, so that a special token spelled across two parts is seen by the guard.
        if parts and part["type"] == parts[-1]["type"] == "text":
            parts[-1]["text"] += part["text"]
        else:
            parts.append(part)
    return parts


def _normalise_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise PromptError(
            f"{where} is {brief(part)}. Expected a dict with the 'type' 'text' (and a 'text') "
            "or 'image'."
        )
    if kind == "image":
        return {"type": "image"}
    if kind != "text":
        raise PromptError(
            f"{where} has the type {kind!r}. Only 'text' and 'image' parts are supported; "
            "remove it or describe it in words."
        )
    if not isinstance(part.get("text"), str):
        raise PromptError(
            f"{where} is a text part, but its 'text' is {brief(part.get('text'))}. "
            "Expected a string, which may be empty."
        )
    return {"type": "text", "text": part["text"]}


def _count_images(message: Mapping[str, Any]) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)


def _put_images_first(messages: list[dict[str, Any]], num_images: int) -> None:
    for message in reversed(messages):
        if message["role"] == "user":
            content = message["content"]
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message["content"] = [{"type": "image"} for _ in range(num_images)] + texts
            return
    raise PromptError(
        f"{num_images} image(s) were given, but no message has the role 'user' to put them in. "
        "Add a user message."
    )
