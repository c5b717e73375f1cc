"""The warning before a large image: rows, seconds, and how to lower both."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support_images import make_image

from dflash_onnx.runtime import Model, cli_run
from dflash_onnx.runtime.estimate import prefill_seconds, text_work, vision_work


def test_work_grows_with_the_square_of_patches(tiny_model: Model) -> None:
    """Attention over all patches is what makes large images slow."""
    vision, text = tiny_model.manifest.target.vision, tiny_model.manifest.target.text
    few, many = vision_work(vision, 10_000), vision_work(vision, 40_000)
    assert 4 * few < many < 16 * few
    assert text_work(text, 100, 0) + text_work(text, 100, 100) == text_work(text, 200, 0)


def test_large_images_warn_once_on_stderr(
    make_bundle: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Above the limit the user learns rows and seconds before the wait; below, nothing."""
    model = Model(make_bundle())
    plan = model.plan("hi", [make_image(96, 160, 1)])
    assert prefill_seconds(model, plan) > 0
    cli_run._warn_about_size(model, plan)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli_run, "WARN_ROWS", 14)
    cli_run._warn_about_size(model, plan)
    warning = r"warning: the images take 15 rows; .* about \d+ s\. --max-pixels"
    assert re.match(warning, capsys.readouterr().err)
