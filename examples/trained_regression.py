"""Tokens accepted after an image, with blocks at `pos_next` and with blocks at the token count.

    python examples/trained_regression.py TARGET DRAFT [--images 24]

The folders hold a trained Qwen3-VL target that can read text and its trained DFlash drafter. The
second column of the table is the bug of llama.cpp#28715.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.dflash import DFlash
from dflash_onnx.runtime.drafters.policy import HolePolicy, HoleSettings
from dflash_onnx.runtime.drafters.token_count import AtTokenCount
from dflash_onnx.runtime.results import Result

PROMPT = "Read as JSON."
CELL, LINES, COLUMNS = 32, 3, 10
WORDS = (
    "account address amount apple bank book bridge city clock cloud coffee color country date "
    "day door email field fish flower garden green hand hotel house invoice island kitchen lake "
    "letter light market milk money month morning name night number office order page paper "
    "person phone picture price red river school street summer table ticket total train tree "
    "water week white window winter world year"
).split()


def text_image(rng: np.random.Generator) -> Image.Image:
    """Three lines of two words each on a grid of 3 x 10 cells."""
    image = Image.new("RGB", (COLUMNS * CELL, LINES * CELL), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(22)
    for i in range(LINES):
        draw.text((6, i * CELL + 3), " ".join(rng.choice(WORDS, 2)), fill="black", font=font)
    return image


def answer(model: Model, image: Image.Image, drafter: DFlash | str, tokens: int) -> Result:
    """One greedy answer in a conversation of its own."""
    content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    messages = [{"role": "user", "content": content}]
    conversation = model.conversation(drafter)
    return conversation.generate(messages, [image], max_new_tokens=tokens).result()


def measure(model: Model, images: list[Image.Image], tokens: int) -> list[tuple[str, ...]]:
    """One table row per policy: first block and overall, at `pos_next` and at the token count."""
    plain = [answer(model, image, "none", tokens).token_ids for image in images]
    networks = next(iter(model.networks.values()))
    table = []
    for policy in HolePolicy:
        cells = [policy.value]
        for kind in (DFlash, AtTokenCount):
            settings = HoleSettings(policy)
            results = [answer(model, i, kind("dflash", networks, settings), tokens) for i in images]
            if [r.token_ids for r in results] != plain:
                raise SystemExit(f"{policy.value}: the text differs from plain decoding")
            first = [r.draft.tokens_per_round[0] for r in results]
            rounds = [n for r in results for n in r.draft.tokens_per_round]
            cells += [f"{np.mean(first):.2f}", f"{np.mean(rounds):.2f}"]
        table.append(tuple(cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    images = [text_image(rng) for _ in range(args.images)]
    with tempfile.TemporaryDirectory() as folder:
        options = ExportOptions(args.target, Path(folder) / "bundle", (args.draft,))
        model = Model(export_bundle(options))
        table = measure(model, images, args.max_new_tokens)
    row = "{:12} {:>8} {:>8} {:>12} {:>8}"
    print(row.format("policy", "first", "overall", "count:first", "overall"))
    for cells in table:
        print(row.format(*cells))


if __name__ == "__main__":
    main()
