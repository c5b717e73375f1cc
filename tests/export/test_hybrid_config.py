"""config.json of Qwen3.5 and of text-only targets: released forms load, variants are refused.

Knows the keys of released files; sizes are the real ones, since no weight is read here.
"""

from __future__ import annotations

from typing import Any

import pytest
from support_checkpoint import REMOVED, changed

from dflash_onnx.models.config import TargetConfig, parse_target
from dflash_onnx.models.errors import ExportError

FULL, LINEAR = "full_attention", "linear_attention"
TEXT: dict[str, Any] = {
    "attention_bias": False, "attn_output_gate": True, "eos_token_id": 248044,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
    "intermediate_size": 17408, "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 16,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24,
    "num_hidden_layers": 64, "num_key_value_heads": 4, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_5",
    "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056,
    "model_type": "qwen3_5", "text_config": TEXT, "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0", "video_token_id": 248057, "vision_config": VISION,
    "vision_end_token_id": 248054, "vision_start_token_id": 248053,
}  # fmt: skip
# Qwen3-8B as transformers 4 wrote it.
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_5_TEXT = TEXT | {"architectures": ["Qwen3_5ForCausalLM"]}


def parse(raw: dict[str, Any], **changes: Any) -> TargetConfig:
    """Parse a changed configuration; `text_config__x` is x inside text_config."""
    edits = {key.replace("__", "."): value for key, value in changes.items()}
    return parse_target(changed(raw, edits), "box/config.json")


def refused(raw: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """One line, which names the file and has all the words."""
    with pytest.raises(ExportError) as caught:
        parse_target(changed(raw, changes), "box/config.json")
    message = str(caught.value)
    assert message.startswith("box/config.json") and "\n" not in message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"text_config.layer_types": REMOVED},
        {"text_config.full_attention_interval": REMOVED},
        {"text_config.partial_rotary_factor": REMOVED},
        {"text_config.rope_parameters.partial_rotary_factor": REMOVED},
        {"vision_config.deepstack_visual_indexes": REMOVED},
        {"text_config.attn_output_gate": REMOVED, "text_config.mamba_ssm_dtype": REMOVED},
        {"text_config.num_experts": 0},
    ],
)
def test_released_hybrid_loads(changes: dict[str, Any]) -> None:
    """Qwen3.5-27B, and the forms in which other versions write the same thing.
    Each states the same network."""
    target = parse_target(changed(HYBRID, changes), "box/config.json")
    assert target == parse(HYBRID) and target.mtp and target.num_deepstack == 0
    text, linear = target.text, target.text.linear
    assert text.attention_layers == tuple(range(3, 64, 4)) and len(text.linear_layers) == 48
    assert (text.rope.rotary_dim, text.rope.mrope_section) == (64, (11, 11, 10))
    assert linear is not None and (linear.conv_width, linear.replay_width) == (10240, 8288)


def test_text_only_hybrid_loads() -> None:
    """The decoder's section with an architecture of its own: no tower and no placeholders."""
    target = parse(QWEN3_5_TEXT)
    assert target.text == parse(HYBRID).text and target.mtp
    assert target.vision is None and target.special is None


def test_hybrid_may_attend_everywhere() -> None:
    """With an interval of one there is no recurrent layer, and its keys may be missing."""
    keys = [key for key in TEXT if key.startswith("linear_")]
    changes = {f"text_config__{key}": REMOVED for key in (*keys, "layer_types")}
    text = parse(HYBRID, text_config__full_attention_interval=1, **changes).text
    assert (text.linear, text.linear_layers) == (None, ()) and text.output_gate


@pytest.mark.parametrize("mtp", [0, None, REMOVED])
def test_hybrid_without_mtp(mtp: Any) -> None:
    """No layer, null or no key: there is no head to look for among the tensors."""
    assert not parse(HYBRID, text_config__mtp_num_hidden_layers=mtp).mtp


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": REMOVED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"layer_types": [FULL] * 36, "rope_scaling": REMOVED, "max_window_layers": REMOVED},
        {"sliding_window": 4096},
        {"use_sliding_window": REMOVED},
    ],
)
def test_released_text_only_loads(changes: dict[str, Any]) -> None:
    """Qwen3-8B as transformers 4 and 5 write it.
    A window whose switch is off means nothing."""
    target = parse_target(changed(QWEN3, changes), "box/config.json")
    assert target == parse(QWEN3) and target.vision is None and not target.mtp
    assert (target.text.rope.theta, target.text.rope.rotary_dim) == (1e6, 128)
    assert target.text.rope.mrope_section is None and target.text.linear is None


