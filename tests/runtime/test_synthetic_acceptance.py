"""Acceptance by chance, for measurements: how many drafts are kept, and whatever they say.

The text means nothing, but every part of a round works on it as on any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support_drafters import Quiet
from support_oracle import endless
from support_prompts import BundleMaker, lay_out, text

from dflash_onnx.models.errors import PromptError
from dflash_onnx.runtime import Model, Result
from dflash_onnx.runtime.drafters.base import Proposal, Request
from dflash_onnx.runtime.options import make_options

TOKENS = 200
# Ids that the target never says by itself.
STRANGE = (33, 34, 35)


class Strange(Quiet):
    """Always drafts the same few ids."""

    name = "strange"

    def propose(self, request: Request) -> Proposal:
        """As many as may be, in a fixed order."""
        drafts = [STRANGE[i % 3] for i in range(request.max_drafts)]
        return Proposal(drafts, request.position)


@pytest.fixture(scope="module")
def model(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle(), threads=1))


def answer(model: Model, draft: Any, **options: Any) -> Result:
    made = make_options(**{"max_new_tokens": TOKENS} | options)
    return model.conversation(draft).generate_plan(lay_out(model, [text(9)]), made).result()


@pytest.mark.parametrize("draft", ["dflash", Strange(7)])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "rng_seed": 3}])
def test_all_or_nothing(model: Model, draft: Any, options: dict[str, Any]) -> None:
    """With chance 1 all blocks are whole, with chance 0 the text is the plain one."""
    full = answer(model, draft, synthetic_acceptance=1.0, **options)
    assert full.draft.accepted == full.draft.drafted == TOKENS - 1 - full.draft.rounds
    assert set(full.draft.tokens_per_round[:-1]) == {8}
    none = answer(model, draft, synthetic_acceptance=0.0, **options)
    assert none.draft.accepted == 0 < none.draft.drafted
    assert none.token_ids == answer(model, "none", **options).token_ids


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_a_chance_between(model: Model, chance: float) -> None:
    """A block of 7 keeps p + p^2 + ... + p^7 drafts on average; a seed gives one text."""
    runs = [
        answer(model, Strange(7), synthetic_acceptance=chance, rng_seed=seed) for seed in range(4)
    ]
    lengths = [n - 1 for run in runs for n in run.draft.tokens_per_round[:-1]]
    spread = np.std(lengths) / np.sqrt(len(lengths))
    assert abs(np.mean(lengths) - sum(chance**k for k in range(1, 8))) < 4 * spread
    again = answer(model, Strange(7), synthetic_acceptance=chance, rng_seed=1)
    assert again.token_ids == runs[1].token_ids != runs[2].token_ids


def test_the_kept_ids_are_the_drafts(model: Model) -> None:
    """They stand in the text as they were drafted, and come from nowhere else: without the option
    the target never says them, and it turns the same drafts down."""
    kept = answer(model, Strange(2), synthetic_acceptance=1.0).token_ids
    assert all(kept[i : i + 2] == STRANGE[:2] for i in range(1, TOKENS - 3, 3))
    assert not set(STRANGE) & set(answer(model, "none").token_ids)
    real = answer(model, Strange(7))
    assert real.draft.accepted == 0 and real.token_ids == answer(model, "none").token_ids


def test_stop_tokens_can_be_ignored(make_bundle: BundleMaker) -> None:
    """A drafted stop token ends an answer, unless the measurement wants all of it."""
    model = Model(make_bundle(), threads=1)

    class Stopping(Strange):
        def propose(self, request: Request) -> Proposal:
            return Proposal([model.manifest.stop_ids[0]] * request.max_drafts, request.position)

    ended = answer(model, Stopping(3), synthetic_acceptance=1.0)
    assert ended.finish_reason == "stop" and len(ended.token_ids) == 2
    whole = answer(model, Stopping(3), synthetic_acceptance=1.0, ignore_stop=True)
    assert whole.finish_reason == "length" and len(whole.token_ids) == TOKENS


@pytest.mark.parametrize("chance", [-0.1, 1.1, float("nan"), float("inf")])
def test_no_probability(chance: float) -> None:
    """Refused in one line before anything runs."""
    with pytest.raises(PromptError, match="synthetic_acceptance must lie between 0 and 1"):
        make_options(synthetic_acceptance=chance)
