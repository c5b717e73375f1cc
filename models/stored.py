"""Where a weight lies: the description a graph needs to name it as external data.

Shared between the exporter that writes data files and the graph definitions that refer to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StoredTensor:
    """A tensor inside a data file of the bundle; `dtype` is the ONNX-style name, e.g. float16.

    A matrix [out, columns] in a quantised `form` is stored packed, with its `scales` beside it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int
    form: str | None = None
    columns: int = 0
    scales: StoredTensor | None = None

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Some of the rows, where they lie in the file; of a quantised matrix with their scales."""
        row_bytes = self.num_bytes // self.shape[0]
        return replace(
            self,
            name=f"{self.name}[{start}:{stop}]",
            shape=(stop - start, *self.shape[1:]),
            offset=self.offset + start * row_bytes,
            num_bytes=(stop - start) * row_bytes,
            scales=self.scales and self.scales.rows(start, stop),
        )


Tensors = Mapping[str, StoredTensor]
