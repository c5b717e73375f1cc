"""Data files of a bundle: tensors streamed in once, each with an offset other graphs can name.

Knows alignment, precision and digests; knows no model. Several threads read and convert blocks,
one writes: the bytes are those of a single thread. Peak memory is a few blocks of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..models.errors import ExportError
from ..models.manifest import DataFile
from ..models.precision import FLOATS
from ..models.stored import StoredTensor
from .checkpoint import Block, TensorInfo, blocks_of, read_block
from .parallel import Digest, in_order
from .quantise import pack_blocks, pack_rows, packed_width

# Page alignment lets a runtime map a tensor instead of copying it.
ALIGNMENT = 4096
# The smallest number that rounds to infinity in fp16.
HALF_OVERFLOW = 65520

Result = TypeVar("Result")
Float = NDArray[np.float32]
ToHalf = Callable[[Float], NDArray[np.float16]]


def to_half(values: Float) -> NDArray[np.float16]:
    """The nearest halves, by NumPy."""
    return values.astype(np.float16)


class DataWriter:
    """Writes one `.data` file with the threads of `pool`; `tensors` says where everything went.

    `to_half` is whatever rounds to fp16 fastest; all of them give the same bits.
    """

    def __init__(
        self,
        folder: Path,
        file: str,
        precision: str,
        progress: Callable[[int], None],
        pool: Executor,
        to_half: ToHalf = to_half,
    ) -> None:
        self.file = file
        self.tensors: dict[str, StoredTensor] = {}
        self._precision = precision
        self._progress = progress
        self._handle = (folder / file).open("wb")
        self._digest = Digest()
        self._pool = pool
        self._to_half = to_half

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._digest.close()
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
        half = self._is_half(shape)
        read: Callable[[Block], NDArray] = self._read_half if half else _read_float
        offset = self._align()
        for values in self._mapped(read, parts):
            self._write(values)
        dtype = "float16" if half else "float32"
        self.tensors[name] = self._stored(name, dtype, shape, offset)

    def _mapped(
        self, function: Callable[[Block], Result], parts: Sequence[TensorInfo]
    ) -> Iterator[Result]:
        """What `function` makes of every block of the tensors, in order."""
        blocks = (block for part in parts for block in blocks_of(part))
        return in_order(self._pool, function, blocks)

    def _add_quantised(
        self, name: str, parts: Sequence[TensorInfo], shape: tuple[int, ...]
    ) -> None:
        if self._precision == "w8a8":
            self._add_rows(name, parts, shape)
        else:
            self._add_blocks(name, parts, shape)

    def _add_blocks(self, name: str, parts: Sequence[TensorInfo], shape: tuple[int, ...]) -> None:
        """A matrix in blocked form; its scales follow it."""

        def pack(block: Block) -> tuple[NDArray, NDArray]:
            return pack_blocks(_read_float(block).reshape(-1, shape[1]), self._precision)

        offset, scales = self._align(), []
        for packed, scale in self._mapped(pack, parts):
            self._write(packed)
            scales.append(scale)
        packed_shape = (shape[0], *packed_width(self._precision, shape[1]))
        stored = self._stored(name, "uint8", packed_shape, offset)
        self._keep_packed(stored, shape[1], np.concatenate(scales))

    def _add_rows(self, name: str, parts: Sequence[TensorInfo], shape: tuple[int, ...]) -> None:
        """A matrix of signed bytes, transposed to [in, out] as its operator wants it."""

        def pack(block: Block) -> tuple[NDArray, NDArray]:
            return pack_rows(_read_float(block).reshape(-1, shape[1]))

        levels, scales = np.empty(shape[::-1], np.int8), np.empty(shape[0], np.float32)
        first = 0
        for packed, scale in self._mapped(pack, parts):
            part = slice(first, first + len(packed))
            levels[:, part], scales[part] = packed.T, scale
            first += len(packed)
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

    def _is_half(self, shape: tuple[int, ...]) -> bool:
        # Norms and biases stay in fp32: they are small, and halves overflow there first.
        return self._precision == "fp16" and len(shape) > 1

    def _read_half(self, block: Block) -> NDArray[np.float16]:
        """A block rounded to fp16; `ExportError` names a tensor that overflows there."""
        values, exact, size = _read(block)
        if size >= HALF_OVERFLOW:
            raise _unusable(block, "overflows fp16; export with --precision fp32")
        return values if values.dtype == np.float16 else self._to_half(exact)

    def _align(self) -> int:
        padding = -self._handle.tell() % ALIGNMENT
        zeros = bytes(padding)
        self._digest.add(zeros)
        self._handle.write(zeros)
        return self._handle.tell()

    def _write(self, array: NDArray) -> None:
        array = np.ascontiguousarray(array)
        self._digest.add(array.data)
        self._handle.write(array.data)
        self._progress(array.nbytes)


def _read(block: Block) -> tuple[NDArray, Float, float]:
    """A block as it is stored, in fp32, and its largest size; `ExportError` unless it is finite."""
    values = read_block(block)
    exact = values.astype(np.float32, copy=False)
    # Both are NaN where any value is, and a look at two numbers is cheaper than one at each.
    size = max(-exact.min(initial=0), exact.max(initial=0))
    if not np.isfinite(size):
        raise _unusable(block, "is not finite")
    return values, exact, size


def _read_float(block: Block) -> Float:
    """A block in fp32."""
    return _read(block)[1]


def _unusable(block: Block, cause: str) -> ExportError:
    return ExportError(f"{block.info.file.name}: a value of {block.info.name} {cause}.")
