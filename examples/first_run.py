"""The main job from nothing: a seeded tiny checkpoint is exported and answers about an image.

The weights are random, so the text means nothing; what it shows is that the export, the vision
tower, the drafter and the verification work on this machine, and that drafting changes no token.
Usage: python examples/first_run.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model, load
from dflash_onnx.runtime.cli_run import format_stats
from dflash_onnx.runtime.selfcheck import self_check


def draw(text: str) -> Image.Image:
    """A small picture with a line of text."""
    image = Image.new("RGB", (256, 64), "white")
    ImageDraw.Draw(image).text((8, 16), text, font=ImageFont.load_default(22), fill="black")
    return image


def make_bundle(folder: Path) -> Path:
    """Make a checkpoint pair and export it."""
    make_target(folder / "target")
    make_draft(folder / "draft", folder / "target")
    options = ExportOptions(
        folder / "target", folder / "bundle", (folder / "draft",), force=True, progress=True
    )
    return export_bundle(options, self_check)


def answer(model: Model, image: Image.Image, draft: str) -> tuple[int, ...]:
    """One answer with one drafter; prints its statistics."""
    generation = model.generate("Read the text.", [image], draft=draft, max_new_tokens=48)
    result = generation.result()
    print(f"--- draft {draft}: {result.text!r}\n{format_stats(result)}")
    return result.token_ids


def main() -> int:
    """Export, answer with every drafter, compare."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="dflash-onnx-"))
    bundle = make_bundle(folder)
    model, image = load(bundle), draw("Invoice 4821")
    plain = answer(model, image, "none")
    same = [answer(model, image, draft) == plain for draft in ("lookup", "dflash")]
    print(f"bundle: {bundle}\nspeculative answers equal the plain one: {all(same)}")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
