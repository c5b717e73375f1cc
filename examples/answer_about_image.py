"""Embed the runtime: load a bundle, stream an answer about an image, print the statistics.

Usage: python examples/answer_about_image.py BUNDLE IMAGE [PROMPT]
"""

from __future__ import annotations

import sys

from dflash_onnx.runtime import load


def main(bundle: str, image: str, prompt: str = "Read the text.") -> None:
    """Stream the answer to stdout and its statistics to stderr."""
    generation = load(bundle).generate(prompt, images=[image], max_new_tokens=256)
    for delta in generation:
        print(delta.text, end="", flush=True)
    draft = generation.result().draft
    print(f"\n{draft.name}: {draft.mean_accepted_length:.2f} tokens per call", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
