"""Huge pages: which memory is meant, and that moving it keeps every byte."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
from support_prompts import BundleMaker

from dflash_onnx.runtime import Model, huge_pages
from dflash_onnx.runtime.huge_pages import PAGE, without

LINUX = sys.platform == "linux"


def test_ranges_less_others() -> None:
    """Overlaps on either side, in the middle and over the whole; what touches stays."""
    assert without([(10, 20)], [(0, 12), (18, 30)]) == [(12, 18)]
    assert without([(10, 20), (40, 50)], [(14, 16)]) == [(10, 14), (16, 20), (40, 50)]
    assert without([(10, 20)], [(5, 25)]) == []
    assert without([(10, 20)], [(0, 10), (20, 30)]) == [(10, 20)]


@pytest.mark.skipif(not LINUX, reason="nothing to move elsewhere")
def test_moved_memory_keeps_what_it_holds() -> None:
    """Several pages of random bytes, found among the process's ranges, are the same afterwards."""
    before = huge_pages.mapped_memory()
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE)
    values = np.frombuffer(memory, np.uint8)
    values[:] = np.random.default_rng(0).integers(0, 256, values.size)
    wanted = values.tobytes()
    new = without(huge_pages.mapped_memory(), before)
    assert sum(stop - start for start, stop in new) >= values.size
    assert 0 <= huge_pages.move(new) <= sum(stop - start for start, stop in new)
    assert values.tobytes() == wanted


def test_a_range_that_is_not_there_is_no_error() -> None:
    """Another thread may have given it back in between."""
    assert huge_pages.move([(1 << 46, (1 << 46) + 4 * PAGE)]) == 0


def test_answers_do_not_depend_on_pages(
    make_bundle: BundleMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel that refuses, the same text."""
    bundle = make_bundle()
    moved = Model(bundle, threads=1).generate("Hello", max_new_tokens=8).result()
    monkeypatch.setattr(huge_pages, "mapped_memory", list)
    monkeypatch.setattr(huge_pages, "heap", list)
    assert Model(bundle, threads=1).generate("Hello", max_new_tokens=8).result().text == moved.text
