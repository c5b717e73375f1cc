"""The whole loop against z-lab's own: the same tokens, from the same blocks.

Equal tokens alone would only show that the target verifies; equal blocks show that the drafter saw
the same rows in every round and proposed what the reference proposes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import edit_tensors
from support_prompts import lay_out, words
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.options import make_options

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
zlab = pytest.importorskip("dflash.model")

pytestmark = pytest.mark.parity
PROMPT = list(range(30, 60))
NUM_TOKENS, BLOCK = 80, 8
# Tokens that win nearly everywhere: random drafters then agree with the target now and then.
LOUD = [50, 81, 112, 143, 174]
CONV = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 8,
}
SLIDING = {"sliding_window": 16, "is_causal": False}
MIXED = {"sliding_window": 12, "layer_types": ("sliding_attention", "full_attention")}
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash full": {},
    "dflash mixed": MIXED,
    "dflash2 full": CONV,
    "dflash2 sliding": {**CONV, **SLIDING},
    "dflash2 scaled": {
        **CONV,
        **MIXED,
        "conv_kernel_size": 3,
        "input_embedding_scale": 4.0,
        "output_multiplier": 0.2,
        "final_logit_softcapping": 15.0,
    },
}


def amplify(tensors: dict[str, Any]) -> None:
    """Let a few columns win, and never one that our side bans: the reference has no bans."""
    tensors["lm_head.weight"][LOUD] *= 5
    tensors["lm_head.weight"][498:] = 0


@pytest.mark.parametrize("name", DRAFTS)
def test_blocks_equal_zlab(name: str, tmp_path: Path) -> None:
    """Greedy answers longer than the windows, with some drafts accepted and most refused.
    The last blocks are left out: there the reference's are one row longer than ours."""
    accepted = 0
    for seed in range(3):
        folder, kind = tmp_path / str(seed), name.split()[0]
        make_target(folder / "target", seed=70 + seed, tied=False)
        edit_tensors(folder / "target", amplify)
        make_draft(folder / "draft", folder / "target", seed=80 + seed, **DRAFTS[name])
        exported = ExportOptions(folder / "target", folder / "bundle", (folder / "draft",))
        model = Model(export_bundle(exported))
        options = make_options(max_new_tokens=NUM_TOKENS)
        plan = lay_out(model, [words(PROMPT)])
        generation = model.conversation(kind).generate_plan(plan, options)
        result = generation.result()
        ours = [(one.anchor, *one.drafted) for one in generation.rounds]
        output, theirs = reference_run(folder, kind)
        assert list(result.token_ids) == output
        whole = [len(block) == BLOCK for block in ours].index(False)
        assert ours[:whole] == theirs[:whole]
        print(f"[loop] {name} {seed}: {whole} blocks, {result.draft.accepted} drafts accepted")
        accepted += result.draft.accepted
    assert accepted >= 5


def reference_run(folder: Path, kind: str) -> tuple[list[int], list[tuple[int, ...]]]:
    """The answer of z-lab's loop on the same checkpoints, and the blocks its target verified."""
    target = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        folder / "target", dtype=torch.float32
    ).eval()
    drafter = {"dflash": zlab.DFlashDraftModel, "dflash2": zlab.DFlash2DraftModel}[kind]
    draft = drafter.from_pretrained(folder / "draft", dtype=torch.float32).eval()
    blocks: list[tuple[int, ...]] = []
    target.register_forward_pre_hook(lambda _, args: blocks.append(tuple(args[0][0].tolist())))
    output = zlab.dflash_generate(draft, target, torch.tensor([PROMPT]), NUM_TOKENS, None)
    return output[0, len(PROMPT) :].tolist(), blocks[1:]
