"""Requirements on the values of a manifest, each with a message that names the key.

Knows what a number, a name and lists of ids and layers must satisfy; knows no key itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from .errors import ManifestError
from .fields import LARGEST


@dataclasses.dataclass(frozen=True)
class Place:
    """The manifest file, for messages."""

    where: str

    def require(self, holds: bool, key: str, expected: str, got: object) -> None:
        """Raise `ManifestError` about `key` unless the condition holds."""
        if not holds:
            raise ManifestError(
                f"{self.where}: {key} must be {expected}, not {got!r}; the bundle is damaged or "
                "was edited. Export it again."
            )

    def one_of(self, key: str, value: str, known: Collection[str]) -> None:
        """Require a known name."""
        self.require(value in known, key, f"one of {', '.join(known)}", value)

    def equal(self, key: str, got: object, expected: object, why: str) -> None:
        """Require a value that another place of the manifest gives, named by `why`."""
        self.require(got == expected, key, f"{expected!r} ({why})", got)

    def positive(self, key: str, value: float) -> None:
        """Require a number above zero, and no whole number beyond every size."""
        fits = value > 0 and (isinstance(value, float) or value < LARGEST)
        self.require(fits, key, "above 0 and below 2^31", value)

    def below(self, key: str, ids: Iterable[int], limit: int) -> None:
        """Require numbers from 0 to limit - 1."""
        for i in ids:
            self.require(0 <= i < limit, key, f"in 0..{limit - 1}", i)

    def layers(self, key: str, numbers: Sequence[int], count: int) -> None:
        """Require numbers of distinct layers."""
        self.below(key, numbers, count)
        self.require(len(set(numbers)) == len(numbers), key, "distinct", list(numbers))
