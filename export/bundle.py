"""The export itself: one target and its drafters become one bundle folder, or nothing.

Everything is written under a temporary name beside the destination and renamed at the end.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..models.config import parse_target
from ..models.draft_config import MEDIA_ANSWERS
from ..models.errors import ExportError
from ..models.graphs.cast import half_cast_model
from ..models.precision import PRECISIONS, choose
from .checkpoint import Checkpoint
from .drafts import open_drafts, refuse_own_tables
from .sidecars import TOKENIZER, make_sidecars, read_prompt_files
from .store import ToHalf, to_half
from .tokenizer_file import TokenizerFacts, read_tokenizer
from .writer import BundleWriter


@dataclass(frozen=True)
class ExportOptions:
    """What the export command asks for.

    `draft_media` is "yes", "no" or "unknown" in place of what the drafters' configurations say
    about media rows in their training; None takes their word. Parts without a precision of their
    own follow `precision` (see `models.precision.choose`). `progress` is about stderr.
    """

    target: Path
    output: Path
    drafts: tuple[Path, ...] = ()
    precision: str = "fp32"
    head_precision: str | None = None
    draft_precision: str | None = None
    vision_precision: str | None = None
    draft_media: str | None = None
    max_pixels: int | None = None
    force: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        for part in ("precision", "head_precision", "draft_precision", "vision_precision"):
            _check_precision(part, getattr(self, part))
        if self.draft_media not in (None, *MEDIA_ANSWERS):
            raise ExportError(
                f"draft_media must be one of {', '.join(MEDIA_ANSWERS)}, not {self.draft_media!r}."
            )


def _check_precision(part: str, value: str | None) -> None:
    option = "--" + part.replace("_", "-")
    if value == "bf16":
        raise ExportError(
            f"{option} bf16: only CUDA has kernels for it in ONNX Runtime; fp16 is as small and "
            "runs everywhere, int8 is smaller and as close."
        )
    if value is not None and value not in PRECISIONS:
        raise ExportError(
            f"{option} {value!r} is not supported (supported: {', '.join(PRECISIONS)})."
        )


def export_bundle(
    options: ExportOptions,
    check: Callable[[Path], None] | None = None,
    tokenizer: Callable[[], TokenizerFacts] | None = None,
    half_cast: Callable[[bytes], ToHalf] | None = None,
) -> Path:
    """Write the bundle and return its folder; `check` inspects it before it gets its name.

    `tokenizer` gives what another process reads of the target's (see `tokenizer_process`);
    `half_cast` runs the graph that rounds to fp16, which is then done by it instead of NumPy.
    Raises `ExportError` (or what `check` raises); then the destination is as it was.
    """
    _refuse_existing(options)
    checkpoint = Checkpoint(options.target)
    target = parse_target(checkpoint.config, checkpoint.config_file)
    read = tokenizer or partial(read_tokenizer, checkpoint.folder / TOKENIZER)
    files = read_prompt_files(checkpoint.folder, target, options.max_pixels)
    drafts = open_drafts(options.drafts, target, options.draft_media)
    for draft in drafts:
        refuse_own_tables(draft, checkpoint, target)
    with _finished_folder(options) as folder:
        precisions = choose(
            options.precision,
            options.head_precision,
            options.draft_precision,
            options.vision_precision,
        )
        rounding = to_half if half_cast is None else half_cast(half_cast_model())
        writer = BundleWriter(folder, precisions, options.progress, rounding)
        writer.write(
            checkpoint, target, lambda: make_sidecars(checkpoint, target, files, read()), drafts
        )
        if check is not None:
            check(folder)
    return options.output


def _refuse_existing(options: ExportOptions) -> None:
    output = options.output
    if output.exists() and not options.force:
        raise ExportError(f"{output} exists already; choose another name or pass --force.")
    if output.exists():
        _refuse_others(output, output)


def _refuse_others(folder: Path, output: Path) -> None:
    if not (folder / "bundle.json").is_file():
        raise ExportError(f"{output} is not a bundle; --force replaces bundles only.")


@contextmanager
def _finished_folder(options: ExportOptions) -> Iterator[Path]:
    """A temporary folder that becomes the output when the body succeeds, and vanishes otherwise."""
    output = options.output.absolute()
    temporary = _unused_name(output, "partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        temporary.chmod(0o755)
        yield temporary
        # An export takes long, and something may have got the name since the first look.
        _refuse_existing(options)
        _put_in_place(temporary, output, options.force)
    except OSError as error:
        raise ExportError(f"{output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unused_name(output: Path, kind: str) -> Path:
    """A hidden name beside the output, known before its folder exists: no interrupt can lose it."""
    return output.parent / f".{output.name}.{kind}-{secrets.token_hex(8)}"


def _put_in_place(temporary: Path, output: Path, force: bool) -> None:
    # Without --force also what appears between the look and the rename is kept.
    if force and output.exists():
        _replace(temporary, output)
    else:
        _take_name(temporary, output)


def _take_name(temporary: Path, output: Path) -> None:
    """Rename a folder; the system refuses it where another one that is not empty has the name."""
    try:
        temporary.rename(output)
    except OSError as error:
        if not output.exists():
            raise
        raise ExportError(
            f"{output} was made by another program during this export; that one was kept, so "
            "choose another name or pass --force."
        ) from error


def _replace(temporary: Path, output: Path) -> None:
    """Put the new folder in place of a bundle, which is deleted only when the name is taken."""
    old = _unused_name(output, "old")
    kept = old / "bundle"
    try:
        old.mkdir()
        output.rename(kept)
        # Only now is it certain what was there.
        _refuse_others(kept, output)
        _take_name(temporary, output)
    except BaseException:
        _restore(kept, output)
        raise
    finally:
        if output.exists() or not kept.exists():
            shutil.rmtree(old, ignore_errors=True)


def _restore(kept: Path, output: Path) -> None:
    """After a failure or interrupt between the two renames the old folder still is the output."""
    if output.exists() or not kept.exists():
        return
    try:
        kept.rename(output)
    except OSError as error:
        raise ExportError(
            f"{output} could neither be replaced nor put back ({error}); what was there is kept "
            f"in {kept}, move it back by hand."
        ) from error
