"""Makes chat_renderings.json: what transformers renders from the real chat templates.

Run by hand, once, where transformers is installed: make_chat_renderings.py TEMPLATE_FOLDER.
It uses none of this project's code, so that the golden file is an independent witness.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

Messages = list[dict[str, Any]]
IMAGE = {"type": "image"}
TEMPLATES = ("qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
DIALOGUE: Messages = [
    {"role": "system", "content": " Answer in one word.\n"},
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is this?  "}]},
    {"role": "assistant", "content": "<think>\nIt purrs.\n</think>\n\nA cat"},
    {"role": "user", "content": [{"type": "text", "text": "And 日本 👍🏽?\n\n<b>&amp;</b>"}]},
]
REASONED: Messages = [
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
    {"role": "user", "content": "3+3"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "météo",
        "description": "Says <how> the weather is & will be in 東京",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLED: Messages = [
    {"role": "user", "content": "Rain in 東京?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "météo", "arguments": {"city": "東京", "days": [1]}}}],
    },
    {"role": "tool", "content": "dry"},
]


def user(*content: Any) -> Messages:
    """Return one user message, of a text or of parts."""
    return [{"role": "user", "content": content[0] if len(content) == 1 else list(content)}]


def cases() -> dict[str, tuple[Messages, dict[str, Any]]]:
    """Return messages and template options by the name of the case."""
    text = {"type": "text", "text": "Describe it."}
    pictures = user({"type": "text", "text": "Left "}, IMAGE, {"type": "text", "text": "to"}, IMAGE)
    return {
        "text only": (user("Hello\n world"), {}),
        "empty text": (user(""), {}),
        "one image": (user(IMAGE, text), {}),
        "image only": (user([IMAGE]), {}),
        "two images": (pictures, {}),
        "two images, numbered": (pictures, {"add_vision_id": True}),
        "dialogue": (DIALOGUE, {}),
        "thinking off": (user(IMAGE, text), {"enable_thinking": False}),
        "thinking on": (DIALOGUE, {"enable_thinking": True}),
        "no generation prompt": (DIALOGUE, {"add_generation_prompt": False}),
        "reasoning content": (REASONED, {}),
        "reasoning kept": (REASONED, {"preserve_thinking": True}),
        "low effort": (user(text["text"]), {"reasoning_effort": "low"}),
        "medium effort": (DIALOGUE, {"reasoning_effort": "medium"}),
        "a tool": (user("Rain?"), {"tools": [TOOL]}),
        "a tool's answer": (CALLED, {"tools": [TOOL]}),
    }


def render(source: str, messages: Messages, options: dict[str, Any]) -> str:
    """Return the prompt that transformers makes."""
    arguments = {"add_generation_prompt": True, **options}
    # One conversation in, so the first list of the answer has one text.
    return render_jinja_template([messages], chat_template=source, **arguments)[0][0]


def main() -> None:
    """Write chat_renderings.json next to this file, from the template folder in argument 1."""
    folder = Path(sys.argv[1])
    entries = [
        {
            "template": name,
            "case": case,
            "messages": messages,
            "options": options,
            "rendered": render((folder / f"{name}.jinja").read_text("utf-8"), messages, options),
        }
        for name in TEMPLATES
        for case, (messages, options) in cases().items()
    ]
    target = Path(__file__).with_name("chat_renderings.json")
    target.write_text(json.dumps(entries, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
