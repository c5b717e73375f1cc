"""The demo command: the bundled miniature reads a picture, speculatively, and proves it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .demo import (
    LINES,
    QUESTION,
    Demonstration,
    cache_folder,
    demonstrate,
    miniature_bundle,
    sample_page,
    save_page,
)
from .drafters.policy import HolePolicy
from .images import ImageSource
from .model import load
from .results import Delta, Result


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser("demo", help="the bundled miniature reads a picture")
    parser.add_argument("prompt", nargs="?", default=QUESTION, metavar="PROMPT")
    parser.add_argument("--image", metavar="F", help="a picture of a few lines of text")
    parser.add_argument("--draft", metavar="NAME", help="dflash, dflash2, lookup or none")
    policies = ", ".join(p.value for p in HolePolicy)
    parser.add_argument("--holes", metavar="POLICY", help=policies)
    parser.add_argument("--cache", type=Path, metavar="DIR", help="where the bundle is kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def execute(options: argparse.Namespace) -> None:
    """Export on first use, answer, compare, and say what happened."""
    cache = options.cache or cache_folder()
    bundle = miniature_bundle(cache)
    image = options.image or _drawn(cache, options.json)
    shown = _nothing if options.json else _show
    done = demonstrate(load(bundle), image, options.prompt, options.draft, options.holes, shown)
    if options.json:
        print(json.dumps(_summary(done, bundle), ensure_ascii=False))
    else:
        print()
        print(_report(done, bundle), file=sys.stderr)
    if not done.equal:
        raise SystemExit(1)


def _drawn(cache: Path, silent: bool) -> ImageSource:
    page = sample_page()
    path = cache / "miniature-page.png"
    save_page(page, path)
    if not silent:
        print(f"picture   {path}, which says {' / '.join(LINES)}", file=sys.stderr)
    return page


def _show(delta: Delta) -> None:
    print(delta.text, end="", flush=True)


def _nothing(delta: Delta) -> None:
    """Nothing is shown before the JSON object."""


def _summary(done: Demonstration, bundle: Path) -> dict:
    plain = done.plain.to_json()
    return done.speculative.to_json() | {
        "equals_plain": done.equal,
        "plain_tokens_per_second": plain["timings"]["tokens_per_second"],
        "bundle": str(bundle),
    }


def _report(done: Demonstration, bundle: Path) -> str:
    result: Result = done.speculative
    draft, plain = result.draft, done.plain.timings.tokens_per_second
    speed = result.timings.tokens_per_second
    verdict = "equals" if done.equal else "DIFFERS FROM"
    return "\n".join(
        (
            f"answer    {verdict} the plain run, {result.output_tokens} tokens",
            f"drafting  {draft.name} ({draft.state}, holes {draft.policy}): "
            f"{draft.mean_accepted_length:.2f} tokens per target call",
            f"speed     {speed:.0f} tokens/s with drafts, {plain:.0f} plain",
            f"holes     {len(draft.holes)}, {draft.seeded_rows} seeded rows, "
            f"{draft.skipped_spans} skipped spans",
            f"bundle    {bundle}",
        )
    )
