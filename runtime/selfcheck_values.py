"""What numbers of a working network look like; `ExportError` says whose do not.

Knows no graphs and no bundles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..models.errors import ExportError

Float = NDArray[np.float32]


def usable_logits(what: str, logits: Float) -> None:
    """Banned ids have minus infinity; everything else is a number."""
    if not np.isfinite(logits).any(axis=-1).all():
        raise _notfinite(what)
    if np.isnan(logits).any() or np.isposinf(logits).any():
        raise _notfinite(what)


def finite(what: str, array: Float) -> None:
    """Every value must be a number."""
    if not np.isfinite(array).all():
        raise _notfinite(what)


def alive(what: str, array: Float) -> None:
    """Rows [..., width] must be finite, and hold more than one number over and over."""
    finite(what, array)
    if array.size and (array.max(axis=-1) == array.min(axis=-1)).any():
        raise ExportError(
            f"self-check: {what} gives rows in which all values are equal; weights of the "
            "checkpoint are zero or missing, so download it again."
        )


def _notfinite(what: str) -> ExportError:
    return ExportError(
        f"self-check: {what} gives values that are not finite; the weights are damaged or "
        "overflow this precision (try --precision fp32)."
    )
