"""Bundles of every precision: speculative output equals the plain run, close to that of fp32.

Quantised kernels choose their path by shape too, so logits are compared bit by bit; what is in
which file, and what `info` says of it, is checked on one bundle whose parts all differ.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support_drafters import FirstK, Oracle
from support_networks import logits_of, prefill
from support_prompts import BundleMaker
from test_bit_identity import check_speculative, known, logging_model, logits_of_answer, same_bits
from test_bit_identity import prefill as logged_prefill

from dflash_onnx.export.bundle import ExportOptions
from dflash_onnx.models.errors import ExportError
from dflash_onnx.models.manifest import Manifest, read_manifest
from dflash_onnx.models.precision import PRECISIONS
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.cli import main
from dflash_onnx.runtime.drafters.base import Drafter

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
CLOSE = {"fp32": 0.9999, "fp16": 0.9999, "int8": 0.99, "w8a8": 0.99, "int4": 0.9}
PICTURE_TEXT = "Describe what you see: a small red house near the river, or a bridge?"


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_drafter_gives_the_plain_answer(
    make_bundle: BundleMaker, target: str, precision: str
) -> None:
    """Each drafter of the bundle, lookup, and an oracle whose whole blocks are accepted."""
    bundle = make_bundle(target=TARGETS[target], drafts=DRAFTS, precision=precision)
    ids, _ = logits_of_answer(bundle, "none", TOKENS)
    assert len(ids) == TOKENS and len(set(ids)) > 5
    model = Model(bundle, threads=1)
    names = ["dflash", "dflash2", *(["mtp"] if target == "hybrid" else [])]
    assert list(model.manifest.draft_names) == names
    answer = known(bundle, ids)
    drafts: list[str | Drafter] = [*names, "lookup", Oracle(answer, 7), FirstK(answer, 5, range(6))]
    for draft in drafts:
        assert logits_of_answer(bundle, draft, TOKENS)[0] == ids, draft


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_do_not_depend_on_blocks(
    make_bundle: BundleMaker, target: str, precision: str
) -> None:
    """Blocks of 1, 2, 3, 8 and 16 rows, one and two threads: no bit of any logit differs."""
    bundle = make_bundle(target=TARGETS[target], drafts=DRAFTS, precision=precision)
    check_speculative(bundle, TOKENS, BLOCKS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_prompts_do_not_depend_on_chunks(
    make_bundle: BundleMaker, target: str, precision: str
) -> None:
    """Hidden rows, taps and cache of a prompt with an image, and the logits of its rows."""
    bundle = make_bundle(target=TARGETS[target], drafts=DRAFTS, precision=precision)
    model, logging = logging_model(bundle)
    plan = model.plan([{"role": "user", "content": [{"type": "image"}, _text()]}], [picture()])
    whole, digest = logged_prefill(model, logging, plan, CHUNKS[-1])
    logits = prefill(model, plan).logits
    for chunk in CHUNKS:
        rows, cache_digest = logged_prefill(model, logging, plan, chunk)
        assert same_bits(rows, whole) and cache_digest == digest, chunk
        again = prefill(model, plan, chunk=chunk).logits
        assert difference(again, logits) == 0 and same_bits(again, logits), chunk
    one_by_one = [logits_of(model, row[None, : hidden_size(model)]) for row in whole]
    assert same_bits(np.concatenate(one_by_one), logits)


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """Largest difference of logits; banned ids are minus infinity in both."""
    finite = np.isfinite(second)
    assert (np.isfinite(first) == finite).all() and finite.any()
    return float(np.abs(first[finite] - second[finite]).max())


def hidden_size(model: Model) -> int:
    return model.manifest.target.text.hidden_size


def _text() -> dict[str, str]:
    return {"type": "text", "text": PICTURE_TEXT}


def picture() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (64, 96, 3), np.uint8)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_hidden_rows_stay_close_to_fp32(
    make_bundle: BundleMaker, target: str, precision: str
) -> None:
    """Random networks with a gain of one: a trained one, which is far more robust, is measured by
    benchmarks/quality.py."""
    options = TARGETS[target] | {"gain": 1.0}
    ours, exact = (
        text_rows(make_bundle(target=options, drafts=[], precision=p)) for p in (precision, "fp32")
    )
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (ours * exact).sum(axis=1) / lengths
    assert cosines.mean() > CLOSE[precision], cosines.mean()
    assert precision == "fp32" or not same_bits(ours, exact)


@cache
def text_rows(bundle: Path) -> np.ndarray:
    """Hidden rows of a text prompt."""
    model = Model(bundle, threads=1)
    return prefill(model, model.plan(PICTURE_TEXT)).hidden


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
