"""What the target is fed for a prompt: embedding rows of text, encoded rows of images and clips.

Runs the vision tower when the first row of an image is needed, and once for an image that comes
again in a conversation, as long as its rows fit; knows no cache of the target.
"""

from __future__ import annotations

from time import perf_counter

from .plan import Batch, Media
from .results import Timings
from .target import Float, ImageRows, Target

# A prompt of thirty pages must not hold all their rows for the rest of the chat.
MAX_KEPT_BYTES = 64 << 20


class EncodedMedia:
    """Encoded rows by the digest of what they show; the ones used longest ago go first."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rows: dict[str, ImageRows] = {}

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(rows.num_bytes for rows in self._rows.values())

    def rows(self, media: Media) -> ImageRows:
        """The rows of an image or clip, encoded now unless they are still there."""
        rows = self._rows.pop(media.digest, None)
        self._rows[media.digest] = media.encode() if rows is None else rows
        return self._rows[media.digest]

    def shrink(self) -> None:
        """Forget rows, oldest first, until the rest fits."""
        while self.num_bytes > self._max_bytes:
            del self._rows[next(iter(self._rows))]


class PromptRows:
    """The input rows of one prompt, batch by batch."""

    def __init__(self, target: Target, timings: Timings, encoded: EncodedMedia) -> None:
        self._target = target
        self._timings = timings
        self._encoded = encoded

    def of(self, batch: Batch) -> tuple[Float, Float | None]:
        """Embedding rows [n, H] of a batch and, for media, DeepStack rows [K, n, H]."""
        if batch.media is None:
            return self._target.embed(batch.token_ids), None
        started = perf_counter()
        rows = slice(batch.offset, batch.offset + batch.token_ids.size)
        media = self._encoded.rows(batch.media)
        self._timings.vision_seconds += perf_counter() - started
        if batch.is_last_of_span:
            self._encoded.shrink()
        return media.embeds[rows], media.deepstack[:, rows]
