"""Train the target: the vision tower alone on characters per cell first, then everything.

The hybrid begins from the finished pure-attention target instead and stays close to its layers at
first. Knows both courses; batches, optimiser and files are other modules' matter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import batches
import torch
import torch.nn.functional as F
from batches import CLASSES, SLOTS, Batch
from hybrid import distance, make_hybrid
from model import HIDDEN, encode_pages, layer_states, make_target, norm
from optim import Optimizer, schedule
from progress import run_stage
from tokenizers import Tokenizer
from torch import Tensor, nn

from dflash_onnx.models.miniature import data

VISION_CANVASES = ((1, 8), (2, 8), (3, 8), (4, 8), (2, 6), (3, 12), (8, 8))
VISION_CELLS = 1000  # a batch
Rates = tuple[tuple[int, int, float, float], ...]


@dataclass(frozen=True)
class Course:
    """What a joint stage does at which step."""

    phases: tuple[tuple[int, str], ...]
    rates: Rates  # first and last step, the learning rate's factor at both
    characters_until: int = 0
    alike_until: int = 0


JOINT_STEPS = 3880
# The edges are as the run went: its end was moved four times while it ran.
PURE = Course(
    phases=((0, "published"), (1200, "reading"), (2800, "polish"), (3500, "turns")),
    rates=(
        (0, 60, 0.0, 1.0),
        (60, 1600, 1.0, 1.0),
        (1600, 1800, 1.0, 0.875),
        (1800, 2800, 0.8, 0.133),
        (2800, 3000, 0.277, 0.154),
        (3000, 3500, 0.286, 0.02),
        (3500, 3520, 0.0, 0.45),
        (3520, JOINT_STEPS, 0.426, 0.02),
    ),
    characters_until=2800,
)
HYBRID_STEPS = 2900
# Here too: phases and end were moved while it ran, three times.
HYBRID = Course(
    phases=(
        (0, "reading"),
        (300, "polish"),
        (800, "fields"),
        (1800, "reading"),
        (2250, "turns"),
        (2700, "fields"),
    ),
    rates=(
        (0, 60, 0.0, 0.7),
        (60, 900, 0.7, 0.7),
        (900, 1800, 0.7, 0.34),
        (1800, HYBRID_STEPS, 0.34, 0.02),
    ),
    alike_until=700,
)


class Trainee(nn.Module):
    """The target and a throw-away head that names the characters of each cell."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.target = target
        self.characters = nn.Linear(HIDDEN, SLOTS * CLASSES)

    def character_loss(self, image_rows: Tensor, labels: Tensor) -> tuple[Tensor, float]:
        """Cross-entropy of the slots, empty ones at 0.3, and the accuracy of the filled ones."""
        logits = self.characters(image_rows).view(-1, CLASSES)
        labels = labels.view(-1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        filled = labels > 0
        right = (logits[filled].argmax(-1) == labels[filled]).float().mean().item()
        return losses[filled].mean() + 0.3 * losses[~filled].mean(), right


def train_vision(trainee: Trainee, optimizer: Optimizer, step: int, steps: int) -> dict[str, float]:
    """One step of the vision tower alone."""
    rng = random.Random(f"vision/{step}")
    canvas = rng.choice(VISION_CANVASES)
    size = VISION_CELLS // (canvas[0] * canvas[1])
    samples = [data.make(rng, "read", (canvas,), "train") for _ in range(size)]
    image = encode_pages(trainee.target, batches.page_patches(samples, 0), canvas)[0]
    loss, right = trainee.character_loss(image, batches.page_labels(samples, 0))
    optimizer.step(loss, schedule(step, steps, flat=0.7))
    return {"loss": loss.item(), "characters": right}


def read_batch(target: nn.Module, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Output of every layer, and the image rows of each page."""
    pages = [
        encode_pages(target, patches, canvas)
        for patches, canvas in zip(batch.patches, batch.canvases, strict=True)
    ]
    images = [torch.cat(parts, 1) for parts in zip(*pages, strict=True)]
    states = layer_states(target, batch.ids, batch.positions, batch.rows, images)
    return states, [page[0] for page in pages]


def answer_logits(target: nn.Module, batch: Batch, last: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels of all answer tokens from the last layer's output."""
    chosen = batch.labels[:, 1:] != -100
    rows = norm(target.model.language_model.norm, last[:, :-1][chosen])
    return target.lm_head(rows), batch.labels[:, 1:][chosen]


def joint_rate(course: Course, step: int) -> float:
    """The learning rate's factor at a joint step."""
    for first, last, high, low in course.rates:
        if step < last:
            return high + (low - high) * (step + 1 - first) / (last - first)
    return course.rates[-1][-1]


def aside_loss(
    trainee: Trainee, batch: Batch, states: list[Tensor], images: list[Tensor], course: Course,
    step: int, source: nn.Module | None,
) -> Tensor:  # fmt: skip
    """What helps the course's first steps: characters of cells, or the other target's layers."""
    loss = torch.zeros(())
    if images and step < course.characters_until:
        weight = 0.5 * (1 - step / course.characters_until) ** 0.5
        slots = range(len(images))
        truth = torch.cat([batches.page_labels(batch.samples, i) for i in slots], 1)
        loss = weight * trainee.character_loss(torch.cat(images, 1), truth)[0]
    if source is not None and step < course.alike_until:
        with torch.no_grad():
            others, _ = read_batch(source, batch)
        loss = loss + 2.0 * (1 - step / course.alike_until) * distance(states, others)
    return loss


def train_jointly(
    tokenizer: Tokenizer, trainee: Trainee, optimizer: Optimizer, course: Course, step: int,
    source: nn.Module | None,
) -> dict[str, float]:  # fmt: skip
    """One step of the whole target."""
    phase = [name for first, name in course.phases if step >= first][-1]
    samples = batches.train_samples(random.Random(f"joint/{step}"), phase)
    batch = batches.collate(tokenizer, samples)
    states, images = read_batch(trainee.target, batch)
    logits, labels = answer_logits(trainee.target, batch, states[-1])
    answer = F.cross_entropy(logits, labels)
    aside = aside_loss(trainee, batch, states, images, course, step, source)
    optimizer.step(answer + aside, joint_rate(course, step))
    right = (logits.argmax(-1) == labels).float().mean().item()
    kind = samples[0].kind
    return {f"{kind}_loss": answer.item(), f"{kind}_tokens": right, "aside": aside.item()}


def train(
    tokenizer: Tokenizer, out: Path, vision_steps: int, joint_steps: int,
    source: nn.Module | None = None,
) -> nn.Module:  # fmt: skip
    """Run or resume the stages; the last state stays in `out`. With `source`: the hybrid, from it.

    The hybrid has no stage for the vision tower: `source` gives it one that can read.
    """
    torch.manual_seed(0)
    target = make_target(tokenizer) if source is None else make_hybrid(tokenizer, source)
    trainee, course = Trainee(target), PURE if source is None else HYBRID

    def see(optimizer: Optimizer, step: int) -> dict[str, float]:
        return train_vision(trainee, optimizer, step, vision_steps)

    def join(optimizer: Optimizer, step: int) -> dict[str, float]:
        return train_jointly(tokenizer, trainee, optimizer, course, step, source)

    run_stage(out, "vision", vision_steps, trainee, see)
    run_stage(out, "joint", joint_steps, trainee, join)
    return target
