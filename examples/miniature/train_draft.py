"""Train a DFlash drafter on a frozen target's features to say what the target will say.

Knows anchors, labels and the loss. The drafters, their blocks and the loop are elsewhere.
"""

from __future__ import annotations

import random
from pathlib import Path

import batches
import torch
import torch.nn.functional as F
from batches import Batch
from blocks import Features, propose, run_blocks, target_features
from draft import BLOCK, CANDIDATES, Draft, make_config
from model import special_ids
from optim import Optimizer, schedule
from progress import run_stage
from tokenizers import Tokenizer
from torch import Tensor, nn

ANCHORS = 10  # blocks a sample
DECAY = 4.0


def pick_anchors(rng: random.Random, batch: Batch) -> Tensor:
    """Random columns [B, ANCHORS] of answer tokens; every eighth is the first one."""
    picks = [
        [start if rng.random() < 0.12 else rng.randrange(start, end - 1) for _ in range(ANCHORS)]
        for start, end in zip(batch.starts, batch.lengths, strict=True)
    ]
    return torch.tensor(picks)


def block_labels(batch: Batch, features: Features, anchors: Tensor) -> Tensor:
    """The target's own tokens after each anchor, -100 behind the answer's end."""
    columns = anchors[..., None] + torch.arange(1, BLOCK)
    inside = columns < torch.tensor(batch.lengths)[:, None, None]
    before = (columns - 1).clamp(max=batch.ids.shape[1] - 1)
    best = features.best.gather(1, before.flatten(1)).view(columns.shape)
    return torch.where(inside, best, -100)


def draft_loss(
    draft: Draft, target: nn.Module, states: Tensor, labels: Tensor, anchor_ids: Tensor
) -> Tensor:
    """Cross-entropy that counts early rows more, plus the selector's over its candidates."""
    hidden = states[..., 1:, :]
    logits = target.lm_head(hidden)
    weights = torch.exp(-torch.arange(BLOCK - 1) / DECAY) * (labels != -100)
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    loss = (losses.view(labels.shape) * weights).sum() / weights.sum()
    if not draft.second:
        return loss
    unary, ids = logits.detach().topk(CANDIDATES, -1)
    before = torch.cat((anchor_ids[..., None], labels[..., :-1].clamp(min=0)), -1)
    scores = draft.candidate_selector(hidden, unary, ids, before)
    found = (ids == labels[..., None]) & (labels != -100)[..., None]
    chosen = torch.where(found, scores, 0).sum(-1) - scores.logsumexp(-1)
    weights = weights * found.any(-1)
    return loss - (chosen * weights).sum() / weights.sum().clamp(min=1)


def train_step(
    tokenizer: Tokenizer, target: nn.Module, draft: Draft, optimizer: Optimizer, step: int,
    steps: int,
) -> dict[str, float]:  # fmt: skip
    """One batch: half of its samples with image rows (`index`), half without (`gap`)."""
    rng = random.Random(f"draft/{step}")
    batch = batches.collate(tokenizer, batches.train_samples(rng))
    features = target_features(target, batch)
    anchors = pick_anchors(rng, batch)
    media = torch.tensor([rng.random() < 0.5 for _ in batch.samples])
    states = run_blocks(draft, target, batch, features, anchors, media, special_ids(tokenizer))
    labels = block_labels(batch, features, anchors)
    anchor_ids = batch.ids.gather(1, anchors)
    loss = draft_loss(draft, target, states, labels, anchor_ids)
    optimizer.step(loss, schedule(step, steps))
    with torch.no_grad():
        right = propose(draft, target, states, anchor_ids) == labels
        length = right.float().cumprod(-1).sum(-1).mean(1) + 1
    kind = batch.samples[0].kind
    values = {"loss": loss.item()}
    for name, part in (("index", length[media]), ("gap", length[~media])):
        if len(part):
            values[f"{kind}_{name}"] = part.mean().item()
    return values


def train(
    tokenizer: Tokenizer, target: nn.Module, kind: str, out: Path, steps: int,
    start: Draft | None = None,
) -> Draft:  # fmt: skip
    """Run or resume the training of a drafter of the kind `dflash` or `dflash2`.

    It begins with the body of the drafter `start` if given; what that lacks begins as identity.
    """
    torch.manual_seed(1)
    target.eval().requires_grad_(False)
    draft = Draft(make_config(kind, target, special_ids(tokenizer).mask))
    if start is not None:
        draft.load_state_dict(start.state_dict(), strict=False)
    run_stage(
        out, kind, steps, draft,
        lambda optimizer, step: train_step(tokenizer, target, draft, optimizer, step, steps),
    )  # fmt: skip
    return draft
