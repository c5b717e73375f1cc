"""Logits, bit for bit: a verify block, a prefill chunk and a single step compute the same rows.

Kernels choose their path by shape, so several head layouts, widths and thread counts are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import cache_digest
from support_case_drafters import GuidedMtp
from support_cases import HYBRID, TARGET
from support_drafters import Adversary, FirstK, Known
from support_layouts import make_prompt

from dflash_onnx.models.positions import Ints, Position, advancing_positions
from dflash_onnx.runtime import Model, Round
from dflash_onnx.runtime.drafters.base import Drafter
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.plan import PromptPlan
from dflash_onnx.runtime.probe import block_difference
from dflash_onnx.runtime.sampling import HeadRows
from dflash_onnx.runtime.target import Float, Head, Target, TargetRows
from dflash_onnx.runtime.target_cache import TargetCache

Bundles = Callable[..., Path]
SHAPES: dict[str, dict[str, Any]] = {
    "heads as kv heads": {"heads": 4, "kv_heads": 4},
    "groups of 4": {"heads": 8, "kv_heads": 2},
    "one kv head": {"heads": 4, "kv_heads": 1},
    "head_dim 64": {"head_dim": 64, "mrope_section": (12, 10, 10)},
    "head_dim 128": {"head_dim": 128, "mrope_section": (24, 20, 20), "heads": 2, "kv_heads": 1},
    "hidden 96": {"hidden": 96, "mlp": 200},
    "untied head": {"tied": False, "vocab": 600},
}
HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "three of four layers recurrent": {"interval": 4},
    "only the last layer attends": {"interval": 6, "layers": 6},
    "one kv head of 64": {
        "head_dim": 64,
        "mrope_section": (6, 5, 5),
        "kv_heads": 1,
        "deepstack": (),
    },
    "hidden 96, untied head": {"hidden": 96, "mlp": 200, "tied": False, "vocab": 600},
}
CHUNKS = (1, 2, 3, 7, 48, 64, 4096)


class LoggingHead:
    """A head that keeps the logits of its last call."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.last: Float = np.zeros((0, 0), np.float32)

    def rows(self, hidden: Float, rows: Ints, with_logits: bool) -> HeadRows:
        """The head's answer; logits are computed whether wanted or not."""
        answer = self._head.rows(hidden, rows, True)
        assert answer.logits is not None
        self.last = answer.logits
        return answer if with_logits else answer._replace(logits=None)


