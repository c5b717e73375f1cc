"""The bundle's manifest: what is in the folder and every contract the runtime relies on.

Written by export, read by runtime, strict about keys and types in both directions. Whether the
values fit each other is `check_manifest`'s business. Opens no graph.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from .bundle_path import bundle_file
from .config import RopeConfig, TargetConfig
from .draft_config import DraftLayer
from .errors import ManifestError
from .image_config import ImageConfig
from .precision import Precisions
from .strict_json import from_json, to_json

FORMAT_VERSION = 4
MANIFEST = "bundle.json"


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output: name, dtype and shape with symbolic dimensions as strings."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX file of the bundle."""

    file: str
    sha256: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class TableSpec:
    """A raw array inside a data file, read by memory map."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DataFile:
    """A file that is not a graph: its size in bytes and digest."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class SelectorSpec:
    """DFlash2's candidate selector: candidates per row, how logits become their values (times
    the multiplier, then capped), and its two tables [V, rank]."""

    top_k: int
    output_multiplier: float
    logit_softcap: float | None
    predecessor: TableSpec
    successor: TableSpec


@dataclass(frozen=True)
class DraftSpec:
    """One drafter of the bundle and all the runtime must know to run it."""

    kind: str
    layout: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    trained_on_media: bool | None
    input_embedding_scale: float
    rope: RopeConfig
    num_kv_heads: int
    head_dim: int
    layers: tuple[DraftLayer, ...]
    own_head: bool
    d2t: TableSpec | None
    selector: SelectorSpec | None
    target_digest: str
    source_digest: str

    @property
    def mask_kinds(self) -> tuple[DraftLayer, ...]:
        """The distinct (window, causal) kinds, in order of first use; `mask.{i}` is kind i."""
        return tuple(dict.fromkeys(self.layers))


@dataclass(frozen=True)
class Versions:
    """What wrote the bundle."""

    dflash_onnx: str
    onnx: str


@dataclass(frozen=True)
class Manifest:
    """The whole bundle.

    `tap_before_deepstack`: taps of DeepStack layers are recorded before the addition, as
    transformers' `hidden_states` does. `num_top` is K of the head's top-k outputs. `sidecars` are
    the tokenizer and the chat template. `mtp`: the target's own MTP head is in the bundle. Text
    targets have no `image`.
    """

    format_version: int
    family: str
    precision: Precisions
    versions: Versions
    target: TargetConfig
    image: ImageConfig | None
    tokenizer_size: int
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]
    tap_layers: tuple[int, ...]
    tap_before_deepstack: bool
    num_top: int
    target_digest: str
    embedding: TableSpec
    graphs: dict[str, GraphSpec]
    data_files: dict[str, DataFile]
    sidecars: dict[str, DataFile]
    drafts: dict[str, DraftSpec]
    mtp: bool

    @property
    def draft_names(self) -> tuple[str, ...]:
        """The bundle's own drafters; the first is the one to use unless told otherwise."""
        return (*self.drafts, *(("mtp",) if self.mtp else ()))


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write bundle.json."""
    text = json.dumps(to_json(manifest), indent=1, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read bundle.json; `ManifestError` says what is wrong and where."""
    path = folder / MANIFEST
    if folder.is_file() or not folder.is_dir():
        kind = "a file, not a bundle folder" if folder.is_file() else "not a folder"
        raise ManifestError(
            f"{folder} is {kind}; give the bundle folder that `dflash-onnx export` wrote."
        )
    if not os.path.lexists(path):
        raise ManifestError(
            f"{path} is missing; {folder} is not a bundle. Make one with `dflash-onnx export`."
        )
    try:
        raw = json.loads(bundle_file(folder, MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path} cannot be read as JSON: {error}") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{path}: format_version is {version!r}, this dflash-onnx reads {FORMAT_VERSION}. "
            "Export the checkpoint again."
        )
    return from_json(Manifest, raw, str(path))
