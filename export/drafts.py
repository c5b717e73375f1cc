"""A drafter's part of a bundle: pair checks, weights, three graphs and its manifest entry.

Knows which target a drafter fits; the networks themselves are in `models.graphs`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..models.config import TargetConfig
from ..models.draft_config import MEDIA_ANSWERS, DraftConfig, parse_draft
from ..models.errors import ExportError
from ..models.graphs.dflash import build_append, build_block, build_inject
from ..models.graphs.target import build_head
from ..models.manifest import DraftSpec, SelectorSpec, TableSpec
from ..models.stored import StoredTensor
from .checkpoint import INDEX_DTYPES, Checkpoint, read_blocks, same_values
from .draft_weights import PREDECESSOR, SELECTOR_PROJECTION, SUCCESSOR, draft_weights
from .graphs import GraphWriter
from .store import DataWriter
from .weights import (
    HEAD,
    HEAD_PREFIXES,
    TABLE,
    find,
    refuse_leftovers,
    resolve,
    text_prefixes,
)

PREFIXES = ("", "model.")
IGNORED = {
    "t2d": "mask of kept target ids; d2t says the same",
    "verifier_": "training-only copies of the target",
    "embed_tokens.": "the target's table is used",
    "model.embed_tokens.": "the target's table is used",
    "rotary_emb.": "recomputed",
}


@dataclass(frozen=True)
class Draft:
    """A drafter checkpoint that fits its target."""

    name: str
    checkpoint: Checkpoint
    config: DraftConfig


def open_drafts(folders: Sequence[Path], target: TargetConfig, media: str | None) -> list[Draft]:
    """Open drafters and refuse a pair that cannot work, with both sides in the message.

    A drafter is named after its kind, the second of a kind gets "-2", and so on. `media` is one
    of `MEDIA_ANSWERS` in place of what the checkpoints say, or None.
    """
    drafts: list[Draft] = []
    for folder in folders:
        checkpoint = Checkpoint(folder)
        config = parse_draft(checkpoint.config, checkpoint.config_file)
        if media is not None:
            config = replace(config, trained_on_media=MEDIA_ANSWERS[media])
        _check_pair(config, checkpoint.config_file, target)
        count = sum(d.config.kind == config.kind for d in drafts) + 1
        name = config.kind if count == 1 else f"{config.kind}-{count}"
        drafts.append(Draft(name, checkpoint, config))
    return drafts


def _check_pair(draft: DraftConfig, where: str, target: TargetConfig) -> None:
    text = target.text
    expected_taps = draft.target_hidden_size or draft.hidden_size
    pairs = (
        ("vocab_size", draft.vocab_size, text.vocab_size),
        ("hidden_size", draft.hidden_size, text.hidden_size),
        ("target_hidden_size", expected_taps, text.hidden_size),
        ("num_target_layers", draft.num_target_layers or text.num_layers, text.num_layers),
    )
    for key, ours, theirs in pairs:
        if ours != theirs:
            raise ExportError(
                f"{where}: the drafter's {key} is {ours}, the target's is {theirs}; "
                "this drafter was made for another target."
            )
    if max(draft.target_layer_ids) >= text.num_layers:
        raise ExportError(
            f"{where}: target_layer_ids {list(draft.target_layer_ids)} ask for layers the target "
            f"does not have (it has {text.num_layers}); this drafter was made for another target."
        )


def refuse_own_tables(draft: Draft, checkpoint: Checkpoint, target: TargetConfig) -> None:
    """The target's embedding and head serve the drafter; a drafter that ships others is refused."""
    head = TABLE if target.text.tied_head else HEAD
    shared = {TABLE: TABLE} | ({HEAD: head} if draft.config.draft_vocab_size is None else {})
    for ours, theirs in shared.items():
        own = next((t for p in PREFIXES if (t := draft.checkpoint.tensors.get(p + ours))), None)
        prefixes = HEAD_PREFIXES if theirs == HEAD else text_prefixes(target)
        size = (target.text.vocab_size, target.text.hidden_size)
        if own and not same_values(own, find(checkpoint, theirs, size, prefixes)):
            raise ExportError(
                f"{own.file}: the drafter ships an {own.name} of its own that differs from the "
                "target's; such drafters are not supported yet."
            )


