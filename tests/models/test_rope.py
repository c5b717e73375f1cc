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
