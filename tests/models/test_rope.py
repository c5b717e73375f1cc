"""Rotary rows of text are looked up in a table that grows; they are those computed afresh."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_onnx.models.rope import FIRST_POSITIONS, RotaryTable, rotary_table
from dflash_onnx.models.rope_config import RopeConfig


@pytest.mark.parametrize("section", [None, (6, 5, 5)])
def test_rows_are_those_of_their_positions(section: tuple[int, ...] | None) -> None:
    """Before and after the table has grown, by doubling and to far positions, and for none."""
    rope = RopeConfig(theta=1e6, rotary_dim=32, mrope_section=section)
    table = RotaryTable(rope)
    for last in (5, FIRST_POSITIONS - 1, FIRST_POSITIONS, 7, 20 * FIRST_POSITIONS, 0):
        positions = np.arange(max(0, last - 3), last + 1)
        for rows in (positions, positions[:0], *([np.tile(positions, (3, 1))] if section else [])):
            for ours, theirs in zip(table.rows(rows), rotary_table(rows, rope), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_positions_before_the_first_are_refused() -> None:
    """Before a table is grown for a position that it does not have, it is looked at."""
    with pytest.raises(IndexError):
        RotaryTable(RopeConfig(1e6, 32, None)).rows(np.array([-5000]))


def test_another_thread_may_grow_the_table_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position that the table lacked when it was looked up is found in a new one, even if
    somebody else has just put a larger table in its place."""
    table = RotaryTable(RopeConfig(1e6, 32, None))
    larger = table._text_table(4 * FIRST_POSITIONS)

    class Small(np.ndarray):
        def take(self, *args: object, **kwargs: object) -> np.ndarray:  # type: ignore[override]
            monkeypatch.setattr(table, "_table", larger)
            raise IndexError

    monkeypatch.setattr(table, "_table", table._table.view(Small))
    cos, _ = table.rows(np.array([2 * FIRST_POSITIONS]))
    np.testing.assert_array_equal(cos, larger[2 * FIRST_POSITIONS :][:1, 0])
