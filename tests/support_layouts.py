"""Prompts of every media layout for the exactness suite, also such as no chat template writes.

Two of them come second in a conversation: one goes on where the first answer was broken off, the
other has another answer in its place, so that recurrent state must go back to a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from support_drafters import Known
from support_images import make_image, random_features

from dflash_onnx.runtime import Model
from dflash_onnx.runtime.images import prepare_image
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.plan import Media, PlanBuilder, PromptPlan
from dflash_onnx.runtime.target import ImageRows

TEXT = "Describe what you see: a small red house near the river, or two people on a bridge?"
AFTER = "Compare both pictures. What has changed?"
SMALL, TALL = (64, 96), (128, 32)
# One patch row: it takes more positions than a window of 16, and more rows.
LONG = (64, 576)
# Tokens of a first answer that are there when it is broken off.
NUM_KEPT = 7


@dataclass(frozen=True)
class Before:
    """A turn that a conversation has had: its prompt, its answer, what comes of its rows.

    `continues`: the next prompt has all of its rows; else it leaves them within the answer.
    """

    plan: PromptPlan
    known: Known
    continues: bool


@dataclass(frozen=True)
class Prompt:
    """A prompt plan, and the turn that the conversation has had before, if any."""

    plan: PromptPlan
    before: Before | None = None


def make_prompt(model: Model, layout: str) -> Prompt:
    """The prompt of one of `LAYOUTS`."""
    if layout in SECOND:
        return SECOND[layout](model)
    parts = LAYOUTS[layout]
    if layout in CHAT:
        sizes = [part for part in parts if isinstance(part, tuple)]
        images = [make_image(size[0], size[1], i) for i, size in enumerate(sizes)]
        content = [{"type": "image"} if isinstance(p, tuple) else _text(p) for p in parts]
        return Prompt(model.plan([{"role": "user", "content": content}], images))
    return Prompt(_lay_out(model, parts))


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _after_another_answer(model: Model) -> Prompt:
    """A chat whose first answer was replaced: only rows up to it are as they were."""
    image = make_image(*LONG, seed=5)
    messages: list[dict] = [{"role": "user", "content": [{"type": "image"}, _text(TEXT)]}]
    before = _answered(model, model.plan(messages, [image]), continues=False)
    messages += [{"role": "assistant", "content": "A house, and a river."}]
    messages += [{"role": "user", "content": [{"type": "image"}, _text(AFTER)]}]
    return Prompt(model.plan(messages, [image, make_image(*SMALL, seed=6)]), before)


def _after_the_same_answer(model: Model) -> Prompt:
    """A prompt that goes on with the very tokens of an answer which was broken off."""
    parts: tuple = (TEXT, LONG, AFTER)
    before = _answered(model, _lay_out(model, parts), continues=True)
    answer = [*before.known.ids[:NUM_KEPT], model.manifest.stop_ids[0]]
    return Prompt(_lay_out(model, (*parts, answer, SMALL, TEXT)), before)


def _answered(model: Model, plan: PromptPlan, continues: bool) -> Before:
    options = make_options(max_new_tokens=2 * NUM_KEPT)
    ids = model.conversation("none").generate_plan(plan, options).result().token_ids
    known = Known(ids, plan.num_rows, int(plan.mrope_positions.max()) + 1)
    return Before(plan, known, continues)


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
    "reused to a snapshot": (),
}
SECOND = {"reused": _after_the_same_answer, "reused to a snapshot": _after_another_answer}


def _lay_out(model: Model, parts: tuple) -> PromptPlan:
    """Texts, lists of ids, sizes as images, numbers as that many rows whose positions advance."""
    builder, placeholder = PlanBuilder(), model.manifest.target.special.image
    for i, part in enumerate(parts):
        if isinstance(part, str):
            builder.text(model.tokenizer.encode(part))
        elif isinstance(part, list):
            builder.text(part)
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
