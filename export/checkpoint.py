"""A Hugging Face checkpoint folder read lazily: names, shapes and row blocks of tensors.

Knows single and sharded safetensors in fp32, fp16 and bf16; knows nothing about any model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..models.errors import ExportError
from ..models.fields import read_json

BLOCK_BYTES = 16 << 20
WEIGHT_DTYPES = ("F32", "F16", "BF16")
INDEX_DTYPES = ("I32", "I64")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor of the checkpoint lies, its shape and its safetensors dtype name."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """A checkpoint folder; `tensors` maps every tensor name to its `TensorInfo`."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ExportError(f"{folder} is not a folder; give a Hugging Face checkpoint folder.")
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.tensors: dict[str, TensorInfo] = {}
        for info in (info for file in self._files() for info in _scan(file)):
            other = self.tensors.setdefault(info.name, info)
            if other is not info:
                raise ExportError(
                    f"{info.name} is in both {other.file} and {info.file.name}; shards of "
                    "different downloads are mixed, so download the checkpoint again."
                )
        self._check_index()

    @property
    def config_file(self) -> str:
        """The config's path, for messages."""
        return str(self.folder / "config.json")

    def optional_json(self, name: str) -> dict | None:
        """A JSON file of the folder, or None when it does not exist."""
        path = self.folder / name
        return read_json(path) if path.exists() else None

    @property
    def _index(self) -> Path:
        return self.folder / "model.safetensors.index.json"

    def _weight_map(self) -> dict[str, str]:
        """The index of a sharded checkpoint: tensor name to file name."""
        raw = read_json(self._index).get("weight_map")
        if not isinstance(raw, dict) or not raw or not all(type(f) is str for f in raw.values()):
            raise ExportError(f"{self._index} has no usable 'weight_map' from tensors to files.")
        return raw

    def _check_index(self) -> None:
        """The index and the shards must agree on every tensor's place."""
        if not self._index.exists():
            return
        stated = self._weight_map()
        for name in sorted(stated.keys() | self.tensors.keys()):
            info = self.tensors.get(name)
            found = info.file.name if info else None
            if stated.get(name) != found:
                raise ExportError(
                    f"{self._index} says that {name} is in {stated.get(name, 'no file')}, but it "
                    f"is in {found or 'no shard'}; index and shards are of different downloads, "
                    "so download the checkpoint again."
                )

    def _files(self) -> list[Path]:
        index = self._index
        if not index.exists():
            single = self.folder / "model.safetensors"
            if not single.exists():
                raise ExportError(
                    f"{self.folder} has neither model.safetensors nor model.safetensors.index.json."
                )
            return [single]
        names = sorted(set(self._weight_map().values()))
        for name in names:
            if Path(name).name != name:
                raise ExportError(f"{index} names a file outside its folder: {name!r}.")
            if not (self.folder / name).is_file():
                raise ExportError(f"{index} names {name}, which is missing from {self.folder}.")
        return [self.folder / name for name in names]


def _scan(file: Path) -> Iterator[TensorInfo]:
    try:
        with safe_open(file, "numpy") as handle:
            for name in handle.keys():
                part = handle.get_slice(name)
                yield TensorInfo(name, file, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ExportError(f"{file} is not a readable safetensors file: {error}") from None


def read_blocks(info: TensorInfo, dtypes: tuple[str, ...] = WEIGHT_DTYPES) -> Iterator[NDArray]:
    """The tensor in consecutive row blocks of about 16 MiB, in its own dtype.

    The file is opened per tensor so that its mapped pages are released before the next one:
    memory is bounded by one tensor, not by the checkpoint.
    """
    if info.dtype not in dtypes:
        raise ExportError(
            f"{info.file.name}: {info.name} is stored as {info.dtype}, which is not supported "
            f"(supported: {', '.join(dtypes)}). Quantised checkpoints must be dequantised first."
        )
    try:
        with safe_open(info.file, "numpy") as handle:
            if not info.shape:
                yield np.asarray(handle.get_tensor(info.name)).reshape(1)
                return
            part = handle.get_slice(info.name)
            row_bytes = 4 * math.prod(info.shape[1:])
            step = max(1, BLOCK_BYTES // max(row_bytes, 1))
            for start in range(0, info.shape[0], step):
                yield part[start : min(start + step, info.shape[0])]
    except (SafetensorError, FileNotFoundError) as error:
        raise ExportError(f"{info.file}: {info.name} cannot be read: {error}") from None


def same_values(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors hold the same numbers, whatever their dtypes."""
    if first.shape != second.shape:
        return False
    blocks = zip(read_blocks(first), read_blocks(second), strict=True)
    return all(np.array_equal(a.astype(np.float32), b.astype(np.float32)) for a, b in blocks)
