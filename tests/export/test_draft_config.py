"""The drafter's config.json: where each field is read, what has no default, what is refused.

Knows the two layouts and the rules of windows and causality. Opens no weights.
"""

from __future__ import annotations

from typing import Any

import pytest
from support_checkpoint import REMOVED, changed

from dflash_onnx.models.draft_config import DraftConfig, DraftLayer, parse_draft

FULL, CAUSAL = DraftLayer(None, False), DraftLayer(None, True)
SLIDING, SLIDING_CAUSAL = DraftLayer(16, False), DraftLayer(16, True)
SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
NESTED = {f"dflash_config.{key}": value for key, value in MIXED.items()}


def parsed(raw: dict[str, Any], changes: dict[str, Any]) -> DraftConfig:
    return parse_draft(changed(raw, changes), "draft/config.json")


def test_plain_file_of_each_layout(zlab: dict[str, Any], speculators: dict[str, Any]) -> None:
    """The same drafter in both layouts, the second with tap ids one above the layers'.
    Everything but the layout's name and two hints is equal."""
    first, second = parsed(zlab, {}), parsed(speculators, {})
    assert first.target_layer_ids == second.target_layer_ids == (1, 2)
    assert (first.block_size, first.mask_token_id, first.rope.theta) == (8, 503, 1e6)
    assert (second.layout, second.num_target_layers, second.target_hidden_size) == (
        "speculators", None, 64,
    )  # fmt: skip
    same = {"layout": "z-lab", "num_target_layers": 4, "target_hidden_size": None}
    assert DraftConfig(**(vars(second) | same)) == first


@pytest.mark.parametrize(
    ("key", "field", "nested", "top"),
    [
        ("block_size", "block_size", 6, 5),
        ("mask_token_id", "mask_token_id", 7, 9),
        ("target_layer_ids", "target_layer_ids", [0, 3], [0, 1]),
        ("num_target_layers", "num_target_layers", 9, 8),
        ("input_embedding_scale", "input_embedding_scale", 2.5, 3.5),
        ("trained_on_media", "trained_on_media", True, False),
        ("hidden_size", "hidden_size", 96, 80),
        ("intermediate_size", "intermediate_size", 99, 98),
        ("num_attention_heads", "num_heads", 6, 4),
        ("num_key_value_heads", "num_kv_heads", 2, 1),
        ("head_dim", "head_dim", 8, 4),
        ("rms_norm_eps", "rms_norm_eps", 1e-3, 1e-4),
        ("vocab_size", "vocab_size", 1024, 2048),
    ],
)
def test_nested_field_wins_over_the_top_level(
    zlab: dict[str, Any], key: str, field: str, nested: Any, top: Any
) -> None:
    """Released files put a field inside dflash_config or beside it, some in both.
    The nested one wins; the other is found when it is alone or the nested one is null."""
    both = {key: top, f"dflash_config.{key}": nested}
    as_read = lambda v: tuple(v) if isinstance(v, list) else v  # noqa: E731
    assert getattr(parsed(zlab, both), field) == as_read(nested)
    for absent in (REMOVED, None):
        only_top = {key: top, f"dflash_config.{key}": absent}
        assert getattr(parsed(zlab, only_top), field) == as_read(top)


