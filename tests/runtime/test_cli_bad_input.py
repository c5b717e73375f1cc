"""What people really send: every bad image and checkpoint is one clear line and exit code 1."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support_images import make_image
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.runtime.cli import main


def _png(size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, "PNG")
    return stream.getvalue()


def _jpeg_without_its_end() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(make_image(256, 256, 3)).save(stream, "JPEG")
    return stream.getvalue()[:-1280]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.png", b"", "empty"),
        ("text.png", b"this is text", "image"),
        ("cut.jpg", _jpeg_without_its_end(), "truncated"),
        ("bomb.png", _png((20000, 20000), "1"), "400000000 pixels"),
        ("thin.png", _png((1093, 5)), "218.6"),
        ("movie.mp4", b"\0\0\0 ftypisom", "image"),
    ],
    ids=["empty", "text", "cut", "bomb", "thin", "movie"],
)
def test_bad_images_are_named(
    make_bundle: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    reason: str,
) -> None:
    """One bad file names itself and the reason; nothing is printed on stdout."""
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["run", str(make_bundle()), "hi", "--image", str(path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert name in err and reason in err


def _edit(path: Path, **changes: object) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


def _break_checkpoint(folder: Path, how: str) -> None:
    target, draft = folder / "target", folder / "draft"
    breaks: dict[str, Callable[[], object]] = {
        "family": lambda: _edit(target / "config.json", architectures=["MistralForCausalLM"]),
        "no config": lambda: (target / "config.json").unlink(),
        "no weights": lambda: (target / "model.safetensors").unlink(),
        "no tokenizer": lambda: (target / "tokenizer.json").unlink(),
        "no processor": lambda: (target / "preprocessor_config.json").unlink(),
        "cut weights": lambda: (target / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{"),
        "no mask": lambda: _edit(draft / "config.json", dflash_config={"target_layer_ids": [1]}),
        "no taps": lambda: _edit(draft / "config.json", dflash_config={"mask_token_id": 5}),
        "EAGLE": lambda: _edit(draft / "config.json", architectures=["LlamaForCausalLMEagle3"]),
    }
    breaks[how]()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("family", "'MistralForCausalLM' are not supported (supported: Qwen3VLForConditional"),
        ("no config", "config.json is missing"),
        ("no weights", "neither model.safetensors nor model.safetensors.index.json"),
        ("no tokenizer", "tokenizer.json is missing"),
        ("no processor", "preprocessor_config.json is missing"),
        ("cut weights", "model.safetensors is not a readable safetensors file"),
        ("no mask", "has no 'mask_token_id'"),
        ("no taps", "has no 'target_layer_ids'"),
        ("EAGLE", "'LlamaForCausalLMEagle3' are not supported yet"),
    ],
)
def test_bad_checkpoints_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    """An export that cannot work says which file and key, and leaves nothing behind."""
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft", tmp_path / "target")
    _break_checkpoint(tmp_path, how)
    arguments = ["--draft", str(tmp_path / "draft"), "-o", str(tmp_path / "bundle")]
    assert main(["export", str(tmp_path / "target"), *arguments]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert {p.name for p in tmp_path.iterdir()} == {"target", "draft"}


@pytest.mark.parametrize("option", ["--precision", "--head-precision", "--draft-precision"])
@pytest.mark.parametrize(("value", "words"), [("bf16", "fp16"), ("fp64", "fp32, fp16, int4")])
def test_other_precisions_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, words: str
) -> None:
    """A precision this version does not write is refused, never replaced by another."""
    make_target(tmp_path / "target")
    command = ["export", str(tmp_path / "target"), "-o", str(tmp_path / "b")]
    assert main([*command, option, value]) == 1
    error = capsys.readouterr().err
    assert option in error and value in error and words in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Stopped in the middle of the weights, the process removes its temporary folder."""
    make_target(tmp_path / "target", vocab=4096, hidden=512, heads=8, kv_heads=4, mlp=4096)
    code = "import sys; from dflash_onnx.runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["export", str(tmp_path / "target"), "-o", str(tmp_path / "bundle")]
    process = subprocess.Popen([sys.executable, "-c", code, *command], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".bundle.partial-*/*.data")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(60) != 0
    assert {p.name for p in tmp_path.iterdir()} == {"target"}
