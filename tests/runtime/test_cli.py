"""The command line as a user meets it: exit codes, one clear line, stdout and stderr apart."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support_images import make_image

from dflash_onnx.runtime.cli import build_parser, main

ROOT = Path(__file__).parent.parent.parent
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def bundle(make_bundle: Callable[..., Path]) -> Path:
    """The tiny bundle."""
    return make_bundle()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A small picture in a file."""
    path = tmp_path / "photo.png"
    Image.fromarray(make_image(96, 160, 1)).save(path)
    return path


def test_run_prints_text_alone_on_stdout(run: Run, bundle: Path, photo: Path) -> None:
    """Text goes to stdout, statistics to stderr, so that output can be piped."""
    command = ("run", bundle, "hello", "--image", photo, "--max-new-tokens", "12")
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    again, with_stats, stats = run(*command, "--stats")
    assert (again, with_stats) == (0, out)
    assert "tokens per target call" in stats


def test_json_has_the_documented_shape(run: Run, bundle: Path, photo: Path) -> None:
    """Machines read one object; counts agree with the ids."""
    code, out, _ = run("run", bundle, "hello", "--image", photo, "--json", "--max-new-tokens", "9")
    result = json.loads(out)
    assert code == 0
    assert set(result) == {
        "text", "token_ids", "finish_reason", "usage", "draft", "timings", "memory", "provider",
    }  # fmt: skip
    draft = result["draft"]
    assert result["usage"]["output_tokens"] == len(result["token_ids"]) == 9
    # The token sampled from prefill belongs to no round.
    assert sum(draft["tokens_per_round"]) == 8
    assert draft["drafted"] > 0 and draft["skipped_spans"] == 1 and len(draft["holes"]) == 1


def test_trace_holds_every_round(run: Run, bundle: Path, photo: Path, tmp_path: Path) -> None:
    """People who debug acceptance read the drafted ids of each round."""
    trace = tmp_path / "trace.jsonl"
    arguments = ("--image", photo, "--trace", trace, "--json", "--max-new-tokens", "9")
    _, out, _ = run("run", bundle, "hello", *arguments)
    rounds = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [r["produced"] for r in rounds] == json.loads(out)["draft"]["tokens_per_round"]
    assert rounds[0]["hole"] == json.loads(out)["draft"]["holes"][0]
    assert all(r["hole"] is None for r in rounds[1:])
    assert rounds[0]["block_start"] < rounds[0]["rows"], "positions lag rows after an image"


