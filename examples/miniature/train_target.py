"""Train the target: the vision tower alone on characters per cell first, then everything."""

from __future__ import annotations

import random
import time
from pathlib import Path

import batches
import torch
import torch.nn.functional as F
from batches import CLASSES, SLOTS, Batch
from model import HIDDEN, encode_pages, make_target, run_text
from optim import Optimizer, schedule
from progress import Log, load_state, save_state
from tokenizers import Tokenizer
from torch import Tensor, nn

from dflash_onnx.models.miniature import data

VISION_CANVASES = ((1, 8), (2, 8), (3, 8), (4, 8), (2, 6), (3, 12), (8, 8))
VISION_CELLS = 1000  # a batch
PHASES = ((0, "published"), (1200, "reading"), (2800, "polish"), (3500, "turns"))
JOINT_STEPS = 3880
# Joint steps and the learning rate's factor at both ends. The edges are as the run went: its end
# was moved four times while it ran.
RATES = (
    (0, 60, 0.0, 1.0),
    (60, 1600, 1.0, 1.0),
    (1600, 1800, 1.0, 0.875),
    (1800, 2800, 0.8, 0.133),
    (2800, 3000, 0.277, 0.154),
    (3000, 3500, 0.286, 0.02),
    (3500, 3520, 0.0, 0.45),
    (3520, JOINT_STEPS, 0.426, 0.02),
)
CHARACTERS_UNTIL = 2800  # joint steps


class Trainee(nn.Module):
    """The target and a throw-away head that names the characters of each cell."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.target = make_target(tokenizer)
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


def answer_logits(target: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits and labels of all answer tokens, and the image rows of each page."""
    pages = [
        encode_pages(target, patches, canvas)
        for patches, canvas in zip(batch.patches, batch.canvases, strict=True)
    ]
    images = [torch.cat(parts, 1) for parts in zip(*pages, strict=True)]
    states, _ = run_text(target, batch.ids, batch.positions, batch.rows, images)
    chosen = batch.labels[:, 1:] != -100
    logits = target.lm_head(states[:, :-1][chosen])
    return logits, batch.labels[:, 1:][chosen], [page[0] for page in pages]


def joint_rate(step: int) -> float:
    """The learning rate's factor at a joint step."""
    for first, last, high, low in RATES:
        if step < last:
            return high + (low - high) * (step + 1 - first) / (last - first)
    return RATES[-1][-1]


def train_jointly(
    tokenizer: Tokenizer, trainee: Trainee, optimizer: Optimizer, step: int
) -> dict[str, float]:
    """One step of the whole target; the character loss fades."""
    phase = [name for first, name in PHASES if step >= first][-1]
    samples = batches.train_samples(random.Random(f"joint/{step}"), phase)
    batch = batches.collate(tokenizer, samples)
    logits, labels, images = answer_logits(trainee.target, batch)
    answer = F.cross_entropy(logits, labels)
    loss, kind = answer, samples[0].kind
    weight = 0.5 * max(0.0, 1 - step / CHARACTERS_UNTIL) ** 0.5
    if images and weight > 0:
        truth = torch.cat([batches.page_labels(samples, i) for i in range(len(images))], 1)
        loss = loss + weight * trainee.character_loss(torch.cat(images, 1), truth)[0]
    optimizer.step(loss, joint_rate(step))
    right = (logits.argmax(-1) == labels).float().mean().item()
    return {f"{kind}_loss": answer.item(), f"{kind}_tokens": right}


def train(tokenizer: Tokenizer, out: Path, vision_steps: int, joint_steps: int) -> nn.Module:
    """Run or resume both stages; the last state stays in `out`/target.pt."""
    torch.manual_seed(0)
    trainee = Trainee(tokenizer)
    for stage, steps in (("vision", vision_steps), ("joint", joint_steps)):
        optimizer = Optimizer(trainee.named_parameters())
        state = out / f"{stage}.pt"
        done = load_state(state, trainee, optimizer)
        log = Log(out / "log.jsonl", stage, steps, done)
        for step in range(done, steps):
            started = time.perf_counter()
            if stage == "vision":
                values = train_vision(trainee, optimizer, step, steps)
            else:
                values = train_jointly(tokenizer, trainee, optimizer, step)
            log.add(step, values | {"seconds": time.perf_counter() - started})
            if (step + 1) % 200 == 0 or step + 1 == steps:
                save_state(state, trainee, optimizer, step + 1)
    return trainee.target
