"""The drafters' golden arrays: blocks of z-lab's DFlash and DFlash2, run on random features.

Calls the reference as it is; only a draw is replaced by a choice that does not depend on chance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from support_images import random_features

MIXED = ["sliding_attention", "full_attention"]
DRAFTS: dict[str, dict[str, Any]] = {
    "full": {"seed": 1, "is_causal": False},
    "mixed": {"seed": 2, "layer_types": MIXED, "sliding_window": 16},
    "sliding": {"seed": 3, "sliding_window": 16, "is_causal": False},
}
# Of seeds 0-99 those whose closest choices are clearest: ids must not hang on rounding.
DRAFTS2: dict[str, dict[str, Any]] = {
    "conv2": {
        "seed": 35,
        "sliding_window": 16,
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 12,
        "selector_top_k": 16,
    },
    "conv3": {
        "seed": 7,
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "selector_rank": 24,
        "selector_top_k": 6,
        "input_embedding_scale": 1.5,
        "output_multiplier": 0.7,
        "final_logit_softcapping": 30.0,
    },
}
CONTEXTS = (1, 5, 23, 40)
# Context rows and block rows; the last block is shorter than the trained one.
BLOCKS = (*((rows, 8) for rows in CONTEXTS), (23, 4))
ANCHOR = 300
TEMPERATURE = 0.8
# What q is written along: always the likeliest candidate (the greedy walk) or the unlikeliest.
PATHS = {"likeliest": torch.argmax, "unlikeliest": torch.argmin}
Arrays = dict[str, np.ndarray]


def make_dflash(model: Any, folder: Path) -> Arrays:
    """Hidden rows and logits of the DFlash drafters after contexts of several lengths."""
    from dflash.model import DFlashDraftModel

    arrays = {}
    for name in DRAFTS:
        draft = load(DFlashDraftModel, folder / name)
        for rows in CONTEXTS:
            hidden = run_block(draft, model, rows, draft.block_size)
            logits = draft.compute_logits(hidden, model.lm_head)
            arrays[f"{name}.c{rows}.hidden"] = hidden[0].numpy()
            arrays[f"{name}.c{rows}.logits"] = logits[0].numpy()
    return arrays


def make_dflash2(
    model: Any, folder: Path, banned: list[int]
) -> tuple[Arrays, dict[str, dict[str, float]]]:
    """Hidden rows, candidates and walks of the DFlash2 drafters, and how close choices came."""
    from dflash.model import DFlash2DraftModel

    arrays, closest = {}, {}
    for name in DRAFTS2:
        draft = load(DFlash2DraftModel, folder / name)
        gaps: list[tuple[float, float]] = []
        for rows, size in BLOCKS:
            hidden = run_block(draft, model, rows, size)
            head = usable_head(model.lm_head, banned)
            own = walk_arrays(draft, hidden[:, 1:], head) | {"hidden": hidden[0].numpy()}
            logits = draft.compute_logits(hidden[:, 1:], head)[0].numpy()
            own["values"] = np.take_along_axis(logits, own["candidates"], axis=1)
            arrays |= {f"{name}.c{rows}b{size}.{key}": value for key, value in own.items()}
            gaps.append(closest_choices(own, logits))
        margin, border = np.min(gaps, axis=0).tolist()
        closest[name] = {"min_margin": margin, "min_border": border}
    return arrays, closest


def load(kind: Any, folder: Path) -> Any:
    """A reference drafter, after a check that it took all of its checkpoint."""
    draft, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if any(info.values()):
        raise RuntimeError(f"the reference does not take {folder.name!r} as it is: {info}")
    wanted = [kind == "sliding_attention" for kind in draft.config.layer_types]
    # Qwen3Config drops the window without use_sliding_window; then this would test nothing.
    if [layer.self_attn.sliding_window is not None for layer in draft.layers] != wanted:
        raise RuntimeError(f"the reference ignores the window of draft {folder.name!r}")
    return draft.eval()


def run_block(draft: Any, model: Any, rows: int, size: int) -> torch.Tensor:
    """Hidden rows [1, size, H] of a block after `rows` context rows, whose seed is their number."""
    from dflash.model import _draft_value, _raw_input_embeddings

    ids = torch.tensor([[ANCHOR] + [draft.mask_token_id] * (size - 1)])
    scale = float(_draft_value(draft.config, "input_embedding_scale", 1.0))
    features = random_features(rows, rows, draft.fc.in_features)
    return draft(
        target_hidden=torch.from_numpy(features)[None],
        noise_embedding=_raw_input_embeddings(model, ids, scale),
        position_ids=torch.arange(rows + size)[None],
    )


def usable_head(head: Any, banned: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The head without the columns that may never be drafted; the reference has no such list."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        columns = head(hidden)
        columns[..., banned] = -torch.inf
        return columns

    return logits


def walk_arrays(draft: Any, hidden: torch.Tensor, head: Any) -> Arrays:
    """Greedy ids; candidates [n, K], ascending; each fixed path and q [n, K] along it."""
    anchor = torch.tensor([ANCHOR])
    arrays = {"greedy": draft.propose(hidden, anchor, head, 0.0)[0][0].numpy()}
    for name, choose in PATHS.items():
        with patch("dflash.model._sample_probs", lambda q, choose=choose: choose(q, dim=-1)):
            path, candidates, q = draft.propose(hidden, anchor, head, TEMPERATURE)
        order = candidates[0].argsort(dim=-1)
        arrays["candidates"] = candidates[0].gather(-1, order).numpy()
        arrays[f"{name}.path"] = path[0].numpy()
        arrays[f"{name}.q"] = q[0].gather(-1, order).numpy()
    if not np.array_equal(arrays["greedy"], arrays["likeliest.path"]):
        raise RuntimeError("the likeliest path is not the greedy one: a near tie, change the seed")
    return arrays


def closest_choices(arrays: Arrays, logits: np.ndarray) -> tuple[float, float]:
    """The smallest lead of a greedy choice, and of a last candidate over the best other column."""
    size = arrays["candidates"].shape[1]
    best = np.sort(np.log(arrays["likeliest.q"].astype(np.float64)), axis=1)[:, -2:]
    columns = np.sort(logits, axis=1)
    borders = columns[:, -size] - columns[:, -size - 1]
    return float(np.diff(best).min() * TEMPERATURE), float(borders.min())
