"""A loaded bundle: networks, tokenizer and template, shared by all conversations.

Immutable after load. Files that are missing, damaged or foreign are found at load, also those of
networks that are opened when a conversation first needs them: vision tower and drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from ..models.bundle_path import bundle_file
from ..models.errors import ImageError, ManifestError, PromptError
from ..models.image_config import ImageConfig
from ..models.manifest import Manifest
from .binding import Clock
from .bundle_files import open_bundle, read_text
from .chat import ChatTemplate, Messages, carried_images, normalise_messages
from .conversation import Conversation, Generation
from .draft_factory import DraftChoice, DraftFactory
from .drafters.base import Drafter
from .drafters.mtp import MtpNetworks
from .drafters.networks import DFlashNetworks
from .images import ImageSource, PreparedImage, prepare_image
from .plan import Media, PlanBuilder, PromptPlan
from .probe import block_difference
from .providers import LINEAR_ATTENTION
from .session import Runtime
from .target import ImageRows, Target, open_head
from .tokenizer import Tokenizer, encode_chat


class Model:
    """A bundle ready to generate."""

    def __init__(
        self,
        folder: str | Path,
        provider: str = "cpu",
        *,
        threads: int | None = None,
        context_limit: int | None = None,
        max_pixels: int | None = None,
        append_by_graph: bool = False,
        portable: bool = False,
    ) -> None:
        folder = Path(folder)
        self.folder = folder
        self.manifest: Manifest = open_bundle(folder)
        self.image_config = _image_config(folder, self.manifest, max_pixels)
        self.context_limit = _limit(context_limit, self.manifest)
        self.template = _template(folder)
        self._runtime = Runtime(folder, provider, threads)
        # The head first: while a matrix is packed it is held twice, and this is the largest. Then
        # the tokenizer: the memory that its loading leaves free is filled by the decoder's weights.
        head = open_head(self.manifest, self._runtime)
        self.tokenizer = _tokenizer(folder, self.manifest)
        portable = portable or provider not in LINEAR_ATTENTION
        self.target = Target(folder, self.manifest, self._runtime, head, portable)
        self.networks = {
            name: DFlashNetworks(
                name, folder, self.manifest, self._runtime, self.target, append_by_graph
            )
            for name in self.manifest.drafts
        }
        self._block_difference = block_difference(self.target)
        runtime, target = self._runtime, self.target
        self.mtp = MtpNetworks(self.manifest, runtime, target) if self.manifest.mtp else None
        self.drafts = DraftFactory(self.manifest, self.networks, self.mtp, self.context_limit)

    def conversation(self, draft: str | Drafter | None = None, **choice: Any) -> Conversation:
        """A new conversation; `draft` and `holes`, `hole_rows`, `draft_tokens` as `DraftChoice`."""
        return Conversation(self, DraftChoice(draft, **choice))

    def generate(
        self,
        messages: Messages,
        images: Sequence[ImageSource] = (),
        draft: str | Drafter | None = None,
        *,
        holes: str | None = None,
        hole_rows: int | None = None,
        draft_tokens: int | Literal["auto"] | None = None,
        **options: Any,
    ) -> Generation:
        """Answer `messages` in a conversation of its own; iterate the result for deltas."""
        choice = DraftChoice(draft, holes, hole_rows, draft_tokens)
        return Conversation(self, choice).generate(messages, images, **options)

    def plan(
        self,
        messages: Messages,
        images: Sequence[ImageSource] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> PromptPlan:
        """Lay out messages and images as rows and positions.

        `template_options` go to the chat template, e.g. {"enable_thinking": False}.
        """
        if isinstance(images, (str, bytes, Path, np.ndarray, Image.Image)):
            raise PromptError("images must be a list of pictures; put a single one in a list.")
        carried = carried_images(messages)
        if carried and images:
            raise PromptError("pictures were given both in messages and in images; use one place.")
        images = carried or images
        config = self.image_config
        if config is None and images:
            raise PromptError(f"{self.folder} holds a text-only model; it reads no pictures.")
        prepared = [prepare_image(image, config) for image in images if config is not None]
        return self.plan_prepared(messages, prepared, template_options)

    def plan_prepared(
        self,
        messages: Messages,
        images: Sequence[PreparedImage],
        template_options: Mapping[str, Any] | None = None,
    ) -> PromptPlan:
        """Lay out messages and images that are already patches."""
        normal = normalise_messages(messages, len(images))
        ids = encode_chat(self.template, self.tokenizer, normal, **(template_options or {}))
        special = self.manifest.target.special
        placeholder = special.image if special else None
        written = sum(token == placeholder for token in ids)
        if written != len(images):
            raise PromptError(
                f"the chat template wrote {written} image placeholder(s) for "
                f"{len(images)} image(s); put images into user messages."
            )
        return self._layout(ids, placeholder, images)

    def provider_info(self) -> dict[str, Any]:
        """Where the networks run, for results and reports."""
        runtime = self._runtime
        return {
            "name": runtime.provider,
            "onnxruntime": runtime.version,
            "threads": runtime.threads,
            "precision": str(self.manifest.precision),
            "block_difference": self._block_difference,
        }

    def clocks(self) -> dict[str, Clock]:
        """How long every network has run so far, in all conversations together."""
        return self._runtime.clocks()

    def _layout(
        self, ids: list[int], placeholder: int | None, images: Sequence[PreparedImage]
    ) -> PromptPlan:
        builder, start, waiting = PlanBuilder(), 0, iter(images)
        for i, token in enumerate(ids):
            if placeholder is not None and token == placeholder:
                builder.text(ids[start:i])
                image = next(waiting)
                builder.image(placeholder, image.grid, self._media(image))
                start = i + 1
        builder.text(ids[start:])
        return builder.plan()

    def _media(self, image: PreparedImage) -> Media:
        def encode() -> ImageRows:
            return self.target.encode_patches(image.patches, image.grid)

        return Media("image", image.digest, image.grid.num_rows, encode)


def load(bundle: str | Path, provider: str = "cpu", **options: Any) -> Model:
    """Load a bundle; options are those of `Model`. Raises `ManifestError` or `ProviderError`."""
    return Model(bundle, provider, **options)


def _tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    path = bundle_file(folder, "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    if tokenizer.vocab_size != manifest.tokenizer_size:
        raise ManifestError(
            f"{path} has {tokenizer.vocab_size} entries, the manifest's tokenizer_size says "
            f"{manifest.tokenizer_size}; the files belong to different exports. Export the bundle "
            "again."
        )
    return tokenizer


def _template(folder: Path) -> ChatTemplate:
    name = "chat_template.jinja"
    return ChatTemplate(read_text(folder, name), str(folder / name))


def _image_config(folder: Path, manifest: Manifest, max_pixels: int | None) -> ImageConfig | None:
    if manifest.image is not None:
        return manifest.image.with_max_pixels(max_pixels)
    if max_pixels is not None:
        raise ImageError(f"{folder} holds a text-only model; --max-pixels has no meaning for it.")
    return None


def _limit(asked: int | None, manifest: Manifest) -> int:
    trained = manifest.target.text.context_limit
    limit = trained if asked is None else asked
    if not 1 <= limit <= trained:
        raise PromptError(f"the context limit must lie between 1 and {trained}, not {limit}.")
    return limit


__all__ = ["Model", "load"]
