"""The README's pictures: a page with the answer, and acceptance by position in the block.

Usage: python examples/pictures.py [FOLDER]   (needs nothing but the package)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dflash_onnx.runtime import Model, load
from dflash_onnx.runtime.cli_bench import held_out
from dflash_onnx.runtime.demo import QUESTION, cache_folder, miniature_bundle, sample_page
from dflash_onnx.runtime.results import Round

NUM_PROMPTS = 100
COLORS = {"dflash": "#3465a4", "dflash2": "#cc7a00"}
BAR, GAP, HEIGHT, MARGIN = 26, 14, 240, 56


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font."""
    return ImageFont.load_default(size)


def demo_picture(model: Model) -> Image.Image:
    """The sample page beside what the miniature read, with the tokens of each target call."""
    page = sample_page()
    generation = model.generate(QUESTION, [page])
    result = generation.result()
    height, width = page.shape[:2]
    picture = Image.new("RGB", (2 * width + 120, height + 60), "#f2f2f2")
    picture.paste(Image.fromarray(page), (20, 20))
    draw = ImageDraw.Draw(picture)
    for i, line in enumerate(result.text.splitlines()):
        draw.text((width + 70, 24 + 32 * i), line, font=font(20), fill="#1a1a1a")
    draft = result.draft
    note = f"{draft.mean_accepted_length:.1f} tokens per target call, holes {draft.policy}"
    draw.text((20, height + 30), note, font=font(15), fill="#555555")
    return picture


def acceptance(rounds: Iterable[Round], positions: int) -> list[float]:
    """Share of rounds in which the draft at each position of the block was accepted."""
    full = [r for r in rounds if len(r.drafted) == positions]
    return [sum(r.accepted > j for r in full) / max(1, len(full)) for j in range(positions)]


def rounds_of(model: Model, draft: str) -> list[Round]:
    """All rounds on held-out prompts with one drafter."""
    rounds: list[Round] = []
    for prompt in held_out(0, NUM_PROMPTS):
        generation = model.generate(prompt.text, prompt.images, draft, max_new_tokens=160)
        generation.result()
        rounds += generation.rounds
    return rounds


def acceptance_picture(shares: dict[str, list[float]]) -> Image.Image:
    """Grouped bars, one group per position of the block."""
    count = max(len(s) for s in shares.values())
    group = len(shares) * BAR + GAP
    picture = Image.new("RGB", (MARGIN + count * group + 20, HEIGHT + 2 * MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    floor = MARGIN + HEIGHT
    title = f"accepted drafts by position in the block, {NUM_PROMPTS} held-out prompts"
    draw.text((MARGIN, 12), title, font=font(15), fill="#1a1a1a")
    for share in (0, 0.5, 1):
        y = floor - int(share * HEIGHT)
        draw.line((MARGIN - 4, y, picture.width - 16, y), fill="#dddddd")
        draw.text((14, y - 8), f"{share:.0%}", font=font(13), fill="#555555")
    for i, (name, values) in enumerate(shares.items()):
        draw.text((MARGIN + 90 * i, floor + 28), name, font=font(15), fill=COLORS[name])
        for j, value in enumerate(values):
            x = MARGIN + j * group + i * BAR
            draw.rectangle((x, floor - int(value * HEIGHT), x + BAR - 3, floor), fill=COLORS[name])
    for j in range(count):
        draw.text((MARGIN + j * group + BAR - 6, floor + 6), str(j + 1), font=font(13), fill="#555")
    return picture


def main(folder: str = "docs") -> None:
    """Write both pictures."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    model = load(miniature_bundle(cache_folder()))
    demo_picture(model).save(out / "demo.png")
    shares = {
        name: acceptance(rounds_of(model, name), networks.block_size - 1)
        for name, networks in sorted(model.networks.items())
    }
    acceptance_picture(shares).save(out / "acceptance.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
