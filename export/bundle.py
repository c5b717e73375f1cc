"""The export itself: one target and its drafters become one bundle folder, or nothing.

Everything is written under a temporary name beside the destination and renamed at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..models.config import parse_target
from ..models.errors import ExportError
from .checkpoint import Checkpoint
from .drafts import open_draft, refuse_own_tables
from .sidecars import read_sidecars
from .writer import PRECISIONS, BundleWriter


@dataclass(frozen=True)
class ExportOptions:
    """What the export command asks for; `draft_media` overrides the drafter's own flag."""

    target: Path
    output: Path
    drafts: tuple[Path, ...] = ()
    precision: str = "fp32"
    draft_media: bool | None = None
    max_pixels: int | None = None
    force: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ExportError(
                f"precision {self.precision!r} is not supported yet "
                f"(supported: {', '.join(PRECISIONS)})."
            )


def export_bundle(options: ExportOptions, check: Callable[[Path], None] | None = None) -> Path:
    """Write the bundle and return its folder; `check` inspects it before it gets its name.

    Raises `ExportError` (or what `check` raises); then the destination is as it was.
    """
    _refuse_existing(options)
    checkpoint = Checkpoint(options.target)
    target = parse_target(checkpoint.config, checkpoint.config_file)
    sidecars = read_sidecars(checkpoint, target, options.max_pixels)
    drafts = [
        open_draft(folder, _draft_name(i), target, options.draft_media)
        for i, folder in enumerate(options.drafts)
    ]
    for draft in drafts:
        refuse_own_tables(draft, checkpoint, target)
    with _finished_folder(options.output.absolute()) as folder:
        writer = BundleWriter(folder, options.precision, options.progress)
        writer.write(checkpoint, target, sidecars, drafts)
        if check is not None:
            check(folder)
    return options.output


def _draft_name(i: int) -> str:
    return "dflash" if i == 0 else f"dflash-{i + 1}"


def _refuse_existing(options: ExportOptions) -> None:
    output = options.output
    if output.exists() and not options.force:
        raise ExportError(f"{output} exists already; choose another name or pass --force.")
    if output.exists() and not (output / "bundle.json").is_file():
        raise ExportError(f"{output} is not a bundle; --force replaces bundles only.")


@contextmanager
def _finished_folder(output: Path) -> Iterator[Path]:
    """A temporary folder that becomes the output when the body succeeds, and vanishes otherwise."""
    temporary = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
        temporary.chmod(0o755)
        yield temporary
        _replace(temporary, output)
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, output: Path) -> None:
    """Put the new folder in place; the old one goes only after the new one has its name."""
    if not output.exists():
        temporary.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old-", dir=output.parent))
    try:
        output.rename(old / "bundle")
        temporary.rename(output)
    except BaseException:
        # An interrupt may come between the two: then the old folder still is the bundle.
        if not output.exists():
            (old / "bundle").rename(output)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
