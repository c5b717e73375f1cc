"""Which tensors of a drafter's checkpoint make up its networks, by name and shape.

Knows DFlash and DFlash2; how tensors are found and refused is `weights`' business.
"""

from __future__ import annotations

from ..models.draft_config import DraftConfig
from .weights import HEAD, Wanted, attention_layer, matrix, one

PREDECESSOR = "candidate_selector.predecessor_codebook"
SUCCESSOR = "candidate_selector.successor_codebook"
SELECTOR_PROJECTION = "candidate_selector.hidden_projection.weight"


def draft_weights(draft: DraftConfig, tap_width: int) -> list[Wanted]:
    """The drafter's weights; embedding and head are the target's unless its own head is reduced."""
    q_size, kv_size = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    hidden = draft.hidden_size
    wanted = [
        matrix("fc.weight", hidden, len(draft.target_layer_ids) * tap_width),
        one("hidden_norm.weight", hidden),
        one("norm.weight", hidden),
    ]
    for i in range(len(draft.layers)):
        wanted += attention_layer(
            f"layers.{i}", hidden, draft.intermediate_size,
            q_size, kv_size, draft.head_dim, fuse_query=False,
        )  # fmt: skip
    if draft.draft_vocab_size is not None:
        wanted.append(matrix(HEAD, draft.draft_vocab_size, hidden))
    return wanted + _conv_weights(draft) + _selector_weights(draft)


def _conv_weights(draft: DraftConfig) -> list[Wanted]:
    if draft.conv is None:
        return []
    size, hidden = draft.conv.kernel_size, draft.hidden_size
    groups = hidden // draft.conv.group_size
    names = [f"layers.{i}.{c}_conv" for i in range(len(draft.layers)) for c in ("attention", "mlp")]
    return [
        want
        for name in names
        for want in (
            one(f"{name}.base_kernel", 2, size, hidden),
            matrix(f"{name}.kernel_projection.weight", 2 * size * groups, hidden),
        )
    ]


def _selector_weights(draft: DraftConfig) -> list[Wanted]:
    if draft.selector is None:
        return []
    rank = draft.selector.rank
    return [
        one(PREDECESSOR, draft.vocab_size, rank),
        one(SUCCESSOR, draft.vocab_size, rank),
        matrix(SELECTOR_PROJECTION, rank, draft.hidden_size),
    ]
