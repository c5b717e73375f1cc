"""A conversation of several turns: earlier rows are reused, pictures are not read twice.

Usage: python examples/chat_with_images.py BUNDLE IMAGE...
"""

from __future__ import annotations

import sys
from typing import Any

from dflash_onnx.runtime import load


def main(bundle: str, *images: str) -> None:
    """Ask two questions about the same pictures."""
    conversation = load(bundle).conversation()
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in images]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "Read the text."}]}
    ]
    for question in ("Read as JSON.", "Thank you."):
        result = conversation.generate(messages, images, max_new_tokens=128).result()
        timings = result.timings
        print(f"{result.text}\n({timings.reused_rows} rows reused, {timings.prefilled_rows} new)")
        messages.append({"role": "assistant", "content": result.text})
        messages.append({"role": "user", "content": question})


if __name__ == "__main__":
    main(*sys.argv[1:])
