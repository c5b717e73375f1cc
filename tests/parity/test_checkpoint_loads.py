"""transformers takes the tiny checkpoints as its own: every key used, none missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoint import make_draft, make_target
from tokenizers import Tokenizer

pytestmark = pytest.mark.parity
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    "options",
    [{}, {"tied": False, "shards": 2}, {"dtype": "bfloat16"}, {"vocab": 384, "deepstack": (2,)}],
)
def test_target_loads_without_missing_or_unexpected_keys(tmp_path: Path, options: dict) -> None:
    make_target(tmp_path, **options)
    model, info = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values()), info
    assert str(model.dtype) == "torch." + options.get("dtype", "float32")
    tied = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied is options.get("tied", True)


def test_config_is_what_transformers_writes(tmp_path: Path) -> None:
    make_target(tmp_path / "made")
    made = json.loads((tmp_path / "made/config.json").read_text(encoding="utf-8"))
    config = transformers.Qwen3VLConfig.from_pretrained(tmp_path / "made")
    config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text(encoding="utf-8"))
    for written in (made, saved):
        del written["transformers_version"]
    assert made == saved


def test_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    make_target(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "A 1!"}]}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    assert text == start + "A 1!<|im_end|>\n<|im_start|>assistant\n"
    assert theirs.encode(text) == plain.encode(text).ids


def test_reference_drafter_loads_its_window(tmp_path: Path) -> None:
    reference = pytest.importorskip("dflash.model")
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft", tmp_path / "target", sliding_window=16)
    model, info = reference.DFlashDraftModel.from_pretrained(
        tmp_path / "draft", output_loading_info=True
    )
    assert not any(info.values()), info
    assert [layer.self_attn.sliding_window for layer in model.layers] == [16, 16]
    assert model.mask_token_id == 503 and model.target_layer_ids == [1, 2]
