"""Bundles of every precision: speculative output equals the plain run, close to that of fp32.

Quantised kernels choose their path by shape too, so logits are compared bit by bit; what is in
which file, and what `info` says of it, is checked on one bundle whose parts all differ.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support_drafters import FirstK, Known, Oracle
from support_layouts import make_prompt
from support_networks import logits_of, prefill
from support_prompts import BundleMaker
from test_bit_identity import assert_equal, logging_model, logits_of_answer, same_bits
from test_bit_identity import prefill as logged_prefill

from dflash_onnx.export.bundle import ExportOptions
from dflash_onnx.models.errors import ExportError
from dflash_onnx.models.manifest import Manifest, read_manifest
from dflash_onnx.models.precision import PRECISIONS
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.cli import main
from dflash_onnx.runtime.drafters.base import Drafter
from dflash_onnx.runtime.options import make_options
from dflash_onnx.runtime.target import Float

TARGETS: dict[str, dict[str, Any]] = {
    "attention": {},
    "hybrid": {"architecture": "Qwen3_5ForConditionalGeneration", "mtp": True},
}
CONV = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 6}
DRAFTS: list[dict[str, Any]] = [{}, CONV]
TOKENS = 40
BLOCKS = (2, 3, 8, 16)
CHUNKS = (1, 2, 3, 7, 16, 4096)
# The least mean cosine between hidden rows and those of fp32.
CLOSE = {"fp16": 0.9999, "int8": 0.99, "w8a8": 0.99, "int4": 0.9}
PROMPT = "Describe what you see: a small red house near the river, or a bridge?"


class Bundle:
    """A loaded bundle whose logits are kept, and its plain answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.target = logging_model(folder)
        self.plan = make_prompt(self.model, "one image").plan
        self.ids, self.plain = self.answer("none")
        position = int(self.plan.mrope_positions.max()) + 1
        self.known = Known(self.ids, self.plan.num_rows, position)

    def answer(self, draft: str | Drafter) -> tuple[tuple[int, ...], Float]:
        """Ids [n] of a greedy answer and the logits [n, V] each was chosen from."""
        conversation, blocks = self.model.conversation(draft), []
        generation = conversation.generate_plan(self.plan, make_options(max_new_tokens=TOKENS))
        generation.on_round(lambda one: blocks.append(self.target.head.last[: one.produced]))
        next(iter(generation))
        first = self.target.head.last
        assert generation.result().draft.state == "on"
        return generation.result().token_ids, np.concatenate([first, *blocks])


@pytest.fixture(scope="module", params=itertools.product(TARGETS, PRECISIONS), ids="-".join)
def bundle(request: pytest.FixtureRequest, make_bundle: BundleMaker) -> Bundle:
    """Every precision of both targets, each with all kinds of drafters."""
    target, precision = request.param
    return Bundle(make_bundle(target=TARGETS[target], drafts=DRAFTS, precision=precision))


def test_every_drafter_gives_the_plain_answer(bundle: Bundle) -> None:
    """Each drafter of the bundle, lookup, and an oracle: equal ids, and no bit of a logit differs.

    Drafters whose first k drafts are right make rounds of every length.
    """
    assert len(bundle.ids) == TOKENS and len(set(bundle.ids)) > 5
    names = bundle.model.manifest.draft_names
    assert names[:2] == ("dflash", "dflash2") and bundle.model.manifest.mtp == ("mtp" in names)
    for draft in (*names, "lookup", Oracle(bundle.known, 7)):
        assert_equal(bundle.plain, bundle.answer(draft), bundle.ids)


def test_logits_do_not_depend_on_blocks(bundle: Bundle) -> None:
    """Calls of 2, 3, 8 and 16 rows against calls of one row, then with two threads."""
    for rows in BLOCKS:
        draft = FirstK(bundle.known, rows - 1, range(rows))
        ids, logits = bundle.answer(draft)
        assert difference(logits, bundle.plain) == 0
        assert_equal(bundle.plain, (ids, logits), bundle.ids)
    widest = FirstK(bundle.known, max(BLOCKS) - 1, range(max(BLOCKS)))
    again = logits_of_answer(bundle.folder, widest, TOKENS, threads=2)
    assert_equal(bundle.plain, again, bundle.ids)


def test_prompts_do_not_depend_on_chunks(bundle: Bundle) -> None:
    """Hidden rows, taps and cache of a prompt with an image, and the logits of all its rows."""
    model, plan = bundle.model, bundle.plan
    whole, digest = logged_prefill(model, bundle.target, plan, CHUNKS[-1])
    hidden = whole[:, : model.manifest.target.text.hidden_size]
    logits = logits_of(model, hidden)
    for chunk in CHUNKS:
        rows, cache_digest = logged_prefill(model, bundle.target, plan, chunk)
        assert same_bits(rows, whole) and cache_digest == digest, chunk
        parts = [hidden[i : i + chunk] for i in range(0, len(hidden), chunk)]
        again = np.concatenate([logits_of(model, part) for part in parts])
        assert difference(again, logits) == 0 and same_bits(again, logits), chunk


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """Largest difference of logits; banned ids are minus infinity in both."""
    finite = np.isfinite(second)
    assert (np.isfinite(first) == finite).all() and finite.any()
    return float(np.abs(first[finite] - second[finite]).max())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", CLOSE)
