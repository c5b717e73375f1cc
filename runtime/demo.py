"""The bundled miniature: exported to a cache folder on first use, then asked about a picture.

Knows where the weights lie in the package and where the cache is; the answer itself is made by
the same loop as everywhere.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..models.errors import ManifestError
from ..models.miniature.page import Page
from .images import ImageSource
from .model import Model, load
from .results import Delta, Result

LINES = ("Invoice 4821", "2 coffee 7.00", "3 bread 7.50", "Total 14.50")
QUESTION = "Read the text."


@dataclass(frozen=True)
class Demonstration:
    """A speculative answer, the plain one, and whether they are the same tokens."""

    speculative: Result
    plain: Result

    @property
    def equal(self) -> bool:
        """Whether drafting changed nothing."""
        return self.speculative.token_ids == self.plain.token_ids


def miniature_folder() -> Path:
    """The folder of the package that holds the miniature's checkpoints."""
    return Path(str(files("dflash_onnx.models") / "miniature"))


def cache_folder() -> Path:
    """Where bundles made on first use are kept, by the custom of the system."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "dflash-onnx"
    if sys.platform == "win32":
        return Path(os.environ["LOCALAPPDATA"]) / "dflash-onnx"
    return (
        Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dflash-onnx"
    )


def miniature_bundle(cache: Path) -> Path:
    """The miniature's bundle, exported when the cache has none of these very weights."""
    source = miniature_folder()
    bundle = cache / f"miniature-{_digest(source)}"
    try:
        load(bundle)
    except ManifestError:
        _export(source, bundle)
    return bundle


def sample_page() -> NDArray[np.uint8]:
    """The receipt that the demonstration reads when no picture is given, [height, width, 3]."""
    page = Page((len(LINES), 8), LINES, 0, 4)
    return np.repeat(page.gray()[..., None], 3, axis=2)


def demonstrate(
    model: Model,
    image: ImageSource,
    question: str,
    draft: str | None,
    holes: str | None,
    on_delta: Callable[[Delta], None],
) -> Demonstration:
    """Answer speculatively, calling `on_delta` as text comes, then plainly to compare."""
    model.generate(question, [image], draft, holes=holes, max_new_tokens=8).result()
    generation = model.generate(question, [image], draft, holes=holes)
    for delta in generation:
        on_delta(delta)
    return Demonstration(
        generation.result(), model.generate(question, [image], draft="none").result()
    )


def save_page(page: NDArray[np.uint8], path: Path) -> None:
    """Write the page where a person can look at it."""
    Image.fromarray(page).save(path)


def _digest(source: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.suffix in {".json", ".jinja", ".safetensors"}:
            digest.update(path.relative_to(source).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _export(source: Path, bundle: Path) -> None:
    from ..export.bundle import ExportOptions, export_bundle
    from .selfcheck import self_check

    drafts = tuple(p.parent for p in sorted(source.glob("dflash*/config.json")))
    options = ExportOptions(source / "target", bundle, drafts, force=True)
    export_bundle(options, self_check)
