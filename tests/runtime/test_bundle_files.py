"""A bundle's files: inside the folder, whole, of one export, and opened with clear errors.

Knows the files of a bundle and how people move them; a manifest at odds with itself is in
tests/models.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support_checkpoint import edit_json, read

from dflash_onnx.models.errors import ManifestError, ProviderError
from dflash_onnx.models.manifest import TableSpec, TensorSpec, read_manifest, write_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.bundle_files import map_table, open_bundle
from dflash_onnx.runtime.cli import main
from dflash_onnx.runtime.session import Runtime

FILES = (
    "bundle.json", "target.onnx", "dflash.block.onnx", "embedding.data", "dflash-2.data",
    "tokenizer.json", "chat_template.jinja",
)  # fmt: skip


@pytest.fixture
def bundle(make_bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a bundle with a plain drafter and one with a reduced head."""
    made = make_bundle(drafts=[{}, {"layout": "speculators", "draft_vocab": 96}])
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def refused(folder: Path, *words: str) -> None:
    """Loading fails with a `ManifestError` that has all the words."""
    with pytest.raises(ManifestError) as caught:
        Model(folder)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def replace_sidecar(folder: Path, name: str, content: bytes) -> None:
    """Change a small file and the manifest with it, as another exporter would have written it."""
    (folder / name).write_bytes(content)
    manifest = read_manifest(folder)
    data = replace(
        manifest.sidecars[name],
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    write_manifest(replace(manifest, sidecars={**manifest.sidecars, name: data}), folder)


def test_links_inside_and_a_linked_folder_load(bundle: Path, tmp_path: Path) -> None:
    """A folder may be a link, and so may a file whose content lies in the same folder."""
    for name in FILES:
        (bundle / name).rename(bundle / f"content of {name}")
        (bundle / name).symlink_to(f"content of {name}")
    (tmp_path / "link").symlink_to(bundle)
    Model(tmp_path / "link").generate("hi", max_new_tokens=2).result()


@pytest.mark.parametrize("name", FILES)
def test_links_that_lead_outside_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    """The cache of Hugging Face keeps files elsewhere and links to them.
    The message names the link, where it leads, and the copy that helps."""
    shutil.move(bundle / name, tmp_path / "blob")
    (bundle / name).symlink_to(tmp_path / "blob")
    refused(bundle, f"{bundle / name} leads to {tmp_path / 'blob'}", "cp -rL")


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "a\\b", "C:x", "..", "", "a\0b", "a\ud800"])
def test_names_that_are_no_plain_names_are_refused(bundle: Path, name: str) -> None:
    """A manifest from a stranger must not make us open files outside its folder."""
    manifest = read(bundle / "bundle.json")
    edits: list[dict[str, Any]] = [
        {"graphs": manifest["graphs"] | {"head": manifest["graphs"]["head"] | {"file": name}}},
        {
            "data_files": manifest["data_files"] | {name: manifest["data_files"]["embedding.data"]},
            "embedding.file": name,
        },
    ]
    for edit in edits:
        shutil.copy(bundle / "bundle.json", bundle / "saved")
        edit_json(bundle / "bundle.json", edit)
        refused(bundle, repr(name), "not a plain file name")
        shutil.move(bundle / "saved", bundle / "bundle.json")
    with pytest.raises(ManifestError, match="not a plain file name"):
        map_table(bundle, TableSpec(name, 0, "float32", (1,)))


