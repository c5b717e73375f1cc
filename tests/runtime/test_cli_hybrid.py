"""The command line with hybrid and text-only bundles: drafts, odd pictures, errors, statistics.

Knows options and output; that drafters agree over many settings is tested apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support_checkpoint import edit_tensors
from tiny_checkpoint import make_draft, make_target

from dflash_onnx.runtime.cli import main

Run = Callable[..., tuple[int, str, str]]
HYBRID = {"architecture": "Qwen3_5ForConditionalGeneration", "mtp": True}
TEXT = {"architecture": "Qwen3ForCausalLM"}
SELECTOR = {
    "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 6,
}  # fmt: skip
SHORT = ("--max-new-tokens", "10")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def hybrid(make_bundle: Callable[..., Path]) -> Path:
    """A hybrid bundle with a DFlash, a DFlash2 and the MTP drafter."""
    return make_bundle(target=HYBRID, drafts=[{}, SELECTOR])


@pytest.fixture
def text(make_bundle: Callable[..., Path]) -> Path:
    """A text-only bundle without drafters."""
    return make_bundle(target=TEXT, drafts=[])


def refused(run: Run, words: tuple[str, ...], *arguments: object) -> None:
    """Exit code 1, nothing on stdout and one line with all the words on stderr."""
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (1, "", 1) and err.startswith("dflash-onnx: ")
    for word in words:
        assert word in err, f"{word!r} is not in: {err}"


@pytest.mark.parametrize("tokens", [0, 1, 3, 15])
def test_mtp_drafts_as_many_as_asked(run: Run, hybrid: Path, tokens: int) -> None:
    """From none to the most; the answer is the plain run's."""
    plain = json.loads(run("run", hybrid, "hello", "--draft", "none", "--json", *SHORT)[1])
    arguments = ("--draft", "mtp", "--draft-tokens", tokens, "--json", *SHORT)
    code, out, err = run("run", hybrid, "hello", *arguments)
    result = json.loads(out)
    assert (code, err, result["token_ids"]) == (0, "", plain["token_ids"])
    assert result["draft"]["name"] == "mtp" and result["draft"]["state"] == "on"
    assert (result["draft"]["drafted"] > 0) is (tokens > 0)
    assert (result["memory"]["draft_bytes"] > 0) is (tokens > 0)


@pytest.mark.parametrize(
    ("size", "mode", "chunk"),
    [((1, 1), "RGB", 1), ((3000, 20), "RGB", 7), ((33, 70), "L", 1), ((33, 70), "RGBA", 512)],
)
def test_odd_pictures(
    run: Run, hybrid: Path, tmp_path: Path, size: tuple[int, int], mode: str, chunk: int
) -> None:
    """A single pixel, a strip, grey and transparent ones: every drafter gives the plain answer,
    however the prompt is cut."""
    Image.new(mode, size, 77).save(tmp_path / "odd.png")
    command = ("run", hybrid, "hello", "--image", tmp_path / "odd.png", *SHORT)
    code, plain, err = run(*command, "--draft", "none")
    assert (code, err) == (0, "") and len(plain) > 3
    for draft in ("lookup", "mtp", "dflash", "dflash2"):
        assert run(*command, "--draft", draft, "--chunk", chunk) == (0, plain, ""), draft


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draft-tokens", "16"), ("between 0 and 15", "MTP head", "not 16")),
        (("--draft-tokens", "-1"), ("between 0 and 15", "not -1")),
        (("--holes", "gap"), ("holes='gap'", "no meaning for drafter 'mtp'")),
        (("--hole-rows", "3"), ("hole_rows=3", "no meaning for drafter 'mtp'")),
    ],
)
def test_mtp_options_that_mean_nothing(
    run: Run, hybrid: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Too many drafts, and policies for holes that this drafter does not have."""
    refused(run, words, "run", hybrid, "hello", "--draft", "mtp", *arguments)


def test_info_and_statistics_of_a_hybrid(run: Run, hybrid: Path) -> None:
    """The recurrent state and the built-in head are among the facts."""
    code, out, _ = run("info", hybrid)
    assert code == 0 and "3 Gated DeltaNet layers" in out and "no DeepStack" in out
    assert "mtp: the target's own head" in out and "verified" in out
    _, _, stats = run("run", hybrid, "hello", "--draft", "mtp", "--stats", *SHORT)
    for words in ("target    ", " calls in ", "memory    keys", "recurrent state", "draft cache"):
        assert words in stats
    result = json.loads(run("run", hybrid, "hello", "--json", *SHORT)[1])
    assert result["draft"]["name"] == "dflash", "the first of the bundle"
    assert result["memory"]["state_bytes"] > 0 and result["timings"]["target_calls"] > 0


def test_export_of_two_drafters_says_all_names(run: Run, tmp_path: Path) -> None:
    """The built-in head is a drafter like the others."""
    make_target(tmp_path / "target", **HYBRID)
    for name, options in (("one", {}), ("two", SELECTOR)):
        make_draft(tmp_path / name, tmp_path / "target", **options)
    drafts = ("--draft", tmp_path / "one", "--draft", tmp_path / "two")
    code, out, _ = run("export", tmp_path / "target", *drafts, "-o", tmp_path / "b", "--json")
    assert code == 0 and json.loads(out)["drafts"] == ["dflash", "dflash2", "mtp"]


def _drop_mtp(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]


def test_a_lost_head_is_explained(run: Run, tmp_path: Path) -> None:
    """A checkpoint saved by transformers: `info` says why there is no MTP drafter.
    Asking for it names what there is."""
    make_target(tmp_path / "target", **HYBRID)
    edit_tensors(tmp_path / "target", _drop_mtp)
    code, out, err = run("export", tmp_path / "target", "-o", tmp_path / "b")
    assert (code, out) == (0, "") and "drafters: none" in err
    _, out, _ = run("info", tmp_path / "b")
    assert "mtp: not in the bundle: the checkpoint was saved without its mtp.* tensors" in out
    words = ("no drafter 'mtp'", "choose one of none, lookup.")
    refused(run, words, "run", tmp_path / "b", "hi", "--draft", "mtp")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--image", "missing.png"), ("text-only model", "reads no pictures")),
        (("--max-pixels", "65536"), ("text-only model", "--max-pixels")),
        (("--draft", "mtp"), ("no drafter 'mtp'", "none, lookup")),
        (("--draft", "dflash"), ("no drafter 'dflash'", "none, lookup")),
    ],
)
def test_text_only_refusals(
    run: Run, text: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """What needs a tower or a drafter that is not there."""
    refused(run, words, "run", text, "hello", *arguments)


def test_text_only_commands(run: Run, text: Path) -> None:
    """`info`, `run --stats` and `run --json` work without a tower, a state or a drafter."""
    code, out, _ = run("info", text)
    assert code == 0 and "vision     none: a text-only model" in out
    assert "Gated DeltaNet" not in out and "mtp" not in out
    code, answer, stats = run("run", text, "<|image_pad|> hello", "--stats", *SHORT)
    assert code == 0 and " calls in " in stats and "recurrent state 0.00 MB" in stats
    result = json.loads(run("run", text, "<|image_pad|> hello", "--json", *SHORT)[1])
    assert result["text"] + "\n" == answer and result["draft"]["name"] == "none"
    assert result["memory"]["state_bytes"] == result["memory"]["snapshot_bytes"] == 0
