"""Position arithmetic against tables and against naive counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_onnx.models.grid import Grid
from dflash_onnx.models.positions import (
    Hole,
    Ints,
    Position,
    Row,
    Span,
    advancing_positions,
    block_positions,
    image_positions,
    index_ruler,
    is_pinned,
    next_position,
    seed_positions,
    text_ruler,
    visible_block,
    visible_context,
)

BIG_IMAGE = image_positions(Position(8), Grid(20, 30, 2))
SPANS = {
    "pinned, 2 rows": (image_positions(Position(8), Grid(4, 2, 2)), True),
    "pinned, 1 row": (image_positions(Position(8), Grid(2, 2, 2)), False),
    "sound": (advancing_positions(Position(8), 5), False),
    "sound, 1 row": (advancing_positions(Position(8), 1), False),
    "text": (advancing_positions(Position(0), 40), False),
    "big image": (BIG_IMAGE, True),
    "slice of a big image": (BIG_IMAGE[:, 40:60], True),
    "last row of a big image": (BIG_IMAGE[:, -1:], False),
    "steps backwards": (np.array([[3, 4, 4, 5]] * 3), True),
    "jumps ahead": (np.array([[3, 9, 70]] * 3), False),
}


@pytest.mark.parametrize("name", SPANS)
def test_pinned(name: str) -> None:
    """Skipped iff several rows do not advance, whatever rope a model has (llama.cpp#28587)."""
    positions, pinned = SPANS[name]
    assert is_pinned(positions) is pinned


def test_image_positions() -> None:
    """t stays, h and w count the merged grid: what Qwen3-VL was trained with."""
    positions = image_positions(Position(10), Grid(4, 6, 2))
    assert positions.tolist() == [
        [10, 10, 10, 10, 10, 10],
        [10, 10, 10, 11, 11, 11],
        [10, 11, 12, 10, 11, 12],
    ]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (image_positions(Position(53), Grid(32, 94, 2)), 100),
        (image_positions(Position(53), Grid(94, 32, 2)), 100),
        (image_positions(Position(7), Grid(2, 2, 2)), 8),
        (image_positions(Position(0), Grid(94, 62, 2)), 47),
        (advancing_positions(Position(5), 9), 14),
        (np.zeros((3, 0), np.int64), 0),
    ],
)
def test_next_position(positions: Ints, expected: int) -> None:
    """752 rows at 53, and text resumes at 100: p + max(h, w), not p + 1 (llama.cpp#27408)."""
    assert next_position(positions) == expected


def lay_out(pieces: list[tuple[int, int]]) -> Ints:
    """M-RoPE positions [3, n] of text runs (n, 0) and images (h, w), laid out one by one."""
    parts: list[Ints] = [np.zeros((3, 0), np.int64)]
    for height, width in pieces:
        start = next_position(np.concatenate(parts, axis=1))
        parts.append(
            image_positions(start, Grid(2 * height, 2 * width, 2))
            if width
            else advancing_positions(start, height)
        )
    return np.concatenate(parts, axis=1)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1), st.integers(1, 16))
def test_block_starts_after_everything(pieces: list[tuple[int, int]], num_rows: int) -> None:
    """Drafts at the token count after media were accepted 2 % of the time (llama.cpp#28715)."""
    positions = lay_out(pieces)
    counted = sum(max(h, w) if w else h for h, w in pieces)
    block = block_positions(next_position(positions), num_rows)
    assert block[0] == positions.max() + 1 == counted
    assert np.array_equal(block, counted + np.arange(num_rows))
    assert (np.diff(text_ruler(positions)) >= 0).all()


@given(st.lists(st.integers(1, 50), min_size=1))
def test_text_alone_is_the_token_count(runs: list[int]) -> None:
    """Without media, rows, positions and tokens count alike, which is how the bug hid."""
    positions = lay_out([(n, 0) for n in runs])
    total = sum(runs)
    assert np.array_equal(text_ruler(positions), index_ruler(Row(0), total))
    assert next_position(positions) == total


@pytest.mark.parametrize(
    ("hole", "most", "expected"),
    [
        (Hole(Position(12), Position(20)), 512, list(range(12, 20))),
        (Hole(Position(0), Position(2000)), 63, list(range(1937, 2000))),
        (Hole(Position(5), Position(9)), 0, []),
        (Hole(Position(5), Position(5)), 9, []),
    ],
)
def test_seed_positions(hole: Hole, most: int, expected: list[int]) -> None:
    """A hole of any width is bounded work: its last rows only (llama.cpp#18039)."""
    assert seed_positions(hole, most).tolist() == expected


@given(
    st.lists(st.integers(0, 60), unique=True, max_size=20),
    st.one_of(st.none(), st.integers(1, 70)),
    st.integers(1, 9),
    st.data(),
)
def test_visible_context(
    keys: list[int], window: int | None, num_queries: int, data: st.DataObject
) -> None:
    """A window counts positions on the ruler, so a gap in them shortens what is seen; without one
    all queries see the same, which is said once."""
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys))))
    queries = list(range(61, 61 + num_queries))
    seen = visible_context(np.array(queries), np.array(keys, np.int64), window, valid.astype(bool))
    assert seen.shape == (1 if window is None else num_queries, len(keys))
    seen = np.broadcast_to(seen, (num_queries, len(keys)))
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            assert seen[i, j] == (valid[j] and (window is None or query - key < window))


@given(st.integers(1, 12), st.one_of(st.none(), st.integers(1, 14)), st.booleans())
def test_visible_block(num_rows: int, window: int | None, causal: bool) -> None:
    """The block sees itself both ways unless it is causal, and never past the window."""
    seen = visible_block(num_rows, window, causal)
    for q in range(num_rows):
        for k in range(num_rows):
            near = window is None or abs(q - k) < window
            assert seen[q, k] == (near and (k <= q or not causal))


def test_span_stop() -> None:
    """`stop` is one past the last row."""
    assert Span(Row(3), 4, "image", True).stop == 7
