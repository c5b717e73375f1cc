"""Prompts of every media layout for the exactness suite, also such as no chat template writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from support_images import make_image, random_features

from dflash_onnx.runtime import Model
from dflash_onnx.runtime.images import prepare_image
from dflash_onnx.runtime.plan import Media, PlanBuilder, PromptPlan
from dflash_onnx.runtime.target import ImageRows

TEXT = "Describe what you see: a small red house near the river, or two people on a bridge?"
AFTER = "Compare both pictures. What has changed?"
SMALL, TALL = (64, 96), (128, 32)
# One patch row: it takes more positions than a window of 16, and more rows.
LONG = (64, 576)


@dataclass(frozen=True)
class Prompt:
    """A prompt plan, and the turn that the conversation has had before, if any."""

    plan: PromptPlan
    before: PromptPlan | None = None


def make_prompt(model: Model, layout: str) -> Prompt:
    """The prompt of one of `LAYOUTS`."""
    if layout == "reused":
        return _second_turn(model)
    parts = LAYOUTS[layout]
    if layout in CHAT:
        sizes = [part for part in parts if isinstance(part, tuple)]
        images = [make_image(size[0], size[1], i) for i, size in enumerate(sizes)]
        content = [{"type": "image"} if isinstance(p, tuple) else _text(p) for p in parts]
        return Prompt(model.plan([{"role": "user", "content": content}], images))
    return Prompt(_lay_out(model, parts))


CHAT = {
    "text": (TEXT,),
    "one image": (SMALL, TEXT),
    "long image": (TEXT, LONG, AFTER),
    "two images": (SMALL, TEXT, TALL, AFTER),
}
LAYOUTS: dict[str, tuple] = {
    **CHAT,
    "image first": (SMALL, TEXT),
    "image last": (TEXT, LONG),
    "adjacent images": (TEXT, TALL, LONG, (32, 32), AFTER),
    "advancing media": (TEXT, 20, AFTER),
    "reused": (),
}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _second_turn(model: Model) -> Prompt:
    image = make_image(*LONG, seed=5)
    messages: list[dict] = [{"role": "user", "content": [{"type": "image"}, _text(TEXT)]}]
    before = model.plan(messages, [image])
    answer = model.generate(messages, [image], "none", max_new_tokens=8).result().text
    messages += [{"role": "assistant", "content": answer}]
    messages += [{"role": "user", "content": [{"type": "image"}, _text(AFTER)]}]
    return Prompt(model.plan(messages, [image, make_image(*SMALL, seed=6)]), before)


def _lay_out(model: Model, parts: tuple) -> PromptPlan:
    """Texts as they are, sizes as images, numbers as that many rows whose positions advance."""
    builder, placeholder = PlanBuilder(), model.manifest.target.special.image
    for i, part in enumerate(parts):
        if isinstance(part, str):
            builder.text(model.tokenizer.encode(part))
        elif isinstance(part, tuple):
            image = prepare_image(make_image(part[0], part[1], i), model.image_config)
            encode = partial(model.target.encode_patches, image.patches, image.grid)
            media = Media("image", image.digest, image.grid.num_rows, encode)
            builder.image(placeholder, image.grid, media)
        else:
            builder.audio(placeholder, Media("audio", f"clip {i}", part, _clip(model, part, i)))
    return builder.plan()


def _clip(model: Model, num_rows: int, seed: int) -> partial[ImageRows]:
    width = model.manifest.target.text.hidden_size
    deepstack = np.zeros((model.target.config.num_deepstack, num_rows, width), np.float32)
    embeds = random_features(seed, num_rows, width) * np.float32(0.2)
    return partial(ImageRows, embeds, deepstack)
