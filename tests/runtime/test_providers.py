"""ONNX Runtime as it is installed on people's machines: none, two builds, missing providers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_onnx.models.errors import ManifestError, ProviderError
from dflash_onnx.models.manifest import read_manifest
from dflash_onnx.runtime import Model
from dflash_onnx.runtime.providers import check_distributions, num_threads, provider_name
from dflash_onnx.runtime.session import Runtime


def test_no_build_installed_says_what_to_install() -> None:
    """A fresh `pip install dflash-onnx` without an extra has no ONNX Runtime."""
    with pytest.raises(ProviderError, match=r"pip install 'dflash-onnx\[cpu\]'"):
        check_distributions([])


def test_two_builds_are_named() -> None:
    """Two wheels overwrite each other and hide CUDA (onnxruntime#26996)."""
    with pytest.raises(ProviderError, match="onnxruntime, onnxruntime-gpu"):
        check_distributions(["onnxruntime", "onnxruntime-gpu"])
    check_distributions(["onnxruntime-gpu"])


def test_unknown_provider_lists_the_known() -> None:
    """A provider that this version cannot run on is refused, not replaced by CPU."""
    with pytest.raises(ProviderError, match="'cuda' is not supported.*cpu"):
        provider_name("cuda")


def test_a_provider_that_fell_back_is_an_error(
    make_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime#23372: asked for a GPU, libraries missing, the session runs on CPU in silence."""
    bundle = make_bundle()
    runtime = Runtime(bundle, "cpu")
    monkeypatch.setattr(runtime, "provider_name", "OtherExecutionProvider")
    with pytest.raises((ProviderError, ManifestError), match="OtherExecutionProvider"):
        runtime.open(read_manifest(bundle).graphs["head"])


def test_threads_follow_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container limited to one CPU gets one thread (onnxruntime#8313)."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3}, raising=False)
    assert num_threads() == 1


def test_loading_is_quiet(make_bundle: Callable[..., Path], capfd: Any, caplog: Any) -> None:
    """A library prints and logs nothing of its own accord."""
    with caplog.at_level("INFO"):
        Model(make_bundle()).generate("hello", max_new_tokens=3).result()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_the_recurrence_is_portable_where_its_kernel_is_missing(
    make_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider without LinearAttention gets the form made of matrix products, by itself."""
    bundle = make_bundle(target={"architecture": "Qwen3_5ForConditionalGeneration"}, drafts=[])
    fused = Model(bundle)
    monkeypatch.setattr("dflash_onnx.runtime.model.LINEAR_ATTENTION", ())
    portable = Model(bundle)
    assert "target.portable" in portable.clocks() and "target.portable" not in fused.clocks()
    answers = [m.generate("hi", max_new_tokens=8).result().token_ids for m in (fused, portable)]
    assert answers[0] == answers[1]