def test_prompt_from_stdin(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` and a missing prompt read stdin; the final newline of echo is no part of it."""
    expected = run("run", bundle, "hello", "--max-new-tokens", "5")[1]
    for arguments in (("-",), ()):
        stdin = io.TextIOWrapper(io.BytesIO(b"hello\n"))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("run", bundle, *arguments, "--max-new-tokens", "5")[1] == expected


def test_streaming_on_a_terminal_prints_the_same(
    run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming is the same loop, printed as it goes."""
    expected = run("run", bundle, "hello", "--max-new-tokens", "9")[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run("run", bundle, "hello", "--max-new-tokens", "9")[1] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hi", "--draft", "eagle"), "no drafter 'eagle'; choose one of none, lookup, dflash"),
        (("hi", "--holes", "zeros"), "hole policy 'zeros' is unknown; choose one of seed"),
        (("hi", "--draft", "none", "--holes", "gap"), "no meaning for drafter 'none'"),
        (("hi", "--draft-tokens", "8"), "between 0 and 7"),
        (("hi", "--hole-rows", "-1"), "hole_rows must be a whole number of 0 or more"),
        (("hi", "--temperature", "-1"), "temperature"),
        (("hi", "--top-p", "0"), "top_p"),
        (("hi", "--seed", "-3"), "rng_seed"),
        (("hi", "--chunk", "0"), "chunk must be a whole number of 1 or more"),
        (("hi", "--max-new-tokens", "-1"), "max_new_tokens must be a whole number of 0 or more"),
        (("hi", "--stop", ""), "stop must be"),
        (("hi", "--accept", "maybe"), "accept must be equal or rejection"),
        (("hi", "--provider", "cuda"), "provider 'cuda' is not supported by this version"),
        (("hi", "--image", "missing.png"), "missing.png"),
        (("hi", "--image", "."), "'.'"),
        (("hi", "--max-pixels", "1"), "max_pixels"),
        (("hi", "--trace", "no/such/folder/t.jsonl"), "no/such/folder/t.jsonl"),
        (("word " * 6000,), "but the context limit is 4096"),
    ],
)
def test_bad_requests_are_one_line(
    run: Run, bundle: Path, arguments: tuple[str, ...], message: str
) -> None:
    """Whatever is wrong with a request is one clear line and exit code 1, with no output."""
    code, out, err = run("run", bundle, *arguments)
    assert (code, out) == (1, "")
    assert message in err and err.startswith("dflash-onnx: ") and err.count("\n") == 1


def _damage(name: str) -> Callable[[Path], None]:
    damages: dict[str, Callable[[Path], None]] = {
        "no manifest": lambda b: (b / "bundle.json").unlink(),
        "no graph": lambda b: (b / "target.onnx").unlink(),
        "no data": lambda b: (b / "target.data").unlink(),
        "no tokenizer": lambda b: (b / "tokenizer.json").unlink(),
        "no template": lambda b: (b / "chat_template.jinja").unlink(),
        "short data": lambda b: (b / "vision.data").write_bytes(b"x"),
        "bad graph": lambda b: (b / "head.onnx").write_bytes(b"not onnx"),
        "bad manifest": lambda b: (b / "bundle.json").write_text("{"),
        "other graph": lambda b: shutil.copy(b / "head.onnx", b / "dflash.block.onnx"),
    }
    return damages[name]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("no manifest", "bundle.json"),
        ("no graph", "target.onnx"),
        ("no data", "target.data"),
        ("no tokenizer", "tokenizer.json"),
        ("no template", "chat_template.jinja"),
        ("short data", "vision.data"),
        ("bad graph", "head.onnx"),
        ("bad manifest", "bundle.json"),
        ("other graph", "dflash.block.onnx"),
    ],
)
def test_damaged_bundles_name_the_file(
    run: Run, bundle: Path, tmp_path: Path, damage: str, named: str
) -> None:
    """A file that is missing or damaged is named, in one line (onnxruntime-genai#525, #1825)."""
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    _damage(damage)(copy)
    code, out, err = run("run", copy, "hi")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert named in err


def test_a_graph_path_is_not_a_bundle(run: Run, bundle: Path, tmp_path: Path) -> None:
    """People pass the .onnx file or a folder without a bundle; both say what to give."""
    for path in (bundle / "target.onnx", tmp_path, tmp_path / "nothing"):
        code, _, err = run("info", path)
        assert code == 1 and "bundle" in err


def test_usage_errors_exit_with_2(run: Run) -> None:
    """Wrong usage is the parser's business."""
    for arguments in ((), ("run",), ("fly",), ("run", "b", "x", "--no-such-option")):
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        assert stopped.value.code == 2


def test_info_says_what_is_inside(run: Run, bundle: Path) -> None:
    """Limits, windows and costs are visible before anything is run."""
    code, out, _ = run("info", bundle)
    assert code == 0
    for fact in ("context    4096 rows", "at most 256 rows", "block 8", "holes: seed", "DeepStack"):
        assert fact in out
    manifest = json.loads(run("info", bundle, "--json")[1])
    assert manifest["drafts"]["dflash"]["block_size"] == 8


def test_readme_and_parser_name_the_same_options() -> None:
    """An option that the README does not explain, or explains and does not exist, is a bug."""
    readme = (ROOT / "README.md").read_text()
    actions = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    known = {o for p in actions.values() for a in p._actions for o in a.option_strings}
    ours = {o for o in known if o.startswith("--")} - {"--help", "--output"}
    section = readme[readme.index("## Export and run") : readme.index("## Use it in Python")]
    assert ours == set(re.findall(r"--[a-z][a-z-]+", section))
