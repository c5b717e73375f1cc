"""Foreign configs and missing side files are refused by name, and nothing is left behind.

Knows what must be refused and which words the message owes the user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import REMOVED, edit_json, export, refused
from tiny_checkpoint import make_target

from dflash_onnx.models.errors import ExportError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlavaForCausalLM"]}, ("LlavaForCausalLM", "supported: Qwen3VL")),
        ({"architectures": REMOVED, "model_type": "gemma3"}, ("gemma3", "supported: Qwen3VL")),
        ({"architectures": REMOVED, "model_type": REMOVED}, ("None", "supported: Qwen3VL")),
        ({"architectures": "Qwen3VL"}, ("supported: Qwen3VL",)),
        ({"text_config": REMOVED}, ("text_config",)),
        ({"text_config": [1]}, ("text_config", "an object")),
        ({"text_config.head_dim": REMOVED}, ("text_config", "head_dim")),
        ({"text_config.num_hidden_layers": "4"}, ("num_hidden_layers", "'4'")),
        ({"text_config.num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"text_config.hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"text_config.attention_bias": True}, ("attention_bias",)),
        ({"text_config.sliding_window": 4096}, ("sliding_window", "4096")),
        ({"text_config.rope_parameters": REMOVED}, ("mrope_section",)),
        ({"text_config.rope_parameters": 5}, ("rope_parameters",)),
        ({"text_config.rope_parameters.rope_theta": REMOVED}, ("rope_theta",)),
        ({"text_config.rope_parameters.rope_type": "yarn"}, ("rope_type", "yarn")),
        ({"text_config.rope_parameters.mrope_interleaved": False}, ("mrope_interleaved",)),
        ({"text_config.rope_scaling": {"rope_type": "yarn"}}, ("rope_scaling sets rope_type",)),
        ({"text_config.rope_scaling": {"type": "linear"}}, ("rope_scaling sets type='linear'",)),
        ({"text_config.rope_scaling": {"factor": 2.0}}, ("rope_scaling sets factor=2.0",)),
        ({"text_config.partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5",)),
        (
            {"text_config.rope_parameters.partial_rotary_factor": 0.25},
            ("rope_parameters sets partial_rotary_factor=0.25",),
        ),
        ({"text_config.num_experts": 128}, ("text_config sets num_experts=128",)),
        ({"text_config.num_local_experts": 8}, ("num_local_experts",)),
        ({"text_config.moe_intermediate_size": 768}, ("moe_intermediate_size",)),
        ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config", "dequantise")),
        ({"text_config.quantization_config": {}}, ("text_config has a 'quantization_config'",)),
        (
            {"text_config.num_hidden_layers": 1},
            ("deepstack_visual_indexes has 2", "num_hidden_layers is 1"),
        ),
        ({"text_config.rope_parameters.mrope_section": [4, 4, 4]}, ("mrope_section", "8")),
        ({"text_config.num_key_value_heads": 3}, ("num_attention_heads", "4", "3")),
        (
            {"tie_word_embeddings": REMOVED, "text_config.tie_word_embeddings": REMOVED},
            ("tie_word_embeddings",),
        ),
        ({"image_token_id": REMOVED}, ("image_token_id",)),
        ({"image_token_id": 512}, ("image_token_id", "512")),
        ({"vision_config.out_hidden_size": 32}, ("out_hidden_size", "32", "64")),
        ({"vision_config.num_position_embeddings": 63}, ("num_position_embeddings", "square")),
        ({"vision_config.deepstack_visual_indexes": [3]}, ("deepstack_visual_indexes",)),
        ({"vision_config.deepstack_visual_indexes": [1, 0]}, ("deepstack_visual_indexes",)),
        ({"vision_config.hidden_act": "relu"}, ("vision_config", "hidden_act", "relu")),
        ({"vision_config.num_heads": 3}, ("vision_config", "num_heads", "3")),
    ],
)
def test_config_that_cannot_be_honoured(
    pair: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A wrong, missing or unsupported value of config.json, each named with its key.
    A default in its place would export another network without a word."""
    edit_json(pair / "target/config.json", changes)
    refused(pair, "config.json", *words)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", ("config.json is missing",)),
        ("tokenizer.json", ("tokenizer.json is missing",)),
        ("preprocessor_config.json", ("preprocessor_config.json is missing",)),
        ("model.safetensors", ("neither model.safetensors nor",)),
    ],
)
def test_missing_file(pair: Path, file: str, words: tuple[str, ...]) -> None:
    """Half-downloaded folders are the most common broken checkpoint.
    The file is named together with its folder."""
    (pair / "target" / file).unlink()
    refused(pair, str(pair / "target"), *words)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_unreadable_file(pair: Path, file: str) -> None:
    """A file cut off in the middle is no JSON any more.
    The message names it instead of showing a decoder's traceback."""
    path = pair / "target" / file
    path.write_text(path.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    refused(pair, file)


def test_missing_chat_template(pair: Path) -> None:
    """The template may lie in three places; only when all lack it there is nothing to prompt with.
    Any one of them is enough."""
    (pair / "target/chat_template.jinja").unlink()
    export(pair, "from-tokenizer-config", draft=False)
    edit_json(pair / "target/tokenizer_config.json", {"chat_template": REMOVED})
    with pytest.raises(ExportError, match="no chat template"):
        export(pair, "none")


def test_missing_stop_token(pair: Path) -> None:
    """Without a stop token every answer runs to its budget, so its absence is an error.
    generation_config.json comes first, config.json is the other place."""
    generation = pair / "target/generation_config.json"
    edit_json(generation, {"eos_token_id": REMOVED})
    export(pair, "from-config", draft=False)
    generation.unlink()
    edit_json(pair / "target/config.json", {"text_config.eos_token_id": REMOVED})
    with pytest.raises(ExportError, match="eos_token_id"):
        export(pair, "none")


@pytest.mark.parametrize("value", [[], [512], [-1], "im_end", [1.5], [True]])
def test_bad_stop_token(pair: Path, value: Any) -> None:
    """A stop id outside the vocabulary never comes; an empty list means no stop at all.
    Both are refused with the key."""
    edit_json(pair / "target/generation_config.json", {"eos_token_id": value})
    refused(pair, "generation_config.json: 'eos_token_id'", "512")


def test_bad_stop_token_of_the_config(pair: Path) -> None:
    """Without generation_config.json the stop ids stand in config.json.
    Then the error names that file."""
    (pair / "target/generation_config.json").unlink()
    edit_json(pair / "target/config.json", {"text_config.eos_token_id": 600})
    refused(pair, "target/config.json, text_config: 'eos_token_id'", "600")


@pytest.mark.parametrize("token", [500, 511])
def test_stop_token_that_is_never_chosen(pair: Path, token: int) -> None:
    """A placeholder, or a head column without a token: both are banned from answers.
    As a stop id such a token would let every answer run to its budget."""
    edit_json(pair / "target/generation_config.json", {"eos_token_id": [497, token]})
    refused(pair, "generation_config.json", "eos_token_id", f"[{token}]")


def test_tokenizer_of_another_model(pair: Path) -> None:
    """More tokenizer entries than head columns means that the files belong to different models.
    Both numbers are in the message."""
    make_target(pair / "other", vocab=640)
    content = (pair / "other/tokenizer.json").read_bytes()
    (pair / "target/tokenizer.json").write_bytes(content)
    with pytest.raises(ExportError, match="632 entries.*512 columns"):
        export(pair)


def test_patch_size_of_another_processor(pair: Path) -> None:
    """Processor and network must cut images alike.
    Their sizes are compared before anything is written."""
    edit_json(pair / "target/preprocessor_config.json", {"patch_size": 14})
    refused(pair, "preprocessor_config.json", "14", "16")


def test_missing_folder(tmp_path: Path) -> None:
    """A path that is no folder, as a model id typed by mistake.
    The message asks for a checkpoint folder."""
    with pytest.raises(ExportError, match="not a folder"):
        export(tmp_path)


def test_unknown_precision(pair: Path) -> None:
    """The message lists what there is; for bf16, which only one provider computes in, advice."""
    refused(pair, "int3", "fp32, fp16, int4", precision="int3")
    refused(pair, "--head-precision", "bf16", "fp16", head_precision="bf16")
