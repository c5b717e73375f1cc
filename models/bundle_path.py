"""Where a file of a bundle lies: the one place that turns a manifest's name into a path.

Knows that every file is a plain name inside the folder; knows no manifest and opens nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ManifestError


def bundle_file(folder: Path, name: str) -> Path:
    """The path of file `name`; `ManifestError` unless it is a regular file inside the folder.

    The folder itself may be a link, and a file may link to another file of the folder.
    """
    if not _plain(name):
        raise ManifestError(
            f"{folder}: the manifest names the file {name!r}, which is not a plain file name; a "
            "bundle's files lie in its own folder. Do not use this bundle, export it again."
        )
    path = folder / name
    # realpath and isfile, unlike pathlib's, raise for no name and no loop of links.
    real, inside = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not real.is_relative_to(inside):
        raise ManifestError(
            f"{path} leads to {real}, outside the bundle folder; copy the bundle with the files "
            "themselves in place of the links (cp -rL) and give the copy."
        )
    if not os.path.lexists(path):
        raise ManifestError(f"{path} is missing from the bundle. Export it again.")
    if not os.path.isfile(path):
        raise ManifestError(
            f"{path} is not a regular file (a folder, a device or a link to nothing). "
            "Export the bundle again."
        )
    return path


def _plain(name: str) -> bool:
    """No separator or drive of any system, nothing that a system call would not take."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\:")
