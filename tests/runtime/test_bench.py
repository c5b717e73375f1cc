"""The acceptance table: every setting is run, every answer compared, intervals make sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support_images import make_image

from dflash_onnx.runtime import Model
from dflash_onnx.runtime.bench_holes import PHASES, Prompt, Sample, Setting, measure, settings
from dflash_onnx.runtime.bench_table import best_policy, markdown, tabulate, to_json
from dflash_onnx.runtime.cli import main
from dflash_onnx.runtime.drafters.policy import HolePolicy


def test_every_setting_is_measured_and_equal(tiny_model: Model) -> None:
    """Random weights accept nothing, but every answer must equal the plain one."""
    prompts = [Prompt("hello", ()), Prompt("what", (make_image(96, 160, 1),))]
    chosen = list(settings(tiny_model, HolePolicy))
    assert len(chosen) == 1 + 5 + 3, "lookup, five policies, three with the bug"
    table = tabulate(measure(tiny_model, prompts, chosen, 40, lambda: None))
    assert table.num_different == 0 and len(table.cells) == len(chosen)
    for phases in table.cells.values():
        assert set(phases) == set(PHASES)
        assert all(c.low <= c.mean <= c.high for c in phases.values())


def test_phases_split_at_the_right_token(tiny_model: Model) -> None:
    """The first 32 output tokens after an image are a phase of their own."""
    prompts = [Prompt("what", (make_image(96, 160, 1),))]
    samples = list(measure(tiny_model, prompts, [Setting("lookup", None)], 40, lambda: None))
    tokens = {s.phase: s.tokens for s in samples}
    # The first of 40 tokens comes from prefill and belongs to no round.
    assert tokens["image, first 32"] + tokens["image, later"] == 39
    assert tokens["image, first 32"] >= 32 and tokens["reused prefix"] == 39


def test_means_weigh_calls_not_prompts() -> None:
    """Tokens per call over all calls, and an interval that holds it."""
    setting = Setting("d", HolePolicy.SEED)
    few, many = Sample(setting, PHASES[1], 1, 8, True), Sample(setting, PHASES[1], 9, 12, True)
    bug = Sample(Setting("d", HolePolicy.GAP, at_token_count=True), PHASES[1], 1, 9, True)
    table = tabulate([few, many, bug, Sample(setting, PHASES[2], 0, 0, False)])
    cell = table.cells[setting][PHASES[1]]
    assert cell.mean == pytest.approx(2.0) and cell.low < 2 < cell.high
    assert (table.num_answers, table.num_different) == (4, 1)
    assert best_policy(table, "d") == "seed", "a row with the bug is no candidate"
    assert "| d | gap | token count |" in markdown(table)
    assert {r["policy"] for r in to_json(table)["rows"]} == {"seed", "gap"}


def test_the_command(make_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """`bench BUNDLE --holes all` prints the table, `--json` the same for machines."""
    prompts = ["--prompts", "2", "--max-new-tokens", "4"]
    command = ["bench", str(make_bundle()), "--holes", "all", *prompts]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| drafter | holes |") and "answers equal the plain run" in err
    assert main([*command, "--holes", "gap", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["different"] == 0 and facts["prompts"] == 2
    assert main([*command[:4], "--prompts", "0"]) == 1


def test_prompts_are_held_out() -> None:
    """The same seed gives the same prompts; pages are uint8 pictures."""
    from dflash_onnx.runtime.cli_bench import held_out

    first, again = held_out(3, 5), held_out(3, 5)
    assert [p.text for p in first] == [p.text for p in again]
    for prompt, other in zip(first, again, strict=True):
        for image, same in zip(prompt.images, other.images, strict=True):
            assert image.dtype == np.uint8 and np.array_equal(image, same)


def test_speed(make_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """`bench BUNDLE` alternates plain and speculative runs; synthetic acceptance 1 keeps whole
    blocks, and the JSON says what is needed to compare."""
    sizes = ["--prompt-tokens", "20", "--new-tokens", "17", "--repeats", "2"]
    command = ["bench", str(make_bundle()), *sizes]
    assert main([*command, "--synthetic-acceptance", "1", "--json", "--threads", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["speculative"]["tokens_per_round"] == 8 and report["draft"] == "dflash"
    assert report["plain"]["tokens_per_round"] == 1 and report["provider"]["threads"] == 1
    assert report["prompt_digest"] and report["target_digest"]
    assert 0 < report["plain"]["network_ms"] < report["plain"]["round_ms"]
    assert main([*command, "--draft", "lookup", "--draft-tokens", "auto"]) == 0
    assert "speed-up" in capsys.readouterr().out
    assert main([*command, "--synthetic-acceptance", "2"]) == 1
