"""Data files of a bundle: tensors streamed in once, each with an offset other graphs can name.

Knows alignment, precision and digests; knows no model. Peak memory is one block of one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from ..models.errors import ExportError
from ..models.manifest import DataFile
from ..models.precision import FLOATS
from ..models.stored import StoredTensor
from .checkpoint import TensorInfo, read_blocks
from .quantise import pack_blocks, pack_rows, packed_width

# Page alignment lets a runtime map a tensor instead of copying it.
ALIGNMENT = 4096


class DataWriter:
    """Writes one `.data` file; `tensors` says where everything went."""

    def __init__(self, folder: Path, file: str, precision: str, progress: Callable[[int], None]):
        self.file = file
        self.tensors: dict[str, StoredTensor] = {}
        self._precision = precision
        self._progress = progress
        self._digest = hashlib.sha256()
        self._handle = (folder / file).open("wb")

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.close()

    def summary(self) -> DataFile:
        """Size and digest of what has been written."""
        return DataFile(self._handle.tell(), self._digest.hexdigest())

    def add(
        self,
        name: str,
        parts: Sequence[TensorInfo],
        shape: Sequence[int] | None = None,
        matrix: bool = False,
    ) -> None:
        """Append tensors end to end as one tensor `name`, joined along the first axis.

        `shape` reshapes the result, e.g. a convolution kernel to a matrix. A `matrix` that rows
        are multiplied with takes the file's precision; other tensors stay floats.
        """
        joined = (sum(p.shape[0] if p.shape else 1 for p in parts), *parts[0].shape[1:])
        shape = tuple(shape) if shape is not None else joined
        if matrix and self._precision not in FLOATS:
            self._add_quantised(name, parts, shape)
            return
        dtype = np.dtype(self._dtype(shape))
        offset = self._align()
        for part in parts:
            for block in read_blocks(part):
                self._write(_converted(block, dtype, part))
        self.tensors[name] = self._stored(name, dtype.name, shape, offset)

    def _add_quantised(
        self, name: str, parts: Sequence[TensorInfo], shape: tuple[int, ...]
    ) -> None:
        blocks = (
            _converted(block, np.dtype(np.float32), part).reshape(-1, shape[-1])
            for part in parts
            for block in read_blocks(part)
        )
        if self._precision == "w8a8":
            self._add_rows(name, blocks, shape)
        else:
            self._add_blocks(name, blocks, shape)

    def _add_blocks(self, name: str, blocks: Iterator[NDArray], shape: tuple[int, ...]) -> None:
        """A matrix in blocked form; its scales follow it."""
        offset, scales = self._align(), []
        for rows in blocks:
            packed, scale = pack_blocks(rows, self._precision)
            self._write(packed)
            scales.append(scale)
        packed_shape = (shape[0], *packed_width(self._precision, shape[1]))
        stored = self._stored(name, "uint8", packed_shape, offset)
        self._keep_packed(stored, shape[1], np.concatenate(scales))

    def _add_rows(self, name: str, blocks: Iterator[NDArray], shape: tuple[int, ...]) -> None:
        """A matrix of signed bytes, transposed to [in, out] as its operator wants it."""
        levels, scales = np.empty(shape[::-1], np.int8), np.empty(shape[0], np.float32)
        first = 0
        for rows in blocks:
            part = slice(first, first + len(rows))
            packed, scales[part] = pack_rows(rows)
            levels[:, part] = packed.T
            first += len(rows)
        offset = self._align()
        self._write(levels)
        self._keep_packed(self._stored(name, "int8", shape[::-1], offset), shape[1], scales)

    def _keep_packed(self, stored: StoredTensor, columns: int, scales: NDArray) -> None:
        beside = self.add_array(f"{stored.name}.scales", scales)
        form = self._precision
        self.tensors[stored.name] = replace(stored, form=form, columns=columns, scales=beside)

    def _stored(self, name: str, dtype: str, shape: tuple[int, ...], offset: int) -> StoredTensor:
        return StoredTensor(name, dtype, shape, self.file, offset, self._handle.tell() - offset)

    def add_array(self, name: str, array: NDArray) -> StoredTensor:
        """Append a small array as it is."""
        offset = self._align()
        self._write(array)
        stored = self._stored(name, array.dtype.name, array.shape, offset)
        self.tensors[name] = stored
        return stored

    def _dtype(self, shape: tuple[int, ...]) -> str:
        # Norms and biases stay in fp32: they are small, and halves overflow there first.
        return "float16" if self._precision == "fp16" and len(shape) > 1 else "float32"

    def _align(self) -> int:
        padding = -self._handle.tell() % ALIGNMENT
        zeros = bytes(padding)
        self._digest.update(zeros)
        self._handle.write(zeros)
        return self._handle.tell()

    def _write(self, array: NDArray) -> None:
        data = np.ascontiguousarray(array).data
        self._digest.update(data)
        self._handle.write(data)
        self._progress(array.nbytes)


def _converted(block: NDArray, dtype: np.dtype, info: TensorInfo) -> NDArray:
    with np.errstate(over="ignore"):
        converted = block.astype(dtype)
    if not np.isfinite(converted).all():
        cause = (
            "is not finite"
            if not np.isfinite(block.astype(np.float32)).all()
            else ("overflows fp16; export with --precision fp32")
        )
        raise ExportError(f"{info.file.name}: a value of {info.name} {cause}.")
    return converted
