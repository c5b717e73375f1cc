"""The trained hybrid miniature: recurrent layers that really read, and drafters that really help.

Its weights are in `checkpoints/hybrid`, made by `examples/miniature` (see the README there).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.miniature.data import sample
from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.demo import LINES, QUESTION, sample_page

CHECKPOINTS = Path(__file__).parent / "checkpoints/hybrid"
DRAFTERS = ("dflash", "dflash2", "mtp", "lookup")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    drafts = tuple(CHECKPOINTS / name for name in ("dflash", "dflash2"))
    output = tmp_path_factory.mktemp("trained") / "bundle"
    return Model(export_bundle(ExportOptions(CHECKPOINTS / "target", output, drafts)), threads=1)


def answer(model: Model, index: int, draft: str) -> Result:
    """The answer to a held-out question with its pages."""
    question = sample(6, index)
    return model.generate(question.prompt, question.images, draft, max_new_tokens=120).result()


@pytest.mark.parametrize("draft", DRAFTERS)
def test_it_reads_the_page(model: Model, draft: str) -> None:
    """The demo's page, read with every drafter: right, and in one target call a round."""
    result = model.generate(QUESTION, [sample_page()], draft).result()
    assert result.text == "\n".join(LINES) and result.draft.state == "on"
    assert result.timings.target_calls == result.draft.rounds


def test_held_out_answers(model: Model) -> None:
    """Of 40 questions never trained on, nearly all are answered in full; every drafter gives the
    plain run's tokens, and each trained one saves more than half of the target calls."""
    plain = [answer(model, index, "none") for index in range(40)]
    right = [sample(6, index).answer == result.text for index, result in enumerate(plain)]
    assert np.mean(right) >= 0.9
    for draft in DRAFTERS:
        drafted = [answer(model, index, draft) for index in range(40)]
        assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
        tokens = sum(sum(r.draft.tokens_per_round) for r in drafted)
        per_round = tokens / sum(r.draft.rounds for r in drafted)
        print(f"[trained hybrid] {draft} {per_round:.2f} tokens per target call")
        assert per_round > (1 if draft == "lookup" else 2.5)


def test_drafting_survives_an_image(model: Model) -> None:
    """After an image MTP and DFlash go on as before it: three of its drafts at a time are kept
    where the page says what follows."""
    for draft in ("mtp", "dflash"):
        result = model.generate("Read as JSON.", [sample_page()], draft, max_new_tokens=80).result()
        assert result.draft.mean_accepted_length > 2.5 and result.draft.drafted > 0


@pytest.mark.parametrize("draft", ["mtp", "dflash2"])
def test_a_second_turn_reuses_the_first(model: Model, draft: str) -> None:
    """The next turn repeats the whole chat, page included: all rows are reused, none recomputed,
    and the answer is that of a conversation that starts with it."""
    page = sample_page()
    first = {"role": "user", "content": [{"type": "image", "image": page}, text(QUESTION)]}
    conversation = model.conversation(draft)
    reply = conversation.generate([first]).result()
    second = [first, {"role": "assistant", "content": reply.text}, user("Count from 3 to 9.")]
    result = conversation.generate(second).result()
    fresh = model.generate(second, draft="none").result()
    assert result.token_ids == fresh.token_ids
    # The token that ended the answer never got a row.
    assert result.timings.reused_rows == reply.prompt_tokens + reply.output_tokens - 1


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(words: str) -> dict[str, object]:
    return {"role": "user", "content": [text(words)]}