def write_draft_weights(draft: Draft, target: TargetConfig, writer: DataWriter) -> None:
    """Stream the drafter's weights; every tensor of the checkpoint must find its place."""
    found = resolve(
        draft_weights(draft.config, target.text.hidden_size), draft.checkpoint, PREFIXES
    )
    used = [info for _, infos in found for info in infos]
    ignored = dict(IGNORED)
    if draft.config.draft_vocab_size is None:
        ignored["lm_head."] = "the target's head is used"
    else:
        offsets = find(draft.checkpoint, "d2t", (draft.config.draft_vocab_size,), PREFIXES)
        used.append(offsets)
        blocks = np.concatenate(list(read_blocks(offsets, INDEX_DTYPES)))
        writer.add_array("d2t", _target_ids(draft, blocks))
    refuse_leftovers(draft.checkpoint, used, ignored)
    for want, infos in found:
        writer.add(want.name, infos, want.shape, want.matrix)


def _target_ids(draft: Draft, offsets: np.ndarray) -> np.ndarray:
    """Absolute target ids from the file's offsets (target = draft id + d2t[draft id])."""
    ids = offsets.astype(np.int64) + np.arange(offsets.size)
    if ids.min() < 0 or ids.max() >= draft.config.vocab_size:
        raise ExportError(
            f"{draft.checkpoint.folder}: d2t maps to ids {ids.min()}..{ids.max()}, outside the "
            f"target's vocabulary of {draft.config.vocab_size}."
        )
    return ids


def write_draft_graphs(
    draft: Draft,
    target: TargetConfig,
    tensors: dict[str, StoredTensor],
    graphs: GraphWriter,
    num_top: int,
) -> None:
    """Write inject, block, append, and a reduced vocabulary's own head."""
    config = draft.config
    kinds = tuple(dict.fromkeys(config.layers))
    width, vocab_size = config.hidden_size, config.draft_vocab_size
    graphs.write(f"{draft.name}.inject", build_inject(config, target.text.hidden_size, tensors))
    graphs.write(f"{draft.name}.block", build_block(config, kinds, SELECTOR_PROJECTION, tensors))
    graphs.write(f"{draft.name}.append", build_append(config, tensors))
    if vocab_size is not None:
        top = min(num_top, vocab_size)
        head = build_head("draft_head", HEAD, width, vocab_size, top, tensors)
        graphs.write(f"{draft.name}.head", head)


def table_spec(stored: StoredTensor) -> TableSpec:
    """Where the runtime maps a stored tensor from."""
    return TableSpec(stored.file, stored.offset, stored.dtype, stored.shape)


def _selector_spec(config: DraftConfig, tensors: dict[str, StoredTensor]) -> SelectorSpec | None:
    if config.selector is None:
        return None
    tables = (table_spec(tensors[name]) for name in (PREDECESSOR, SUCCESSOR))
    predecessor, successor = tables
    return SelectorSpec(
        config.selector.top_k,
        config.output_multiplier,
        config.logit_softcap,
        predecessor,
        successor,
    )


def draft_spec(
    draft: Draft, tensors: dict[str, StoredTensor], data_digest: str, target_digest: str
) -> DraftSpec:
    """The drafter's manifest entry."""
    config, table = draft.config, tensors.get("d2t")
    source = json.dumps(draft.checkpoint.config, sort_keys=True) + data_digest
    return DraftSpec(
        kind=config.kind,
        layout=config.layout,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        trained_on_media=config.trained_on_media,
        input_embedding_scale=config.input_embedding_scale,
        rope=config.rope,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=config.layers,
        own_head=config.draft_vocab_size is not None,
        d2t=table_spec(table) if table else None,
        selector=_selector_spec(config, tensors),
        target_digest=target_digest,
        source_digest=hashlib.sha256(source.encode()).hexdigest(),
    )
