"""A Hugging Face checkpoint folder read lazily: names, shapes and row blocks of tensors.

Knows single and sharded safetensors in fp32, fp16 and bf16, and that several threads may read;
knows nothing about any model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..models.errors import ExportError
from ..models.fields import read_json

# A block and what is made of it should stay in a core's cache.
BLOCK_BYTES = 2 << 20
WEIGHT_DTYPES = ("F32", "F16", "BF16")
INDEX_DTYPES = ("I32", "I64")
DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the checkpoint: its shape, safetensors dtype name, and first byte in its file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of a tensor's first axis; a tensor without axes is one row."""

    info: TensorInfo
    start: int
    stop: int


class Checkpoint:
    """A checkpoint folder; `tensors` maps every tensor name to its `TensorInfo`."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ExportError(f"{folder} is not a folder; give a Hugging Face checkpoint folder.")
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.tensors: dict[str, TensorInfo] = {}
        for info in (info for file in self._files() for info in scan(file)):
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


def scan(file: Path) -> Iterator[TensorInfo]:
    """The tensors of one safetensors file, whose header the library has checked."""
    try:
        with safe_open(file, "numpy") as handle:
            names = list(handle.keys())
        header, first = _header(file)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ExportError(f"{file} is not a readable safetensors file: {error}") from None
    for name in names:
        entry = header[name]
        offset = first + entry["data_offsets"][0]
        yield TensorInfo(name, file, tuple(entry["shape"]), entry["dtype"], offset)


def _header(file: Path) -> tuple[dict, int]:
    """A safetensors header, and where the bytes behind it begin."""
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        return json.loads(handle.read(size)), 8 + size


def blocks_of(info: TensorInfo, dtypes: tuple[str, ...] = WEIGHT_DTYPES) -> list[Block]:
    """A tensor cut into consecutive blocks of about `BLOCK_BYTES` as fp32, none of them read."""
    if info.dtype not in dtypes:
        raise ExportError(
            f"{info.file.name}: {info.name} is stored as {info.dtype}, which is not supported "
            f"(supported: {', '.join(dtypes)}). Quantised checkpoints must be dequantised first."
        )
    rows, *rest = info.shape or (1,)
    step = max(1, BLOCK_BYTES // max(4 * math.prod(rest), 1))
    return [Block(info, start, min(start + step, rows)) for start in range(0, rows, step)]


def read_block(block: Block) -> NDArray:
    """A block's rows in the tensor's own dtype; every call opens the file, so threads may call.

    Read and not mapped: mapped pages count as memory until the whole file is released.
    """
    info = block.info
    values = np.empty((block.stop - block.start, *info.shape[1:]), DTYPES[info.dtype])
    row_bytes = DTYPES[info.dtype].itemsize * math.prod(info.shape[1:])
    try:
        with info.file.open("rb", buffering=0) as handle:
            handle.seek(info.offset + block.start * row_bytes)
            _fill(handle, values)
    except (OSError, EOFError) as error:
        raise ExportError(f"{info.file}: {info.name} cannot be read: {error}") from None
    return values


def _fill(handle: RawIOBase, values: NDArray) -> None:
    rest = values.view(np.uint8).reshape(-1).data
    while rest:
        count = handle.readinto(rest)
        if not count:
            raise EOFError("the file ends early; it was changed during the export")
        rest = rest[count:]


def read_blocks(info: TensorInfo, dtypes: tuple[str, ...] = WEIGHT_DTYPES) -> Iterator[NDArray]:
    """The tensor block by block, in its own dtype: memory is bounded by one block."""
    return map(read_block, blocks_of(info, dtypes))


def same_values(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors hold the same numbers, whatever their dtypes."""
    if first.shape != second.shape:
        return False
    blocks = zip(read_blocks(first), read_blocks(second), strict=True)
    return all(np.array_equal(a.astype(np.float32), b.astype(np.float32)) for a, b in blocks)
