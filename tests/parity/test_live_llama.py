"""Llama-style bundles against transformers, run live on checkpoints of several kinds.

The default suite has a NumPy reference for one file in float32; here dtypes and shards vary too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_llama import make_llama
from support_networks import max_difference, prefill
from support_oracle import endless
from tiny_checkpoint import make_draft

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.options import GenerateOptions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.parity
BOUND, TOKENS = 1e-4, 64
PROMPT = "What is the old stone bridge, and which of both pictures is larger?"
TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": ({}, {"seed": 71}),
    "untied": ({}, {"seed": 72, "tied": False}),
    "bf16-sharded": ({}, {"seed": 73, "dtype": "bfloat16", "shards": 3, "tied": False}),
    "fp16": ({}, {"seed": 74, "dtype": "float16", "theta": 1e4}),
    "one-kv-head": ({}, {"seed": 75, "kv_heads": 1, "layers": 5}),
    "wide-heads": ({"head_dim": 32}, {"seed": 76, "head_dim": 32, "kv_heads": 4}),
}


class Pair:
    """A loaded bundle and transformers' own model."""

    def __init__(self, folder: Path, changes: dict[str, Any], options: dict[str, Any]) -> None:
        make_llama(folder / "target", changes, **{"gain": 1.0} | options)
        make_draft(folder / "draft", folder / "target")
        bundle = ExportOptions(folder / "target", folder / "bundle", (folder / "draft",))
        self.model = endless(Model(export_bundle(bundle), threads=1))
        kind = transformers.LlamaForCausalLM
        self.reference = kind.from_pretrained(folder / "target", dtype=torch.float32).eval()
        self.reference.generation_config.eos_token_id = None
        self.banned = list(self.model.manifest.banned_ids)


@pytest.fixture(scope="module", params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("llama"), *TARGETS[request.param])


@pytest.mark.parametrize("chunk", [512, 5])
def test_logits_equal_transformers(pair: Pair, chunk: int) -> None:
    """All rows of a prompt."""
    plan = pair.model.plan(PROMPT)
    with torch.inference_mode():
        theirs = pair.reference(torch.from_numpy(plan.token_ids)[None]).logits[0].numpy()
    ours = prefill(pair.model, plan, chunk=chunk).logits
    measured = max_difference(ours, theirs, pair.banned)
    print(f"[llama] logits in chunks of {chunk}: {measured:.2e} (bound {BOUND:.1e})")
    assert measured <= BOUND and np.abs(theirs).max() > 1


@pytest.mark.parametrize("draft", ["none", "lookup", "dflash"])
def test_greedy_tokens_equal_transformers(pair: Pair, draft: str) -> None:
    """64 tokens, plain and drafted."""
    plan = pair.model.plan(PROMPT)
    with torch.inference_mode():
        output = pair.reference.generate(
            torch.from_numpy(plan.token_ids)[None],
            max_new_tokens=TOKENS,
            do_sample=False,
            suppress_tokens=pair.banned,
        )
    generation = pair.model.conversation(draft).generate_plan(plan, GenerateOptions(TOKENS))
    assert list(generation.result().token_ids) == output[0, -TOKENS:].tolist()