@pytest.mark.parametrize(
    "architecture",
    [
        ["Qwen3_5MoeForConditionalGeneration"], ["Qwen3_5MoeForCausalLM"], ["Qwen3MoeForCausalLM"],
        ["Qwen3NextForCausalLM"], ["Gemma3ForConditionalGeneration"], ["Qwen2ForCausalLM"],
        "qwen3_5_moe", [["Qwen3ForCausalLM"]], {"a": 1}, [None], 5,
    ],
)  # fmt: skip
def test_other_architectures_are_refused(architecture: Any) -> None:
    """Mixture-of-experts and other families, and values that are no name at all.
    The message lists what is supported."""
    known = ("Qwen3VLFor", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForC", "Qwen3ForC")
    refused(HYBRID, {"architectures": architecture}, ("not supported (supported: ", *known))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_experts", 256, ("sets num_experts=256", "supported: 0")),
        ("num_experts_per_tok", 8, ("num_experts_per_tok=8",)),
        ("moe_intermediate_size", 512, ("moe_intermediate_size=512",)),
        ("layer_types", [LINEAR, "mamba"] * 32, ("layer_types", FULL, LINEAR, "'mamba'")),
        ("layer_types", [LINEAR, "sliding_attention"] * 32, ("layer_types", "sliding_attention")),
        ("layer_types", [LINEAR, FULL] * 8, ("layer_types", "64 layers", "not 16")),
        ("layer_types", [LINEAR] * 64, ("'layer_types' must be", "one of the 64 layers attends")),
        ("layer_types", "full_attention", ("layer_types", "a list of strings")),
        ("attn_output_gate", False, ("attn_output_gate=False", "supported: True")),
        ("attention_bias", True, ("attention_bias=True", "supported: False")),
        ("hidden_act", "gelu", ("hidden_act", "supported: 'silu'")),
        ("mtp_num_hidden_layers", 2, ("mtp_num_hidden_layers=2", "supported: 0, 1")),
        ("mtp_use_dedicated_embeddings", True, ("mtp_use_dedicated_embeddings=True", "False")),
        ("use_sliding_window", True, ("use_sliding_window=True", "supported: False")),
        ("sliding_window", 4096, ("sliding_window=4096", "supported: absent")),
        ("quantization_config", {"bits": 4}, ("quantization_config", "fp32, fp16 or bf16")),
        ("linear_num_value_heads", 40, ("linear_num_value_heads", "linear_num_key_heads=16", "40")),
        ("linear_conv_kernel_dim", 1, ("linear_conv_kernel_dim", "at least 2")),
        ("linear_key_head_dim", 0, ("linear_key_head_dim", "at least 1")),
        ("rope_parameters.partial_rotary_factor", 1.5, ("partial_rotary_factor", "at most 1")),
        ("rope_parameters.partial_rotary_factor", 1e308, ("partial_rotary_factor", "at most 1")),
        ("rope_parameters.partial_rotary_factor", 0.1, ("partial_rotary_factor", "even part")),
        ("rope_parameters.partial_rotary_factor", 0.0, ("partial_rotary_factor", "above 0")),
        ("rope_parameters.partial_rotary_factor", "1/4", ("partial_rotary_factor", "a number")),
        ("rope_parameters.mrope_section", [24, 20, 20], ("mrope_section", "add up to 32")),
        ("rope_parameters.mrope_section", [34, -1, -1], ("mrope_section", "add up to 32")),
        ("rope_parameters.mrope_section", [16, 16], ("mrope_section", "three numbers")),
        ("rope_parameters.mrope_interleaved", False, ("mrope_interleaved",)),
        ("rope_parameters.rope_type", "yarn", ("rope_type='yarn'",)),
    ],
)
@pytest.mark.parametrize("raw", [HYBRID, QWEN3_5_TEXT], ids=["vision", "text"])
def test_hybrid_variants_are_refused(
    raw: dict[str, Any], key: str, value: Any, words: tuple[str, ...]
) -> None:
    """One value of a released file is replaced, in the section that has the decoder.
    Each is refused with its key and what would do."""
    place = "text_config." if raw is HYBRID else ""
    refused(raw, {place + key: value}, words)


@pytest.mark.parametrize("key", [key for key in TEXT if key.startswith("linear_")])
def test_no_size_of_a_recurrent_layer_has_a_default(key: str) -> None:
    """A guessed head count could fit the tensors and compute another network."""
    refused(HYBRID, {f"text_config.{key}": REMOVED}, (f"has no '{key}'",))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "text_config.partial_rotary_factor": REMOVED,
                "text_config.rope_parameters.partial_rotary_factor": REMOVED,
            },
            ("has no 'partial_rotary_factor'",),
        ),
        (
            {"text_config.layer_types": REMOVED, "text_config.full_attention_interval": REMOVED},
            ("has no 'full_attention_interval'",),
        ),
        (
            {"text_config.layer_types": REMOVED, "text_config.full_attention_interval": 65},
            ("'full_attention_interval' must be such that one of the 64 layers attends, not 65",),
        ),
        ({"vision_config.deepstack_visual_indexes": [8]}, ("deepstack_visual_indexes=[8]",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "dequantise")),
    ],
)
def test_hybrid_files_that_lack_or_add_something(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """What a file must state, and what this architecture never has."""
    refused(HYBRID, changes, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": REMOVED}, ("has no 'rope_theta'",)),
        ({"head_dim": REMOVED}, ("has no 'head_dim'",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_type='yarn'",)),
        ({"use_sliding_window": True, "sliding_window": 4096}, ("use_sliding_window=True",)),
        ({"layer_types": [FULL, "sliding_attention"] * 18}, ("layer_types", "sliding_attention")),
        ({"layer_types": [LINEAR, FULL] * 18}, ("layer_types", f"made of {FULL}", LINEAR)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5",)),
        ({"num_experts": 128}, ("num_experts=128",)),
        ({"tie_word_embeddings": REMOVED}, ("tie_word_embeddings",)),
        ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config",)),
    ],
)
def test_text_only_variants_are_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    """One value of Qwen3-8B's file is replaced.
    Each is refused with its key."""
    refused(QWEN3, changes, words)