def test_hidden_rows_stay_close_to_fp32(
    make_bundle: BundleMaker, target: str, precision: str
) -> None:
    """Two layers of random weights, which lose more than trained ones (benchmarks/quality.py)."""
    options = TARGETS[target] | {"gain": 1.0, "layers": 2, "interval": 2}
    ours, exact = (
        text_rows(make_bundle(target=options, drafts=[], precision=p)) for p in (precision, "fp32")
    )
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (ours * exact).sum(axis=1) / lengths
    assert cosines.mean() > CLOSE[precision], cosines.mean()
    assert not same_bits(ours, exact)


@cache
def text_rows(bundle: Path) -> np.ndarray:
    """Hidden rows of a text prompt."""
    model = Model(bundle, threads=1)
    return prefill(model, model.plan(PROMPT)).hidden


def forms(bundle: Path) -> dict[str, set[str]]:
    """The forms of the matrices in every data file, as the bundle's graphs declare them."""
    names = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.INT8: "w8a8"}
    found: dict[str, set[str]] = defaultdict(set)
    for path in bundle.glob("*.onnx"):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            places = [e.value for e in tensor.external_data if e.key == "location"]
            if places and len(tensor.dims) > 1 and not tensor.name.endswith(".scales"):
                blocked = {16: "int4", 32: "int8"}.get(tensor.dims[-1], "?")
                found[places[0]].add(names.get(tensor.data_type, blocked))
    return found


@pytest.fixture(scope="module")
def mixed(make_bundle: BundleMaker) -> Path:
    """A bundle whose parts all have a precision of their own."""
    return make_bundle(
        target=TARGETS["hybrid"],
        precision="int4",
        head_precision="int8",
        draft_precision="w8a8",
        vision_precision="fp32",
    )


def test_every_part_has_its_precision(mixed: Path) -> None:
    """What is no product of rows stays a float; the embedding table beside a quantised head is
    in halves."""
    found = forms(mixed)
    assert found["target.data"] - {"fp32"} == {"int4"}
    assert found["head.data"] == {"int8"}
    assert found["vision.data"] == {"fp32"}
    for file in ("dflash.data", "mtp.data"):
        assert found[file] - {"fp32"} == {"w8a8"}, file
    manifest = read_manifest(mixed)
    assert manifest.embedding.dtype == "float16" and manifest.embedding.file == "embedding.data"
    assert len(set(Model(mixed, threads=1).generate("Hi.", max_new_tokens=9).result().text)) > 3


def test_info_names_the_precisions(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One for all parts, or all four."""
    assert main(["info", str(mixed)]) == 0
    assert "int4 (head int8, draft w8a8, vision fp32)" in capsys.readouterr().out


HEADS = [(tied, head) for tied in (True, False) for head in ("fp32", "fp16", "int8", "w8a8")]


@pytest.mark.parametrize(("tied", "head"), HEADS)
def test_heads_of_every_kind(make_bundle: BundleMaker, tied: bool, head: str) -> None:
    """A tied head is the table while that is a float, and a matrix of its own when quantised."""
    bundle = make_bundle(target={"tied": tied}, drafts=[], head_precision=head)
    manifest: Manifest = read_manifest(bundle)
    is_float = head in ("fp32", "fp16")
    assert manifest.embedding.dtype == ("float32" if head == "fp32" else "float16")
    file = "embedding.data" if tied and is_float else "head.data"
    assert forms(bundle)[file] == {head}
    assert ("head.data" in manifest.data_files) == (file == "head.data")
    reference = Model(make_bundle(target={"tied": tied}, drafts=[]), threads=1)
    hidden = prefill(reference, reference.plan("A house.")).hidden
    exact, ours = (logits_of(m, hidden) for m in (reference, Model(bundle, threads=1)))
    spread = float(exact[np.isfinite(exact)].std())
    assert difference(ours, exact) < {"fp32": 1e-9, "fp16": 5e-3}.get(head, 5e-2) * spread


@pytest.mark.parametrize("part", ["precision", "head_precision", "vision_precision"])
def test_unknown_precisions(part: str) -> None:
    """Refused before anything is read, in the words of the command line."""
    options: dict[str, Any] = {part: "int3"}
    with pytest.raises(ExportError, match=f"--{part.replace('_', '-')} 'int3' is not supported"):
        ExportOptions(Path("a"), Path("b"), **options)
    with pytest.raises(ExportError, match="only CUDA has kernels"):
        ExportOptions(Path("a"), Path("b"), draft_precision="bf16")
