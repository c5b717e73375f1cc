"""What the drafter sees for pinned spans and unseen prefixes: the five hole policies.

Policies act on the draft side only; the target verifies everything, so they change speed and
never the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ...models.errors import PromptError
from ...models.positions import Ruler
from ..sampling_params import check_whole

DEFAULT_HOLE_ROWS = 512
MAX_PAUSE_ROWS = 64


class HolePolicy(Enum):
    """`seed`: zero-feature rows; `seed-masked`: the same, invisible; `gap`: nothing, positions
    jump; `index`: real media rows on the row-number ruler; `off`: no drafting for a while."""

    SEED = "seed"
    SEED_MASKED = "seed-masked"
    GAP = "gap"
    INDEX = "index"
    OFF = "off"

    @property
    def ruler(self) -> Ruler:
        """What the draft cache measures positions with under this policy."""
        return "index" if self is HolePolicy.INDEX else "text"

    @property
    def seeds(self) -> bool:
        """Whether holes are filled with zero-feature rows."""
        return self in (HolePolicy.SEED, HolePolicy.SEED_MASKED)

    @property
    def uses_rows(self) -> bool:
        """Whether a number of rows means anything: rows to fill a hole with, or to pause for."""
        return self.seeds or self is HolePolicy.OFF


def parse_policy(name: str) -> HolePolicy:
    """A policy by its name; `PromptError` lists the names."""
    try:
        return HolePolicy(name)
    except ValueError:
        names = ", ".join(p.value for p in HolePolicy)
        raise PromptError(f"hole policy {name!r} is unknown; choose one of {names}.") from None


def default_policy(trained_on_media: bool | None) -> HolePolicy:
    """`index` for a drafter known to be trained on media rows, else the conservative `seed`."""
    return HolePolicy.INDEX if trained_on_media else HolePolicy.SEED


@dataclass(frozen=True)
class HoleSettings:
    """A policy and how many rows a hole may be filled with (None: what the drafter can see)."""

    policy: HolePolicy
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.max_rows is not None:
            check_whole("hole_rows", self.max_rows, 0)

    def rows(self, windows: list[int | None]) -> int:
        """R: the widest window less one if every layer slides, else 512, unless set."""
        if self.max_rows is not None:
            return self.max_rows
        finite = [w for w in windows if w is not None]
        return max(finite) - 1 if len(finite) == len(windows) else DEFAULT_HOLE_ROWS
