"""A finished bundle: its manifest, its options, and how strictly the manifest is read.

Knows the manifest's keys; the ONNX files and the weights are in the tests beside this one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_checkpoint import REMOVED, changed, edit_json, edit_tensors, export, read
from tiny_checkpoint import make_draft

from dflash_onnx.export.bundle import ExportOptions, export_bundle
from dflash_onnx.models.errors import DflashOnnxError, ManifestError
from dflash_onnx.models.manifest import read_manifest, write_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.selfcheck import self_check


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_checkpoint_gives_the_same_bundle(pair: Path) -> None:
    """No time, path or random number gets into a bundle.
    Two exports are equal byte for byte, so digests can be compared between machines."""
    first, second = export(pair, "first"), export(pair, "second")
    assert contents(first) == contents(second)
    assert str(pair) not in (first / "bundle.json").read_text(encoding="utf-8")


def test_side_files_and_digests(pair: Path) -> None:
    """The template is copied as it is, the tokenizer rewritten (`test_tokenizer_file`).
    Every graph and data file has the digest and size that the manifest states."""
    bundle = export(pair)
    name = "chat_template.jinja"
    assert (bundle / name).read_bytes() == (pair / "target" / name).read_bytes()
    manifest = read_manifest(bundle)
    for graph in manifest.graphs.values():
        content = (bundle / graph.file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == graph.sha256
    for name, data in manifest.data_files.items():
        content = (bundle / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (data.num_bytes, data.sha256)


def test_manifest_holds_the_checkpoints_own_values(pair: Path) -> None:
    """Ids, limits, rope and windows are read once, here.
    Stop ids come from generation_config.json, banned ones from placeholders and spare columns."""
    make_draft(pair / "draft", pair / "target", sliding_window=16, is_causal=False, taps=(3, 0))
    manifest = read_manifest(export(pair))
    assert (manifest.family, str(manifest.precision), manifest.tokenizer_size) == (
        "qwen3_vl", "fp32", 504,
    )  # fmt: skip
    assert manifest.stop_ids == (497, 495)
    assert manifest.banned_ids == (498, 499, 500, 501, 502, *range(504, 512))
    assert (manifest.tap_layers, manifest.tap_before_deepstack) == ((0, 3), True)
    assert (manifest.image.min_pixels, manifest.image.max_pixels) == (1024, 262144)
    draft = manifest.drafts["dflash"]
    assert (draft.target_layer_ids, draft.block_size, draft.mask_token_id) == ((3, 0), 8, 503)
    assert [(layer.window, layer.causal) for layer in draft.layers] == [(16, False)] * 2
    assert (draft.rope.theta, draft.rope.mrope_section) == (1e6, None)
    assert (draft.own_head, draft.d2t, draft.trained_on_media) == (False, None, None)


def test_options_reach_the_manifest(pair: Path) -> None:
    """--max-pixels and --draft-media replace what the checkpoint says.
    A limit below the smallest image is refused."""
    edit_json(pair / "draft/config.json", {"dflash_config.trained_on_media": True})
    plain = read_manifest(export(pair, "plain"))
    assert plain.drafts["dflash"].trained_on_media is True
    manifest = read_manifest(export(pair, "set", max_pixels=4096, draft_media="no"))
    assert manifest.image.max_pixels == 4096
    assert manifest.drafts["dflash"].trained_on_media is False
    unknown = read_manifest(export(pair, "unknown", draft_media="unknown"))
    assert unknown.drafts["dflash"].trained_on_media is None
    with pytest.raises(DflashOnnxError, match="draft_media must be one of yes, no, unknown"):
        export(pair, "maybe", draft_media="maybe")
    with pytest.raises(DflashOnnxError, match="max_pixels"):
        export(pair, "low", max_pixels=100)


def test_several_drafters_share_a_target(pair: Path) -> None:
    """Taps are the union of what the drafters read, and each drafter keeps its own order.
    A bundle without drafter has no taps at all."""
    make_draft(pair / "second", pair / "target", taps=(3, 1), seed=7)
    drafts = (pair / "draft", pair / "second")
    bundle = export_bundle(ExportOptions(pair / "target", pair / "both", drafts))
    manifest = read_manifest(bundle)
    assert list(manifest.drafts) == ["dflash", "dflash-2"]
    assert manifest.tap_layers == (1, 2, 3)
    assert manifest.drafts["dflash-2"].target_layer_ids == (3, 1)
    self_check(bundle)
    alone = read_manifest(export(pair, "alone", draft=False))
    assert (alone.tap_layers, alone.drafts) == ((), {})


def test_target_digest_is_the_target(pair: Path) -> None:
    """It ties drafters to the weights they were exported with.
    A changed weight or config value changes it, a drafter more or less does not."""

    def digest(name: str, **options: Any) -> str:
        return read_manifest(export(pair, name, **options)).target_digest

    first = digest("first")
    assert digest("without", draft=False) == first
    edit_json(pair / "target/config.json", {"text_config.rms_norm_eps": 1e-5})
    second = digest("config")
    edit_tensors(pair / "target", lambda t: t["model.language_model.norm.weight"].fill(1))
    assert len({first, second, digest("weight")}) == 3


@pytest.mark.parametrize("mask_id", [495, 511, 500])
def test_any_mask_id_drafts(pair: Path, mask_id: int) -> None:
    """The mask is a row of the target's table, so the padding id (495), a spare row past the
    tokenizer (511) and a placeholder (500) all serve; the loop and the ban list do not mind."""
    edit_json(pair / "draft/config.json", {"dflash_config.mask_token_id": mask_id})
    model = Model(export(pair))
    message = [{"role": "user", "content": "Describe the river."}]
    plain = model.generate(message, draft="none", max_new_tokens=24).result()
    result = model.generate(message, draft="dflash", max_new_tokens=24).result()
    assert (result.token_ids, result.draft.state) == (plain.token_ids, "on")
    assert result.draft.drafted > 0


def test_manifest_roundtrip(pair: Path, tmp_path: Path) -> None:
    """What is written is what is read, optional values and nested ones too.
    Writing it again gives the same file."""
    make_draft(pair / "draft", pair / "target", layout="speculators", draft_vocab=96)
    bundle = export(pair)
    manifest = read_manifest(bundle)
    write_manifest(manifest, tmp_path)
    assert (tmp_path / "bundle.json").read_bytes() == (bundle / "bundle.json").read_bytes()
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 1}, ("format_version is 1", "reads 4")),
        ({"format_version": REMOVED}, ("format_version is None",)),
        ({"novelty": 1}, ("unknown key 'novelty'",)),
        ({"image.novelty": 1}, (".image", "unknown key 'novelty'")),
        ({"stop_ids": REMOVED}, ("missing key 'stop_ids'",)),
        ({"drafts.dflash.mask_token_id": REMOVED}, (".drafts.dflash", "'mask_token_id'")),
        ({"drafts.dflash.d2t": REMOVED}, ("missing key 'd2t'",)),
        ({"drafts.dflash.layers": [{"window": 4}]}, ("layers[0]", "missing key 'causal'")),
        ({"drafts.dflash.layers": {}}, ("layers", "a list")),
        ({"precision": 32}, (".precision", "32")),
        ({"num_top": "64"}, (".num_top", "'64'")),
        ({"num_top": True}, (".num_top", "True")),
        ({"tap_before_deepstack": 1}, (".tap_before_deepstack", "1")),
        ({"tap_layers": [1, "2"]}, (".tap_layers[1]", "'2'")),
        ({"image.mean": [0.5, 0.5]}, (".image.mean", "expected 3")),
        ({"target.text.rope": None}, (".target.text.rope", "an object")),
        ({"graphs.target.inputs": [{"name": "a", "dtype": "b", "shape": [1.5]}]}, ("shape[0]",)),
    ],
)
def test_manifest_is_read_strictly(pair: Path, changes: dict[str, Any], words: Any) -> None:
    """An unknown or missing key, another version, a value of another type, at any depth.
    Guessing here would run a bundle under rules it was not made for."""
    path = export(pair) / "bundle.json"
    path.write_text(json.dumps(changed(read(path), changes)), encoding="utf-8")
    with pytest.raises(ManifestError) as caught:
        read_manifest(path.parent)
    for word in ("bundle.json", *words):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "bundle.json").unlink(), ("bundle.json is missing", "export")),
        (lambda f: (f / "bundle.json").write_text("{"), ("bundle.json", "JSON")),
        (lambda f: (f / "bundle.json").write_text("[1]"), ("format_version",)),
        (lambda f: (f / "bundle.json").write_bytes(b"\xff"), ("bundle.json", "JSON")),
    ],
)
def test_damaged_manifest_file(
    pair: Path, damage: Callable[[Path], Any], words: tuple[str, ...]
) -> None:
    """A manifest that is gone, cut off, of another kind or not text.
    The message names the file and what makes a new one."""
    bundle = export(pair, draft=False)
    damage(bundle)
    with pytest.raises(ManifestError) as caught:
        read_manifest(bundle)
    for word in words:
        assert word in str(caught.value)