def test_tables_lie_in_files_of_the_bundle(bundle: Path) -> None:
    """A table in a file without size and digest could be anything."""
    shutil.copy(bundle / "embedding.data", bundle / "spare.data")
    edit_json(bundle / "bundle.json", {"embedding.file": "spare.data"})
    refused(bundle, "embedding.file", "'spare.data'")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.mkdir(), "not a regular file"),
        (lambda p: os.mkfifo(p), "not a regular file"),
        (lambda p: p.symlink_to("nothing"), "not a regular file"),
        (lambda p: p.symlink_to(p.name), "not a regular file"),
        (lambda p: None, "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["bundle.json", "vision.onnx", "target.data", "tokenizer.json"])
def test_what_is_no_file_is_refused(
    bundle: Path, name: str, make: Callable[[Path], Any], words: str
) -> None:
    """A folder, a pipe (which would block for ever), a link to nothing or to itself."""
    (bundle / name).unlink()
    make(bundle / name)
    refused(bundle, str(bundle / name), words)


@pytest.mark.parametrize("name", ["head.onnx", "dflash.append.onnx", *FILES[-2:]])
def test_small_files_are_held_against_their_digests(bundle: Path, name: str) -> None:
    """One flipped bit in a file that is read at load is found there."""
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    refused(bundle, str(bundle / name), "digest", "Export the bundle again")


def test_info_verifies_the_weights(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit of a large file costs too much to find at load; `info` finds it."""
    assert main(["info", str(bundle)]) == 0
    assert "\nweights    verified\n" in capsys.readouterr().out
    assert main(["info", str(bundle), "--json"]) == 0
    assert '"weights": "verified"' in capsys.readouterr().out
    content = bytearray((bundle / "target.data").read_bytes())
    content[4096] ^= 1
    (bundle / "target.data").write_bytes(content)
    Model(bundle)
    for arguments in ([], ["--json"]):
        assert main(["info", str(bundle), *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == "" and "target.data" in err and "digest" in err


def test_tokenizer_is_the_manifests(bundle: Path) -> None:
    """Another tokenizer would turn ids into other words."""
    edit_json(bundle / "bundle.json", {"tokenizer_size": 503})
    refused(bundle, "tokenizer.json", "504", "503")


def test_template_that_is_not_text(bundle: Path) -> None:
    """A template in another encoding is said to be that."""
    replace_sidecar(bundle, "chat_template.jinja", b"{{ messages }} \xff")
    refused(bundle, "chat_template.jinja", "not UTF-8", "byte 15")


def test_ids_of_a_reduced_head_are_token_ids(bundle: Path) -> None:
    """The file with the table has the right size, so only its content shows the damage."""
    table = read_manifest(bundle).drafts["dflash-2"].d2t
    assert table is not None
    with (bundle / table.file).open("r+b") as file:
        file.seek(table.offset)
        file.write(np.int64(512).tobytes())
    refused(bundle, table.file, "'dflash-2'", "512", "0 to 511")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (TensorSpec("hidden", "float32", ("rows", 32)), ("'rows', 32]", "'rows', 64]")),
        (TensorSpec("hidden", "float16", ("rows", 64)), ("is float32", "float16")),
        (TensorSpec("hidden", "float32", (1, 64)), ("[1, 64]",)),
        (TensorSpec("hidden", "float32", ("rows",)), ("['rows']",)),
        (TensorSpec("hiding", "float32", ("rows", 64)), ("'hidden'", "not there")),
    ],
)
def test_graph_and_manifest_agree_in_every_size(
    bundle: Path, changed: TensorSpec, words: tuple[str, ...]
) -> None:
    """A graph of another export with the same names would run, and give nonsense."""
    spec = open_bundle(bundle).graphs["head"]
    with pytest.raises(ManifestError) as caught:
        Runtime(bundle, "cpu").open(replace(spec, inputs=(changed, *spec.inputs[1:])))
    message = str(caught.value)
    assert "head.onnx: input 'hid" in message
    for word in words:
        assert word in message


def test_names_of_symbolic_dimensions_are_free(bundle: Path) -> None:
    """ONNX Runtime may name them in its own way."""
    spec = open_bundle(bundle).graphs["head"]
    renamed = replace(spec.inputs[0], shape=("anything", 64))
    Runtime(bundle, "cpu").open(replace(spec, inputs=(renamed, *spec.inputs[1:])))


@pytest.mark.parametrize(
    ("error", "kind"),
    [("Fail", ManifestError), ("InvalidGraph", ManifestError), ("EPFail", ProviderError),
     ("NotImplemented", ProviderError), ("RuntimeException", ProviderError)],
)  # fmt: skip
def test_failures_are_of_files_or_of_the_provider(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, error: str, kind: type[Exception]
) -> None:
    """Exporting again does not help against a missing kernel, nor another provider against a
    damaged file."""
    library = getattr(onnxruntime.capi.onnxruntime_pybind11_state, error)

    def fail(*arguments: Any, **options: Any) -> None:
        raise library("first line\nsecond line")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(kind, match=r"head\.onnx .*first line\. [^\n]*$"):
        Runtime(bundle, "cpu").open(open_bundle(bundle).graphs["head"])


def test_weights_that_a_graph_cannot_read(bundle: Path) -> None:
    """The graph names its weight files itself; ONNX Runtime's words are passed on."""
    spec = open_bundle(bundle).graphs["head"]
    (bundle / "embedding.data").unlink()
    with pytest.raises(ManifestError, match=r"head\.onnx cannot be loaded"):
        Runtime(bundle, "cpu").open(spec)
