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


class Fields:
    """A JSON object looked up in order through one or more places, e.g. nested then top level."""

    def __init__(self, where: str, *places: Mapping[str, Any]) -> None:
        self.where = where
        self._places = places

    def get(self, key: str) -> Any:
        """The first value that is present and not null, else None."""
        return next((p[key] for p in self._places if p.get(key) is not None), None)

    def require(self, key: str) -> Any:
        """The value of `key`; `ExportError` names the file and the key when it is absent."""
        value = self.get(key)
        if value is None:
            raise ExportError(
                f"{self.where} has no '{key}'. It belongs to the checkpoint and has no default; "
                "restore the original config.json."
            )
        return value

    def section(self, key: str) -> Fields:
        """A required nested object."""
        value = self.require(key)
        if not isinstance(value, dict):
            raise self.bad(key, "an object", value)
        return Fields(f"{self.where}, {key}", value)

    def optional_section(self, key: str) -> Mapping[str, Any]:
        """A nested object, empty when it is absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.bad(key, "an object", value)
        return value or {}

    def integer(self, key: str, minimum: int = 1) -> int:
        """A required integer of at least `minimum`."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.bad(key, f"an integer of at least {minimum}", value)
        return value

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        """An integer of at least `minimum`, or None when it is absent."""
        return None if self.get(key) is None else self.integer(key, minimum)

    def number(self, key: str, above: float = -math.inf) -> float:
        """A required finite number above `above`."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, "a number", value)
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
        value = self.require(key)
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise self.bad(key, "a list of integers", value)
        return tuple(value)

    def refuse(self, key: str, *accepted: Any) -> None:
        """Refuse by name a value this version cannot honour (absent counts as accepted)."""
        value = self.get(key)
        if value is not None and value not in accepted:
            raise ExportError(
                f"{self.where} sets {key}={value!r}, which is not supported yet "
                f"(supported: {', '.join(map(repr, accepted)) or 'absent'})."
            )

    def bad(self, key: str, expected: str, got: Any) -> ExportError:
        """The error for a value of the wrong kind."""
        return ExportError(f"{self.where}: '{key}' must be {expected}, not {got!r}.")
