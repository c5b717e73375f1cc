"""Networks that a conversation may never use: opened by the first that does, once, or refused.

Knows which graphs hold sessions; what they compute is tested elsewhere.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support_images import make_image

from dflash_onnx.models.errors import ManifestError
from dflash_onnx.models.manifest import read_manifest, write_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.choosers import SelectorWalk
from dflash_onnx.runtime.tokenizer import Tokenizer

PICTURE = make_image(64, 64, 0)
ALWAYS = {"target", "head"}


@pytest.fixture
def bundle(make_bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a bundle with a tower and a drafter."""
    return Path(shutil.copytree(make_bundle(), tmp_path / "bundle"))


def damage(folder: Path, graph: str) -> None:
    """Put something else in a graph's place, with the digest that belongs to it."""
    manifest = read_manifest(folder)
    spec, content = manifest.graphs[graph], b"no graph"
    (folder / spec.file).write_bytes(content)
    changed = replace(spec, sha256=hashlib.sha256(content).hexdigest())
    write_manifest(replace(manifest, graphs={**manifest.graphs, graph: changed}), folder)


def test_the_largest_matrix_is_packed_while_nothing_else_is_there(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held twice meanwhile: what is loaded before it would come on top of the peak."""
    made: list[str] = []
    session, tokenizer = onnxruntime.InferenceSession, Tokenizer.from_file

    def note_session(path: str, *arguments: Any, **options: Any) -> Any:
        made.append(Path(path).stem)
        return session(path, *arguments, **options)

    def note_tokenizer(path: Path) -> Tokenizer:
        made.append(path.stem)
        return tokenizer(path)

    monkeypatch.setattr(onnxruntime, "InferenceSession", note_session)
    monkeypatch.setattr(Tokenizer, "from_file", note_tokenizer)
    Model(bundle)
    assert made == ["head", "tokenizer", "target"]


def test_plain_text_opens_neither_tower_nor_drafters(bundle: Path) -> None:
    """Each session holds its weights; a text chat on a large model must not pay for pictures."""
    model = Model(bundle)
    model.generate("hello", draft="none", max_new_tokens=3).result()
    assert set(model.clocks()) == ALWAYS
    model.generate("what?", [PICTURE], draft="none", max_new_tokens=3).result()
    assert set(model.clocks()) == {*ALWAYS, "vision"}
    model.conversation("dflash")
    assert set(model.clocks()) == {*ALWAYS, "vision", "dflash.inject", "dflash.block"}


def test_mtp_head_is_opened_with_its_conversation(make_bundle: Callable[..., Path]) -> None:
    """The head that ships with the checkpoint is a drafter like the others."""
    target = {"architecture": "Qwen3_5ForConditionalGeneration", "mtp": True}
    model = Model(make_bundle(target=target, drafts=[]))
    assert set(model.clocks()) == ALWAYS
    model.conversation("mtp")
    assert set(model.clocks()) == {*ALWAYS, "mtp"}


def test_selector_tables_are_held_by_the_first_conversation(
    make_bundle: Callable[..., Path],
) -> None:
    """Mapped until then; later conversations share what the first one has read."""
    selector = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12}
    model = Model(make_bundle(drafts=[selector | {"selector_top_k": 6}]))
    walk = model.networks["dflash2"].chooser
    assert isinstance(walk, SelectorWalk)
    mapped = walk.tables
    assert not any(table.flags.owndata for table in mapped)
    model.conversation("dflash2")
    held = walk.tables
    assert all(table.flags.owndata for table in held)
    assert all(np.array_equal(*pair) for pair in zip(mapped, held, strict=True))
    model.conversation("dflash2")
    assert all(first is second for first, second in zip(held, walk.tables, strict=True))


def test_threads_that_come_together_read_the_selector_tables_once(
    make_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's first conversations begin at the same time; a copy each is much memory."""
    selector = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12}
    model = Model(make_bundle(drafts=[selector | {"selector_top_k": 6}]))
    copied, require = [], np.require

    def slow(table: np.ndarray, *arguments: Any) -> np.ndarray:
        copied.append(not table.flags.owndata)
        time.sleep(0.02)
        return require(table, *arguments)

    monkeypatch.setattr(np, "require", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: model.conversation("dflash2"), range(4)))
    assert sum(copied) == 2


def test_tower_that_does_not_load_is_refused_at_every_picture(bundle: Path) -> None:
    """A failure is not remembered as a tower that is there; text goes on."""
    damage(bundle, "vision")
    model = Model(bundle)
    for _ in range(2):
        with pytest.raises(ManifestError, match=r"vision\.onnx cannot be loaded.*Export the"):
            model.generate("what?", [PICTURE], max_new_tokens=3).result()
    assert model.generate("hello", max_new_tokens=3).result().output_tokens == 3


def test_drafter_that_does_not_load_is_refused_when_it_is_chosen(bundle: Path) -> None:
    """At the drafter's first step the error would only turn it off, and a slow chat say nothing."""
    damage(bundle, "dflash.block")
    model = Model(bundle)
    with pytest.raises(ManifestError, match=r"dflash\.block\.onnx cannot be loaded.*Export the"):
        model.conversation("dflash")
    assert model.generate("hello", draft="none", max_new_tokens=3).result().output_tokens == 3


def test_threads_that_come_together_open_a_graph_once(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions of one graph would hold its weights twice."""
    model, opened, make = Model(bundle), [], onnxruntime.InferenceSession

    def slow(path: str, *arguments: Any, **options: Any) -> Any:
        opened.append(Path(path).name)
        time.sleep(0.05)
        return make(path, *arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", slow)

    def answer(_: int) -> tuple[int, ...]:
        return model.generate("what?", [PICTURE], draft="none", max_new_tokens=3).result().token_ids

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(answer, range(4)))) == 1
    assert opened == ["vision.onnx"]
