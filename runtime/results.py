"""What a generation gives back: deltas, rounds, and the final result with its statistics.

Plain data and its JSON form.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..models.positions import Hole, Position, Row

FinishReason = Literal["stop", "length"]


class Delta(NamedTuple):
    """New text that is safe to show, and the token ids emitted since the last delta."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One round: `rows` in the target's cache before it, the block's start on the draft's ruler,
    what was drafted and accepted, tokens produced, and the newest hole met since the last round."""

    index: int
    rows: Row
    block_start: Position | None
    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    produced: int
    hole: Hole | None

    def to_json(self) -> dict[str, Any]:
        """The round as one line of a trace."""
        return {
            "round": self.index,
            "rows": self.rows,
            "block_start": self.block_start,
            "anchor": self.anchor,
            "drafted": list(self.drafted),
            "accepted": self.accepted,
            "produced": self.produced,
            "hole": self.hole and [self.hole.start, self.hole.stop],
        }


@dataclass(frozen=True)
class DraftStats:
    """Drafting of one generation; `tokens_per_round` counts accepted drafts plus the bonus."""

    name: str
    state: str
    policy: str | None
    length: str
    rounds: int
    drafted: int
    accepted: int
    mean_accepted_length: float
    tokens_per_round: tuple[int, ...]
    holes: tuple[tuple[int, int], ...]
    seeded_rows: int
    skipped_spans: int


@dataclass
class Timings:
    """Seconds spent, rows prefilled and reused, and target calls after the prompt."""

    prefill_seconds: float = 0.0
    vision_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    tokens_per_second: float = 0.0
    prefilled_rows: int = 0
    reused_rows: int = 0
    target_calls: int = 0

    def since(self, draft_seconds: float, verify_seconds: float) -> tuple[float, float]:
        """Seconds of drafting and verifying since these totals."""
        return self.draft_seconds - draft_seconds, self.verify_seconds - verify_seconds


@dataclass(frozen=True)
class Memory:
    """Bytes that the conversation holds: caches grow with rows, recurrent state does not.

    `process_bytes` is the whole process's resident memory, weights included; None where the
    system does not tell.
    """

    key_value_bytes: int
    state_bytes: int
    snapshot_bytes: int
    draft_bytes: int
    image_bytes: int
    process_bytes: int | None


def process_bytes() -> int | None:
    """Resident memory of this process now."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # not Linux
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Result:
    """A finished answer; `token_ids` ends with the stop token when one ended it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    draft: DraftStats
    timings: Timings
    memory: Memory
    provider: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The result as `run --json` prints it."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens},
            "draft": asdict(self.draft),
            "timings": asdict(self.timings),
            "memory": asdict(self.memory),
            "provider": self.provider,
        }
