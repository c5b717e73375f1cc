"""Fields of a drafter's config.json that are missing or cannot be honoured are refused by name.

The values that are accepted, and what they mean, are in test_draft_config.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from support_checkpoint import REMOVED, changed

from dflash_onnx.models.draft_config import parse_draft
from dflash_onnx.models.errors import ExportError


def refused(raw: dict[str, Any], changes: dict[str, Any], *words: str) -> None:
    with pytest.raises(ExportError) as caught:
        parse_draft(changed(raw, changes), "draft/config.json")
    for word in ("draft/config.json", *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize(
    "key",
    [
        "block_size", "mask_token_id", "target_layer_ids", "vocab_size", "hidden_size", "head_dim",
        "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
        "rms_norm_eps", "rope_theta",
    ],
)  # fmt: skip
def test_missing_value_has_no_default(zlab: dict[str, Any], key: str) -> None:
    """Other programs fall back to 16, 151669 or 10000 here and draft noise without a word.
    A missing value is an error with file and key; null counts as missing."""
    for value in (REMOVED, None):
        places = (key, f"dflash_config.{key}", f"rope_parameters.{key}")
        refused(zlab, dict.fromkeys(places, value), f"'{key}'")


@pytest.mark.parametrize(
    "key", ["block_size", "mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size"]
)
def test_missing_speculators_value(speculators: dict[str, Any], key: str) -> None:
    """The library's class defaults (block 8, vocabulary 32000) are not the file's values.
    Without the key nothing is assumed."""
    refused(speculators, {key: REMOVED}, f"'{key}'")


def test_sliding_layers_need_a_window(zlab: dict[str, Any], speculators: dict[str, Any]) -> None:
    """Sliding layers without a window, in either layout, and with an impossible one.
    Only layers that slide ask for it."""
    kinds = ["sliding_attention", "full_attention"]
    refused(zlab, {"layer_types": kinds}, "'sliding_window'")
    refused(zlab, {"layer_types": kinds, "sliding_window": 0}, "'sliding_window'", "0")
    nested = {"transformer_layer_config.layer_types": kinds}
    refused(speculators, nested, "transformer_layer_config", "'sliding_window'")
    unused = parse_draft(changed(zlab, {"sliding_window": 16}), "draft/config.json")
    assert [layer.window for layer in unused.layers] == [None, None]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DSparkModel"]}, ("DSparkModel", "supported: DFlashDraft")),
        ({"architectures": REMOVED}, ("None", "supported")),
        ({"architectures": "DFlash"}, ("DFlash", "supported")),
        ({"speculators_model_type": "eagle3"}, ("'eagle3'", "supported")),
        ({"speculators_model_type": "dflash2"}, ("'dflash2'", "DFlashDraftModel")),
        ({"dflash_config": [1]}, ("dflash_config", "an object")),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"hidden_act": "swigluoai"}, ("hidden_act",)),
        ({"dflash_config.attention_sink_bias": True}, ("attention_sink_bias",)),
        ({"attention_sink_bias": True}, ("attention_sink_bias",)),
        ({"dflash_config.attention_value_scale": 0.5}, ("attention_value_scale",)),
        ({"dflash_config.partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"partial_rotary_factor": 0.25}, ("partial_rotary_factor",)),
        ({"rope_parameters.partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"rope_parameters.rope_type": "yarn"}, ("rope_type", "yarn")),
        ({"rope_parameters": REMOVED, "rope_scaling": {"type": "yarn"}}, ("type", "yarn")),
        ({"rope_is_neox_style": False}, ("rope_is_neox_style",)),
        ({"dflash_config.is_neox_style": False}, ("is_neox_style",)),
        ({"use_gemma_norm": True}, ("use_gemma_norm",)),
        ({"sample_from_anchor": True}, ("sample_from_anchor",)),
        ({"dflash_config.projector_type": "domino"}, ("projector_type", "domino")),
        ({"dflash_config.shift_label": True}, ("shift_label",)),
        ({"dflash_config.pure_draft_prefix_len": 2}, ("dflash_config", "pure_draft_prefix_len")),
        ({"pure_draft_prefix_len": 0}, ("draft/config.json sets pure_draft_prefix_len=0",)),
        ({"dflash_config.gru_hidden_dim": 64}, ("gru_hidden_dim",)),
        ({"dflash_config.emb_dim": 64}, ("emb_dim",)),
        ({"dflash_config.attention_bias": True}, ("dflash_config sets attention_bias",)),
        ({"dflash_config.hidden_act": "gelu"}, ("dflash_config sets hidden_act",)),
        ({"quantization_config": {"bits": 4}}, ("quantization_config", "dequantise")),
        ({"rope_scaling": {"type": "yarn"}}, ("rope_scaling sets type='yarn'",)),
        ({"rope_scaling": {"factor": 4.0}}, ("rope_scaling sets factor=4.0",)),
        ({"dflash_config.rope_scaling": {"rope_type": "yarn"}}, ("dflash_config, rope_scaling",)),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}, "rope_theta": 1e4},
            ("rope_parameters", "full_attention"),
        ),
        ({"rope_parameters.rope_theta": 0}, ("rope_parameters: 'rope_theta'", "above 0")),
        ({"dflash_config.output_multiplier": -1.0}, ("output_multiplier", "above 0")),
        ({"dflash_config.mask_token_id": -1}, ("mask_token_id", "-1")),
        ({"dflash_config.mask_token_id": 512}, ("mask_token_id", "vocab_size=512")),
        ({"dflash_config.mask_token_id": True}, ("mask_token_id",)),
        ({"block_size": 1}, ("block_size", "at least 2")),
        ({"dflash_config.target_layer_ids": []}, ("target_layer_ids",)),
        ({"dflash_config.target_layer_ids": [1, 1]}, ("target_layer_ids", "distinct")),
        ({"dflash_config.target_layer_ids": [-1, 2]}, ("target_layer_ids",)),
        ({"dflash_config.target_layer_ids": "1,2"}, ("target_layer_ids", "list")),
        ({"dflash_config.target_layer_ids": [1, 4]}, ("target_layer_ids", "num_target_layers=4")),
        ({"layer_types": ["full_attention"]}, ("layer_types", "2 of")),
        ({"layer_types": 5}, ("'layer_types'", "a list of strings", "5")),
        ({"layer_types": "full_attention"}, ("'layer_types'", "a list of strings")),
        ({"layer_types": [[1], [2]]}, ("'layer_types'", "a list of strings", "[[1], [2]]")),
        ({"dflash_config.layer_types": 5}, ("dflash_config: 'layer_types'", "5")),
        ({"layer_types": []}, ("layer_types", "2 of")),
        ({"dflash_config.use_swa": True, "layer_types": REMOVED}, ("'sliding_window'",)),
        (
            {
                "layer_types": REMOVED,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            ("use_sliding_window", "add layer_types", "2 layers"),
        ),
        (
            {"use_sliding_window": 1, "layer_types": REMOVED},
            ("use_sliding_window", "true or false"),
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, ("layer_types",)),
        ({"num_key_value_heads": 3}, ("num_attention_heads", "3")),
        ({"is_causal": 1}, ("is_causal", "true or false")),
        ({"num_target_layers": "4"}, ("num_target_layers", "integer")),
    ],
)
def test_value_that_cannot_be_honoured(
    zlab: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """Variants that other drafters have and this version has not, and values out of range.
    Each is refused with its key; ignoring one would draft noise."""
    refused(zlab, changes, *words)


def test_speculators_tap_of_the_embedding(speculators: dict[str, Any]) -> None:
    """Id 0 there is the embedding output, which no layer of the target makes.
    It is refused, not wrapped around to the last layer."""
    refused(speculators, {"aux_hidden_state_layer_ids": [0, 2]}, "layer_ids", "-1")
