"""Typed reading of raw JSON configuration, with errors that name the file and the key.

Knows how to require a value and how to refuse one; knows nothing about any model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ExportError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a checkpoint file; `ExportError` names the file otherwise."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(f"{path} is missing; a Hugging Face checkpoint folder has it.") from None
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ExportError(f"{path} must hold a JSON object, not {type(raw).__name__}.")
    return raw


# Far above every real size; it keeps a damaged number out of arithmetic that would overflow.
LARGEST = 2**31


class Fields:
    """A JSON object looked up in order through one or more places, e.g. nested then top level.

    An error about a value names the place that holds it; one about a missing value, the first.
    """

    def __init__(self, where: str, *places: Mapping[str, Any]) -> None:
        self.where = where
        self._places = [(where, place) for place in places]

    def otherwise(self, *others: Fields) -> Fields:
        """These fields, then the others' where a key is absent here."""
        joined = Fields(self.where)
        joined._places = [place for fields in (self, *others) for place in fields._places]
        return joined

    def get(self, key: str) -> Any:
        """The first value that is present and not null, else None."""
        return self._found(key)[1]

    def place_of(self, key: str) -> str:
        """The name of the place whose value `get` returns."""
        return self._found(key)[0]

    def require(self, key: str) -> Any:
        """The value of `key`; `ExportError` names the file and the key when it is absent."""
        value = self.get(key)
        if value is None:
            raise ExportError(
                f"{self.where} has no '{key}'. It belongs to the checkpoint and has no default; "
                "restore the original file."
            )
        return value

    def section(self, key: str) -> Fields:
        """A required nested object."""
        return Fields(f"{self.place_of(key)}, {key}", self._object(key, self.require(key)))

    def optional_section(self, key: str) -> Mapping[str, Any]:
        """A nested object, empty when it is absent."""
        return self._object(key, self.get(key))

    def sections(self, key: str) -> list[Fields]:
        """The nested objects `key` of all places, each of them alone."""
        alone = [Fields(where, place) for where, place in self._places]
        return [fields.section(key) for fields in alone if fields.get(key) is not None]

    def integer(self, key: str, minimum: int = 1) -> int:
        """A required integer of at least `minimum`."""
        value = self.require(key)
        fits = isinstance(value, int) and not isinstance(value, bool)
        if not fits or not minimum <= value < LARGEST:
            raise self.bad(key, f"an integer of at least {minimum} and below 2^31", value)
        return value

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        """An integer of at least `minimum`, or None when it is absent."""
        return None if self.get(key) is None else self.integer(key, minimum)

    def number(self, key: str, above: float = -math.inf) -> float:
        """A required finite number above `above`."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, "a number", value)
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise self.bad(key, "below 2^31", value)
        if not math.isfinite(value) or value <= above:
            raise self.bad(key, "finite" if above == -math.inf else f"above {above:g}", value)
        return float(value)

    def flag(self, key: str) -> bool | None:
        """An optional boolean."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.bad(key, "true or false", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A required list of integers."""
        return self._list_of(int, key, "a list of integers")

    def strings(self, key: str) -> tuple[str, ...]:
        """A required list of strings."""
        return self._list_of(str, key, "a list of strings")

    def refuse(self, key: str, *accepted: Any) -> None:
        """Refuse by name a value this version cannot honour (absent counts as accepted)."""
        place, value = self._found(key)
        if value is not None and value not in accepted:
            raise ExportError(
                f"{place} sets {key}={value!r}, which is not supported yet "
                f"(supported: {', '.join(map(repr, accepted)) or 'absent'})."
            )

    def refuse_quantized(self) -> None:
        """Refuse weights in a quantised format, which this version cannot read."""
        for key in ("quantization_config", "compression_config"):
            if self.get(key) is not None:
                raise ExportError(
                    f"{self.place_of(key)} has a '{key}', but export reads plain fp32, fp16 or "
                    "bf16 weights only; dequantise the checkpoint first."
                )

    def bad(self, key: str, expected: str, got: Any) -> ExportError:
        """The error for a value of the wrong kind."""
        return ExportError(f"{self.place_of(key)}: '{key}' must be {expected}, not {got!r}.")

    def _found(self, key: str) -> tuple[str, Any]:
        found = ((where, p[key]) for where, p in self._places if p.get(key) is not None)
        return next(found, (self.where, None))

    def _object(self, key: str, value: Any) -> Mapping[str, Any]:
        if value is not None and not isinstance(value, dict):
            raise self.bad(key, "an object", value)
        return value or {}

    def _list_of(self, kind: type, key: str, expected: str) -> tuple[Any, ...]:
        value = self.require(key)
        # The exact type, since true and false are integers to Python.
        if not isinstance(value, list) or not all(type(v) is kind for v in value):
            raise self.bad(key, expected, value)
        return tuple(value)