class LoggingTarget:
    """A target that keeps the hidden rows and taps of every call."""

    def __init__(self, target: Target, taps: Collection[int]) -> None:
        self._target = target
        self._taps = tuple(taps)
        self.head = LoggingHead(target.head)
        self.outputs: list[Float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(
        self,
        cache: TargetCache,
        embeds: Float,
        positions: Ints,
        deepstack: Float | None,
        taps: Collection[int],
        certain: bool,
    ) -> TargetRows:
        """Run, with all taps fetched."""
        output = self._target.forward(cache, embeds, positions, deepstack, self._taps, certain)
        self.outputs.append(np.concatenate([output.hidden, *output.taps.values()], axis=1))
        return output


def logging_model(bundle: Path, threads: int = 1) -> tuple[Model, LoggingTarget]:
    """A model that never stops by itself and whose target and head are logged."""
    model = Model(bundle, threads=threads)
    model.manifest = replace(model.manifest, stop_ids=())
    target = LoggingTarget(model.target, model.manifest.tap_layers)
    model.target = target  # type: ignore[assignment]
    return model, target


def logits_of_answer(
    bundle: Path, draft: str | Drafter, num_tokens: int, threads: int = 1
) -> tuple[tuple[int, ...], Float]:
    """Ids [n] of a greedy answer and the logits [n, V] each was chosen from."""
    model, target = logging_model(bundle, threads)
    plan = make_prompt(model, "one image").plan
    conversation = model.conversation(draft)
    generation = conversation.generate_plan(plan, make_options(max_new_tokens=num_tokens))
    blocks: list[Float] = []

    def keep(record: Round) -> None:
        blocks.append(target.head.last[: record.produced])

    deltas = iter(generation.on_round(keep))
    next(deltas)
    blocks.append(target.head.last)
    result = generation.result()
    assert result.draft.state == "on"
    return result.token_ids, np.concatenate(blocks)


def known(bundle: Path, ids: tuple[int, ...]) -> Known:
    """What a drafter must know to draft the answer `ids`."""
    plan = make_prompt(Model(bundle, threads=1), "one image").plan
    return Known(ids, plan.num_rows, int(plan.mrope_positions.max()) + 1)


def check_speculative(bundle: Path, num_tokens: int, blocks: Collection[int]) -> None:
    """Every block size and the real drafter against single steps, then two threads."""
    ids, plain = logits_of_answer(bundle, "none", num_tokens)
    assert len(ids) == len(plain) == num_tokens
    answer = known(bundle, ids)
    drafts = [FirstK(answer, n - 1, range(n)) for n in blocks]
    for draft in ("dflash", *drafts, *hybrid_drafters(bundle, answer)):
        assert_equal(plain, logits_of_answer(bundle, draft, num_tokens), ids)
    widest = FirstK(answer, max(blocks) - 1, range(max(blocks)))
    for draft in ("none", widest, *hybrid_drafters(bundle, answer)):
        assert_equal(plain, logits_of_answer(bundle, draft, num_tokens, threads=2), ids)


def hybrid_drafters(bundle: Path, answer: Known) -> list[str | Drafter]:
    """The MTP head alone, and with right drafts in front; one that is rejected every time."""
    model = Model(bundle, threads=1)
    if model.mtp is None:
        return []
    return ["mtp", GuidedMtp(model, 15, answer, range(16)), Adversary(answer, 7)]


def assert_equal(plain: Float, run: tuple[tuple[int, ...], Float], ids: tuple[int, ...]) -> None:
    """Bit equality, minus infinity of banned ids included."""
    first = next((i for i in range(len(plain)) if not same_bits(plain[i], run[1][i])), None)
    assert first is None, f"logits of token {first} differ"
    assert run[0] == ids


def same_bits(first: Float, second: Float) -> bool:
    """Equality that tells 0.0 from -0.0."""
    return first.shape == second.shape and first.tobytes() == second.tobytes()


def check_prefill(bundle: Path) -> None:
    """Hidden rows and taps of every prompt row, and what the cache holds after them, for every
    chunk size and two threads."""
    whole: dict[str, tuple[Float, str]] = {}
    for threads in (1, 2):
        model, target = logging_model(bundle, threads)
        for layout in ("adjacent images", "reused to a snapshot"):
            plan = make_prompt(model, layout).plan
            for chunk in CHUNKS:
                rows, digest = prefill(model, target, plan, chunk)
                assert rows.shape[0] == plan.num_rows
                wanted = whole.setdefault(layout, (rows, digest))
                assert same_bits(rows, wanted[0]), (layout, chunk, threads)
                assert digest == wanted[1], (layout, chunk, threads)


def prefill(model: Model, target: LoggingTarget, plan: PromptPlan, chunk: int) -> tuple[Float, str]:
    target.outputs.clear()
    options = make_options(max_new_tokens=1, chunk=chunk)
    conversation = model.conversation("none")
    conversation.generate_plan(plan, options).result()
    return np.concatenate(target.outputs), cache_digest(conversation)


def test_the_probe_compares_what_it_computed(tiny_model: Model) -> None:
    """Rows of its earlier calls stay as they were, though a later call writes in their place."""
    assert block_difference(tiny_model.target) == 0


def test_rows_lie_where_the_next_call_writes(tiny_model: Model) -> None:
    """Copies of them would cost every round; who keeps rows copies them."""
    target = tiny_model.target
    calls: list[TargetRows] = []
    cache, embeds = target.new_cache(9), target.embed(np.array([5, 6]))
    for row in (0, 2, 4):
        positions = advancing_positions(Position(row), 2)
        calls.append(target.forward(cache, embeds, positions, None, (1,), certain=True))
        cache.commit(2)
    assert calls[1].hidden is calls[2].hidden and calls[1].taps[1] is calls[2].taps[1]


def test_logits_of_2000_tokens(make_bundle: Bundles) -> None:
    """Near ties everywhere, a text that fills half the context: no bit differs from plain steps."""
    check_speculative(make_bundle(target=TARGET), 2000, (2, 3, 8, 16))


def test_prefill_in_any_chunks(make_bundle: Bundles) -> None:
    """However a prompt with images is cut into batches, each of its rows comes out the same."""
    check_prefill(make_bundle(target=TARGET))


def test_half_precision_weights(make_bundle: Bundles) -> None:
    """The same holds for a bundle whose weights are stored in fp16."""
    bundle = make_bundle(target=TARGET, precision="fp16")
    check_speculative(bundle, 300, (2, 8, 16))
    check_prefill(bundle)


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes(make_bundle: Bundles, shape: str) -> None:
    """Kernels differ by head count, head size and width; none depends on the rows of a call."""
    bundle = make_bundle(target=TARGET | SHAPES[shape])
    check_speculative(bundle, 200, (2, 3, 8, 16))
    check_prefill(bundle)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_hybrid_logits_of_400_tokens(make_bundle: Bundles, precision: str) -> None:
    """Recurrent state would carry a wrong bit through the whole text; none differs, whatever was
    drafted and rejected on the way."""
    bundle = make_bundle(target=HYBRID, precision=precision)
    check_speculative(bundle, 400, (2, 3, 8, 16))
    check_prefill(bundle)


@pytest.mark.parametrize("shape", HYBRID_SHAPES)
def test_hybrids_of_other_shapes(make_bundle: Bundles, shape: str) -> None:
    """Nor does it with more recurrent layers, or other heads and widths."""
    bundle = make_bundle(target=HYBRID | HYBRID_SHAPES[shape])
    check_speculative(bundle, 100, (2, 8, 16))
    check_prefill(bundle)