@pytest.mark.parametrize("gate", [True, False, REMOVED])
def test_window_does_not_depend_on_a_gate(zlab: dict[str, Any], gate: Any) -> None:
    """transformers forgets sliding_window unless use_sliding_window is set.
    The raw file is what was trained."""
    changes = {**SLIDES, "use_sliding_window": gate, "max_window_layers": 0}
    assert parsed(zlab, changes).layers == (SLIDING_CAUSAL, SLIDING_CAUSAL)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (FULL, FULL)),
        ({"layer_types": REMOVED}, (FULL, FULL)),
        (MIXED, (SLIDING_CAUSAL, FULL)),
        ({**MIXED, "is_causal": False}, (SLIDING, FULL)),
        ({**MIXED, "is_causal": True}, (SLIDING_CAUSAL, CAUSAL)),
        ({**MIXED, "dflash_config.causal": False}, (SLIDING, FULL)),
        ({**MIXED, "dflash_config.causal": True}, (SLIDING_CAUSAL, CAUSAL)),
        ({**MIXED, "causal": True}, (SLIDING_CAUSAL, CAUSAL)),
        ({**MIXED, "is_causal": False, "dflash_config.causal": True}, (SLIDING, FULL)),
        ({**SLIDES, "is_causal": False}, (SLIDING, SLIDING)),
        ({**NESTED, "layer_types": ["full_attention"] * 2}, (SLIDING_CAUSAL, FULL)),
        ({**NESTED, "dflash_config.is_causal": False, "is_causal": True}, (SLIDING, FULL)),
        ({**NESTED, "dflash_config.sliding_window": None, **SLIDES}, (SLIDING_CAUSAL, FULL)),
        ({"dflash_config.is_causal": True, "dflash_config.causal": False}, (CAUSAL, CAUSAL)),
        ({**MIXED, "dflash_config.is_causal": False, "causal": True}, (SLIDING, FULL)),
        (
            {"dflash_config.use_swa": True, "sliding_window": 16, "layer_types": REMOVED},
            (SLIDING, SLIDING),
        ),
        (
            {
                "dflash_config.use_swa": True,
                "dflash_config.swa_window_size": 16,
                "sliding_window": 99,
                "layer_types": REMOVED,
            },
            (SLIDING, SLIDING),
        ),
    ],
)
def test_windows_and_causality(
    zlab: dict[str, Any], changes: dict[str, Any], layers: tuple[DraftLayer, ...]
) -> None:
    """is_causal, else dflash_config.causal, else sliding layers are causal and full ones are not.
    use_swa without layer types makes every layer slide, not causal."""
    assert parsed(zlab, changes).layers == layers


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({}, (SLIDING_CAUSAL, FULL)), ({"sliding_window_non_causal": True}, (SLIDING, FULL))],
)
def test_speculators_causality(
    speculators: dict[str, Any], changes: dict[str, Any], layers: tuple[DraftLayer, ...]
) -> None:
    """That layout speaks of sliding layers only.
    Full layers are never causal."""
    nested = {f"transformer_layer_config.{key}": value for key, value in MIXED.items()}
    assert parsed(speculators, nested | changes).layers == layers


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters.mrope_section": [3, 3, 2], "rope_parameters.mrope_interleaved": True},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [3, 3, 2]}},
        {"rope_scaling": None, "rope_is_neox_style": True, "attention_sink_bias": False},
        {"dflash_config.final_logit_softcapping": 0, "dflash_config.output_multiplier": 1},
        {"sample_from_anchor": False, "partial_rotary_factor": 1.0, "use_gemma_norm": False},
    ],
)
def test_harmless_values_change_nothing(zlab: dict[str, Any], changes: dict[str, Any]) -> None:
    """M-RoPE sections copied from the target, explicit defaults, a softcap that is switched off.
    The drafter's rope stays one-dimensional and its proposals the same."""
    assert parsed(zlab, changes) == parsed(zlab, {})


def test_logit_transforms(zlab: dict[str, Any]) -> None:
    """Multiplier and softcap are monotone, so v1 only records them; DFlash2 applies them."""
    changes = {"dflash_config.final_logit_softcapping": 30.0, "dflash_config.output_multiplier": 2}
    config = parsed(zlab, changes)
    assert (config.output_multiplier, config.logit_softcap) == (2.0, 30.0)
    plain = parsed(zlab, {})
    assert (plain.output_multiplier, plain.logit_softcap) == (1.0, None)


def test_rope_theta_from_any_of_its_places(zlab: dict[str, Any]) -> None:
    """rope_parameters first, then rope_scaling, then the top level.
    Old files have only the last."""
    gone = {"rope_parameters": REMOVED}
    assert parsed(zlab, {"rope_parameters.rope_theta": 5e5}).rope.theta == 5e5
    assert parsed(zlab, gone | {"rope_scaling": {"rope_theta": 3e5}}).rope.theta == 3e5
    assert parsed(zlab, gone | {"rope_theta": 10000}).rope.theta == 1e4


def test_rope_inside_the_nested_section(zlab: dict[str, Any]) -> None:
    """The base may stand in dflash_config too, with a section or without.
    There it wins over the same section at the top level."""
    nested = {"dflash_config.rope_parameters": {"rope_theta": 7e5}}
    assert parsed(zlab, nested).rope.theta == 7e5
    gone = {"rope_parameters": REMOVED, "rope_theta": 1e4, "dflash_config.rope_theta": 2e4}
    assert parsed(zlab, gone).rope.theta == 2e4


def test_hints_for_another_program_change_nothing(zlab: dict[str, Any]) -> None:
    """mlx-vlm's runtime hints and Domino's neutral prefix say nothing about the network.
    They are accepted and not read."""
    hints = {"draft_window_size": 4, "runtime_block_size": 3, "pure_draft_prefix_len": 1}
    nested = {f"dflash_config.{key}": value for key, value in hints.items()}
    assert parsed(zlab, nested) == parsed(zlab, hints) == parsed(zlab, {})


@pytest.mark.parametrize("size", [2, 511, 512])
def test_mask_id_may_be_any_id(zlab: dict[str, Any], size: int) -> None:
    """The mask is a row of the target's table and needs no token of its own: the padding id, an
    id past the tokenizer or the last row will do."""
    assert parsed(zlab, {"dflash_config.mask_token_id": size - 1}).mask_token_id == size - 1
