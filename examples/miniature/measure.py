"""Tokens per target call of each drafter, from finished greedy answers.

Knows which drafts a call at each answer token would get and how many of them hold. Knows nothing
of how answers came about or of tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import batches
import torch
from batches import Batch
from blocks import Features, propose, run_blocks, target_features
from draft import Draft
from model import Ids, special_ids
from mtp import Mtp, chain
from tokenizers import Tokenizer
from torch import Tensor, nn

from dflash_onnx.models.miniature import data

CHUNK = 12  # blocks a sample at a time; their rows share one attention call


@dataclass
class Result:
    """A sample and what the target says: token ids with the stop token, text, wrong characters."""

    sample: data.Sample
    ids: list[int]
    text: str
    errors: int
    # Tokens of each target call, by drafter and policy.
    rounds: dict[str, list[int]] = field(default_factory=dict)


@torch.no_grad()
def measure(
    tokenizer: Tokenizer, target: nn.Module, drafters: dict[str, Draft | Mtp],
    results: list[Result],
) -> None:  # fmt: skip
    """Walk the answers of one group call by call; fills `rounds`."""
    special = special_ids(tokenizer)
    batch = batches.collate(tokenizer, [r.sample for r in results], [r.ids for r in results])
    features = target_features(target, batch)
    length = max(len(result.ids) for result in results)
    columns = torch.tensor(batch.starts)[:, None] + torch.arange(length)
    columns = columns.clamp(max=batch.ids.shape[1] - 1)
    for name, drafter in drafters.items():
        if isinstance(drafter, Mtp):
            sets = {"": mtp_drafts(drafter, target, batch, features, columns)}
        else:
            sets = block_drafts(drafter, target, batch, features, columns, special)
        for policy, drafts in sets.items():
            for result, rows in zip(results, drafts.tolist(), strict=True):
                result.rounds[name + policy] = walk(result.ids, rows)


def block_drafts(
    draft: Draft, target: nn.Module, batch: Batch, features: Features, columns: Tensor,
    special: Ids,
) -> dict[str, Tensor]:  # fmt: skip
    """Drafts [B, N, BLOCK - 1] behind the tokens at `columns` by policy; without images one."""
    sets = {}
    for policy in ("/index", "/gap") if batch.canvases else ("/index",):
        media = torch.full((len(columns),), policy == "/index")
        parts = []
        for anchors in columns.split(CHUNK, 1):
            states = run_blocks(draft, target, batch, features, anchors, media, special)
            parts.append(propose(draft, target, states, batch.ids.gather(1, anchors)))
        sets[policy] = torch.cat(parts, 1)
    return {"/gap": sets["/index"]} | sets


def mtp_drafts(
    mtp: Mtp, target: nn.Module, batch: Batch, features: Features, columns: Tensor
) -> Tensor:
    """Drafts [B, N, DRAFTS] behind the tokens at `columns`."""
    states = chain(mtp, target, batch, features)
    drafts = target.lm_head(states).argmax(-1)
    rows = (columns - 1)[..., None].expand(-1, -1, drafts.shape[-1])
    return drafts.gather(1, rows)


def walk(ids: list[int], drafts: list[list[int]]) -> list[int]:
    """Tokens that each target call yields when block i starts at token i of the answer."""
    rounds, anchor = [], 0
    while anchor < len(ids) - 1:
        rest, drafted = ids[anchor + 1 :], drafts[anchor]
        accepted = 0
        while accepted < min(len(drafted), len(rest)) and drafted[accepted] == rest[accepted]:
            accepted += 1
        rounds.append(min(accepted + 1, len(rest)))
        anchor += rounds[-1]
    return rounds
