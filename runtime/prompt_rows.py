"""What the target is fed for a prompt: embedding rows of text, encoded rows of images and clips.

Runs the vision tower once per distinct image, when its first row is needed; knows no cache.
"""

from __future__ import annotations

from time import perf_counter

from .plan import Batch, Media, PromptPlan
from .results import Timings
from .target import Float, ImageRows, Target


class PromptRows:
    """The input rows of one prompt, batch by batch."""

    def __init__(self, target: Target, plan: PromptPlan, timings: Timings) -> None:
        self._target = target
        self._plan = plan
        self._timings = timings
        self._encoded: dict[str, ImageRows] = {}

    def of(self, batch: Batch) -> tuple[Float, Float | None]:
        """Embedding rows [n, H] of a batch and, for media, DeepStack rows [K, n, H]."""
        if batch.media is None:
            return self._target.embed(batch.token_ids), None
        started = perf_counter()
        rows = slice(batch.offset, batch.offset + batch.token_ids.size)
        media = self._encode(batch.media)
        self._timings.vision_seconds += perf_counter() - started
        if self._plan.is_last_use(batch):
            # A prompt of many pages must not hold all their rows at once.
            del self._encoded[batch.media.digest]
        return media.embeds[rows], media.deepstack[:, rows]

    def _encode(self, media: Media) -> ImageRows:
        """The rows of an image or clip; one that stands in the prompt twice is encoded once."""
        if media.digest not in self._encoded:
            self._encoded[media.digest] = media.encode()
        return self._encoded[media.digest]
