"""Llama-style text targets from checkpoint to answer: Qwen3's decoder without q and k norms.

Knows what the configuration may leave out, what must be refused, and a NumPy reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_checkpoint import REMOVED, edit_json, edit_tensors, export, refused
from support_llama import llama_logits, make_llama
from support_networks import max_difference, prefill
from tiny_checkpoint import make_draft

from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.selfcheck import self_check

PROMPT = "Compare both pictures: which one is larger?"
CONV = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 6}
# Heads of 16 are an equal part of 64; others must be stated.
TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied, head_dim absent": ({}, {}),
    "untied": ({}, {"tied": False, "seed": 3}),
    "one kv head": ({}, {"kv_heads": 1, "seed": 4, "theta": 1e4}),
    "as many kv heads": ({}, {"kv_heads": 4, "seed": 5}),
    "wide heads": ({"head_dim": 32}, {"head_dim": 32, "seed": 6}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_logits_equal_numpy(tmp_path: Path, name: str) -> None:
    """Every row of a prompt, in one call and in chunks of 5, against float64."""
    changes, options = TARGETS[name]
    make_llama(tmp_path / "target", changes, **options)
    model = Model(export(tmp_path, draft=False), threads=1)
    assert model.manifest.target.text.head_dim == changes.get("head_dim", 16)
    plan = model.plan(PROMPT)
    theirs = llama_logits(tmp_path / "target", plan.token_ids)
    for chunk in (512, 5):
        ours = prefill(model, plan, chunk=chunk).logits
        assert max_difference(ours, theirs, model.manifest.banned_ids) < 1e-4
    assert np.abs(theirs).max() > 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, one drafter of each kind, and their bundle."""
    folder = tmp_path_factory.mktemp("llama")
    make_llama(folder / "target")
    make_draft(folder / "draft", folder / "target", **CONV)
    export(folder)
    return folder


def test_bundle_of_a_llama(made: Path) -> None:
    """A text-only family of its own, whose drafters are verified like any other's."""
    manifest = read_manifest(made / "bundle")
    assert manifest.family == "llama" and not manifest.target.text.qk_norm
    assert manifest.image is manifest.target.vision is None and not manifest.mtp
    self_check(made / "bundle")
    model = Model(made / "bundle", threads=1)
    plain, *others = (
        model.generate(PROMPT, draft=draft, max_new_tokens=30).result().token_ids
        for draft in ("none", "lookup", "dflash2")
    )
    assert len(set(plain)) > 5 and all(ids == plain for ids in others)


@pytest.mark.parametrize("precision", ["int8", "int4", "w8a8"])
def test_quantised_llama(made: Path, tmp_path: Path, precision: str) -> None:
    """Nothing about its matrices is special."""
    (tmp_path / "target").symlink_to(made / "target")
    (tmp_path / "draft").symlink_to(made / "draft")
    model = Model(export(tmp_path, precision=precision), threads=1)
    plain, drafted = (
        model.generate(PROMPT, draft=draft, max_new_tokens=20).result().token_ids
        for draft in ("none", "dflash2")
    )
    assert plain == drafted


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "scaled rope, new place": ({"rope_parameters": {"rope_theta": 1e4} | LLAMA3}, ("llama3",)),
    "scaled rope, old place": ({"rope_scaling": LLAMA3}, ("llama3",)),
    "rope scaled by a factor": ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear",)),
    "yarn": ({"rope_parameters.rope_type": "yarn"}, ("yarn",)),
    "partial rope": ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    "mlp bias": ({"mlp_bias": True}, ("mlp_bias",)),
    "attention bias": ({"attention_bias": True}, ("attention_bias",)),
    "another activation": ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    "heads that do not divide": ({"num_attention_heads": 6}, ("num_attention_heads", "64")),
    "heads that do not share": ({"num_key_value_heads": 3}, ("num_key_value_heads",)),
    "head_dim of another": ({"head_dim": 32}, ("self_attn.q_proj",)),
    "experts": ({"num_local_experts": 8}, ("num_local_experts",)),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
    "no width": ({"hidden_size": REMOVED}, ("hidden_size",)),
}


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    make_llama(tmp_path / "target")
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configurations(box: Path, name: str) -> None:
    """One line that names the key or the tensor, and no file is left."""
    changes, words = REFUSED[name]
    edit_json(box / "target/config.json", changes)
    refused(box, *words, draft=False)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norms_of_queries_and_keys(box: Path, name: str) -> None:
    """A checkpoint that has them is another network, and is not run without them in silence."""
    tensor = f"model.layers.1.self_attn.{name}.weight"
    edit_tensors(box / "target", lambda t: t.update({tensor: np.ones(16, np.float32)}))
    refused(box, tensor, "matches nothing", draft=False)


def test_old_places_of_the_rope(box: Path) -> None:
    """Files of transformers 4 state the base beside the widths."""
    before = (export(box, "new", draft=False) / "target.onnx").read_bytes()
    old = {"rope_parameters": REMOVED, "rope_theta": 5e6, "rope_scaling": None}
    edit_json(box / "target/config.json", old)
    model = Model(export(box, "old", draft=False), threads=1)
    assert model.manifest.target.text.rope.theta == 5e6
    assert (box / "old/target.onnx").read_bytes() == before


def test_bias_tensors_are_refused(box: Path) -> None:
    """Also where the configuration says that there are none."""
    tensor = "model.layers.0.mlp.up_proj.bias"
    edit_tensors(box / "target", lambda t: t.update({tensor: np.ones(128, np.float32)}))
    refused(box, tensor, draft=False)
