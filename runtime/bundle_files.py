"""The files of a bundle: read and checked at load, mapped, and verified byte by byte on demand.

Small files (graphs, tokenizer, template) are held against their digests at every load. Weight
files are only held against their sizes there, because hashing gigabytes would take longer than
the answer; `dflash-onnx info` verifies them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..models.bundle_path import bundle_file
from ..models.check_manifest import check_manifest
from ..models.errors import ManifestError
from ..models.manifest import MANIFEST, DataFile, Manifest, TableSpec, read_manifest

BLOCK_BYTES = 1 << 20


def open_bundle(folder: Path) -> Manifest:
    """The manifest of a bundle whose files are all there; `ManifestError` says what is not."""
    manifest = read_manifest(folder)
    check_manifest(manifest, str(folder / MANIFEST))
    check_files(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Every file must be there in full; `ManifestError` names the first that is not.

    The digests of weight files are not read here: see `verify_weights`.
    """
    for name, data in manifest.data_files.items():
        _check_size(bundle_file(folder, name), data)
    for name, data in manifest.sidecars.items():
        path = bundle_file(folder, name)
        _check_size(path, data)
        check_digest(path, data.sha256)
    for graph in manifest.graphs.values():
        check_digest(bundle_file(folder, graph.file), graph.sha256)
    _check_target_ids(folder, manifest)


def verify_weights(folder: Path, manifest: Manifest) -> None:
    """Read every weight file to its end; `ManifestError` names the first that is damaged."""
    for name, data in manifest.data_files.items():
        check_digest(bundle_file(folder, name), data.sha256)


def check_digest(path: Path, sha256: str) -> None:
    """`ManifestError` unless the file has the digest that the manifest states."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest.hexdigest() != sha256:
        raise ManifestError(
            f"{path} is not the file that the manifest describes: its digest is "
            f"{digest.hexdigest()[:12]}, expected {sha256[:12]}; it was damaged, edited or taken "
            "from another export. Export the bundle again."
        )


def read_text(folder: Path, name: str) -> str:
    """The text of a small file; `ManifestError` if it is not UTF-8."""
    path = bundle_file(folder, name)
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ManifestError(
            f"{path} is not UTF-8 text (byte {error.start}). Restore the file from the checkpoint "
            "or export the bundle again."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def map_table(folder: Path, table: TableSpec) -> NDArray:
    """A table of the bundle, mapped and not read."""
    path = bundle_file(folder, table.file)
    try:
        mapped = np.memmap(path, np.dtype(table.dtype), "r", table.offset, tuple(table.shape))
        # As a plain array, which rows are taken from several times faster.
        return np.asarray(mapped)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from error


def _check_size(path: Path, data: DataFile) -> None:
    size = path.stat().st_size
    if size != data.num_bytes:
        raise ManifestError(
            f"{path} has {size} bytes, the manifest says {data.num_bytes}; the file is "
            "damaged or was copied incompletely. Export it again."
        )


def _check_target_ids(folder: Path, manifest: Manifest) -> None:
    """A reduced head's ids are token ids of the target: they are small, and index its table."""
    vocab_size = manifest.target.text.vocab_size
    for name, draft in manifest.drafts.items():
        if draft.d2t is None:
            continue
        ids = map_table(folder, draft.d2t)
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ManifestError(
                f"{folder / draft.d2t.file}: the ids of drafter {name!r} are {ids.min()} to "
                f"{ids.max()}, the target has 0 to {vocab_size - 1}; the file is damaged. "
                "Export the bundle again."
            )


def _unreadable(path: Path, error: Exception) -> ManifestError:
    return ManifestError(f"{path} cannot be read: {error}. Export the bundle again.")
