"""Train the MTP head on a frozen target's states to say what the target will say.

Knows the loss of a chain and one step. Batches, the chain itself and the loop are elsewhere.
"""

from __future__ import annotations

import random
from pathlib import Path

import batches
import torch
import torch.nn.functional as F
from batches import Batch
from blocks import Features, target_features
from mtp import DRAFTS, Mtp, chain
from optim import Optimizer, schedule
from progress import run_stage
from tokenizers import Tokenizer
from torch import Tensor, nn

WEIGHTS = (1.0, 0.6, 0.4)  # of the chain's links


def chain_labels(batch: Batch, features: Features) -> Tensor:
    """The target's own tokens [B, L, DRAFTS] of all links, -100 outside of the answer.

    A link behind a token that the target would not have said has no label either.
    """
    length = batch.ids.shape[1]
    columns = torch.arange(length)
    starts = torch.tensor(batch.starts)[:, None]
    ends = torch.tensor(batch.lengths)[:, None]
    best = F.pad(features.best, (0, DRAFTS))
    ids = F.pad(batch.ids, (0, DRAFTS + 1))
    valid, labels = columns >= starts - 1, []
    for link in range(1, DRAFTS + 1):
        said = best[:, link : link + length]
        inside = columns + link + 1 < ends
        labels.append(torch.where(valid & inside, said, -100))
        valid = valid & (said == ids[:, link + 1 : link + 1 + length])
    return torch.stack(labels, -1)


def train_step(
    tokenizer: Tokenizer, target: nn.Module, mtp: Mtp, optimizer: Optimizer, step: int, steps: int
) -> dict[str, float]:
    """One batch; logs the drafts accepted in a row plus one."""
    batch = batches.collate(tokenizer, batches.train_samples(random.Random(f"mtp/{step}")))
    features = target_features(target, batch)
    labels = chain_labels(batch, features)
    rows = (labels != -100).any(-1)
    labels = labels[rows]
    logits = target.lm_head(chain(mtp, target, batch, features)[rows])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = torch.tensor(WEIGHTS) * (labels != -100)
    loss = (losses.view(labels.shape) * weights).sum() / weights.sum()
    optimizer.step(loss, schedule(step, steps))
    right = (logits.argmax(-1) == labels).float().cumprod(-1).sum(-1).mean() + 1
    return {"loss": loss.item(), batch.samples[0].kind: right.item()}


def train(tokenizer: Tokenizer, target: nn.Module, out: Path, steps: int) -> Mtp:
    """Run or resume the training of the head."""
    torch.manual_seed(2)
    target.eval().requires_grad_(False)
    mtp = Mtp(target).requires_grad_(True)
    run_stage(
        out, "mtp", steps, mtp,
        lambda optimizer, step: train_step(tokenizer, target, mtp, optimizer, step, steps),
    )  # fmt: skip
    return mtp
