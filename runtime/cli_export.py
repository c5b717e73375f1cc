"""The export command: options in, a checked bundle out.

Imports `export` and the self-check only when it runs, while the tokenizer is already being read.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..models.draft_config import MEDIA_ANSWERS
from ..models.manifest import read_manifest
from ..models.precision import PRECISIONS

if TYPE_CHECKING:
    from ..export.bundle import ExportOptions
    from .half_cast import HalfCast


def add_parser(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and its options."""
    parser = commands.add_parser("export", help="turn a checkpoint and its drafters into a bundle")
    parser.add_argument("target", type=Path, metavar="TARGET", help="checkpoint folder")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="BUNDLE")
    parser.add_argument(
        "--draft", type=Path, action="append", default=[], metavar="DIR",
        help="folder of a drafter; may be repeated",
    )  # fmt: skip
    _add_precisions(parser)
    parser.add_argument(
        "--draft-media", choices=tuple(MEDIA_ANSWERS),
        help="was the drafter trained on image rows? (default: as its config.json says)",
    )  # fmt: skip
    parser.add_argument(
        "--max-pixels", type=int, metavar="N", help="lower the largest image the bundle takes"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    parser.add_argument(
        "--skip-check", action="store_true", help="do not run the graphs once at the end"
    )
    parser.add_argument("--json", action="store_true", help="print a summary as JSON")
    return parser


def _add_precisions(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(PRECISIONS)
    parser.add_argument("--precision", default="fp32", metavar="P", help=f"{names} (default fp32)")
    for part, default in (("head", "as the target"), ("draft", "as the target")):
        parser.add_argument(f"--{part}-precision", metavar="P", help=f"default: {default}")
    parser.add_argument(
        "--vision-precision", metavar="P", help="default: as the target if a float, else fp16"
    )


def execute(options: argparse.Namespace) -> None:
    """Export, check, and say what was written."""
    from ..export.tokenizer_process import reading

    with reading(options.target / "tokenizer.json") as tokenizer:
        with _no_collection():
            from ..export.bundle import export_bundle

            check, half_cast = (None, None) if options.skip_check else _with_onnxruntime()
        output = export_bundle(_export_options(options), check, tokenizer, half_cast)
    _report(output, options.json)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Imports make many objects and no garbage; looking for some takes a tenth of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _with_onnxruntime() -> tuple[Callable[[Path], None], type[HalfCast]]:
    """The self-check, and what else ONNX Runtime does for an export once it is there: that it is
    missing is found before the weights."""
    from .half_cast import HalfCast
    from .providers import import_onnxruntime
    from .selfcheck import self_check

    import_onnxruntime()
    return self_check, HalfCast


def _export_options(options: argparse.Namespace) -> ExportOptions:
    from ..export.bundle import ExportOptions

    return ExportOptions(
        target=options.target,
        output=options.output,
        drafts=tuple(options.draft),
        precision=options.precision,
        head_precision=options.head_precision,
        draft_precision=options.draft_precision,
        vision_precision=options.vision_precision,
        draft_media=options.draft_media,
        max_pixels=options.max_pixels,
        force=options.force,
        progress=True,
    )


def _report(output: Path, as_json: bool) -> None:
    import json

    manifest = read_manifest(output)
    size = sum(f.stat().st_size for f in output.iterdir())
    if as_json:
        summary = {"bundle": str(output), "bytes": size, "drafts": sorted(manifest.draft_names)}
        print(json.dumps(summary | {"target_digest": manifest.target_digest}))
        return
    drafts = ", ".join(manifest.draft_names) or "none"
    print(
        f"wrote {output}: {len(manifest.graphs)} graphs, {size / 1e6:.1f} MB, "
        f"{manifest.precision}, drafters: {drafts}",
        file=sys.stderr,
    )
