"""Draft blocks for training and measuring: many anchors of each sample in one forward pass.

Knows which rows a block sees and what the target says of a batch. Knows nothing of losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from batches import Batch
from draft import BLOCK, Draft
from model import Ids, embed, encode_pages, run_text
from torch import Tensor, nn


@dataclass
class Features:
    """What the target says about a batch: its features and its own next tokens.

    `inputs` are the rows that it saw, `states` its normed last ones.
    """

    taps: Tensor
    best: Tensor
    inputs: Tensor
    states: Tensor


@torch.no_grad()
def encode_batch(target: nn.Module, batch: Batch) -> list[Tensor]:
    """Image and DeepStack rows of all pages, for `target_features`."""
    pages = [
        encode_pages(target, patches, canvas)
        for patches, canvas in zip(batch.patches, batch.canvases, strict=True)
    ]
    return [torch.cat(parts, 1) for parts in zip(*pages, strict=True)]


@torch.no_grad()
def target_features(
    target: nn.Module, batch: Batch, images: list[Tensor] | None = None
) -> Features:
    """Run the frozen target over whole sequences."""
    images = encode_batch(target, batch) if images is None else images
    states, taps = run_text(target, batch.ids, batch.positions, batch.rows, images)
    inputs = embed(target, batch.ids, batch.rows, images)
    return Features(taps, target.lm_head(states).argmax(-1), inputs, states)


def ruler(batch: Batch, media: Tensor) -> tuple[Tensor, Tensor]:
    """Draft positions and validity [B, L] of all rows.

    Where `media` [B] is true the policy is `index` (rows are numbered, image rows are there), else
    `gap` (positions of the text, no image rows).
    """
    size, length = batch.ids.shape
    at = torch.where(media[:, None], torch.arange(length), batch.positions[0])
    valid = torch.ones(size, length, dtype=torch.bool)
    valid[:, batch.rows] = media[:, None]
    return at, valid


def run_blocks(
    draft: Draft, target: nn.Module, batch: Batch, features: Features, anchors: Tensor,
    media: Tensor, special: Ids,
) -> Tensor:  # fmt: skip
    """States [B, N, BLOCK, H] of blocks whose first token is at the columns `anchors` [B, N]."""
    size, count = anchors.shape
    at, valid = ruler(batch, media)
    ids = torch.full((size, count, BLOCK), special.mask)
    ids[..., 0] = batch.ids.gather(1, anchors)
    starts = at.gather(1, anchors)
    block_at = (starts[..., None] + torch.arange(BLOCK)).flatten(1)
    columns = torch.arange(batch.ids.shape[1])
    seen = (columns < anchors[..., None]) & valid[:, None]
    seen = seen.repeat_interleave(BLOCK, 1)
    if draft.window is not None:
        seen = seen & (block_at[..., None] - at[:, None] < draft.window)
    own = torch.eye(count, dtype=torch.bool).repeat_interleave(BLOCK, 0)
    own = own.repeat_interleave(BLOCK, 1)[None].expand(size, -1, -1)
    mask = torch.cat((seen, own), -1)[:, None]
    noise = target.get_input_embeddings()(ids.flatten(1))
    states = draft(noise, block_at, features.taps, at, mask)
    return states.unflatten(1, (count, BLOCK))


def propose(draft: Draft, target: nn.Module, states: Tensor, anchor_ids: Tensor) -> Tensor:
    """Greedy drafts [B, N, BLOCK - 1] from block states."""
    hidden = states[..., 1:, :]
    logits = target.lm_head(hidden)
    if not draft.second:
        return logits.argmax(-1)
    top_k = draft.config["dflash_config"]["selector_top_k"]
    unary, ids = logits.topk(top_k, -1)
    before, drafts = anchor_ids, []
    for row in range(BLOCK - 1):
        scores = draft.candidate_selector(
            hidden[..., row, :], unary[..., row, :], ids[..., row, :], before
        )
        before = ids[..., row, :].gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        drafts.append(before)
    return torch.stack(drafts, -1)
