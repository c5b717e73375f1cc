"""State of the Gated DeltaNet layers: one matrix per head and a convolution window per layer.

It cannot be cropped, so rows that may be rejected never enter it: they are kept aside, and those
that were accepted are replayed by the next call. Owned by one target cache; knows no positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..models.text_config import LinearConfig
from .binding import Binding

Float = NDArray[np.float32]


@dataclass(frozen=True)
class StateCopy:
    """States and windows of every layer after some number of rows."""

    states: tuple[Float, ...]
    windows: tuple[Float, ...]

    @property
    def num_bytes(self) -> int:
        """Memory held by the copy."""
        return sum(array.nbytes for array in (*self.states, *self.windows))


class RecurrentState:
    """States [1, value heads, dk, dv] and windows [taps - 1, channels], updated in place.

    `is_whole` is False while an interrupted call may have left rows in it that nobody committed.
    `idle_rows` masked rows are fed when there is nothing to replay: 1 where a graph must not get
    empty tensors, else 0.
    """

    def __init__(
        self, binding: Binding, linear: LinearConfig, layers: tuple[int, ...], idle_rows: int
    ) -> None:
        self._binding = binding
        self._idle_rows = idle_rows
        self._layers = layers
        names = ("conv_rows", "replay_rows")
        self._uncertain_outputs = tuple(f"{name}.{i}" for name in names for i in layers)
        self.is_whole = True
        self._bound_as: bool | None = None
        state = (1, linear.num_value_heads, linear.key_dim, linear.value_dim)
        window = (linear.conv_kernel - 1, linear.conv_width)
        self._states = tuple(np.zeros(state, np.float32) for _ in layers)
        self._windows = tuple(np.zeros(window, np.float32) for _ in layers)
        # What the last uncertain call computed, until its commit: convolution inputs, and rows to
        # replay.
        self._conv_rows: list[Float] = []
        self._new_rows: list[Float] = []
        # Rows for the next call to replay; a masked row changes nothing.
        self._nothing = [np.zeros((idle_rows, linear.replay_width), np.float32) for _ in layers]
        self._idle_mask = np.zeros(idle_rows, np.float32)
        self._mask = np.ones(0, np.float32)
        self._pending: list[Float] = []
        # Memory for them, and their mask above: as long as it stays the same it stays bound.
        self._aside: list[Float] = []

    @property
    def num_bytes(self) -> int:
        """Memory held: one state and window per layer, and the rows kept aside."""
        aside = (*self._conv_rows, *self._new_rows, *self._aside)
        return sum(array.nbytes for array in (*self._states, *self._windows, *aside))

    def begin(self, certain: bool) -> tuple[str, ...]:
        """Bind a call whose rows will (`certain`) or may be committed; returns outputs to fetch."""
        if certain is not self._bound_as:
            self._bind(certain)
        self._replay(self._pending or self._nothing)
        self.is_whole = False
        return () if certain else self._uncertain_outputs

    def finish(self, fetched: list[Float]) -> None:
        """Take what `begin` asked for, in memory that the next call writes to; the rows replayed by
        this call are part of the state now."""
        count = len(fetched) // 2
        self._conv_rows, self._new_rows = fetched[:count], fetched[count:]
        self._pending = []
        self.is_whole = bool(fetched)

    def commit(self, num_rows: int) -> None:
        """Keep the first `num_rows` rows of the last call; all of them if they were certain."""
        for window, rows in zip(self._windows, self._conv_rows, strict=False):
            window[:] = rows[num_rows : num_rows + len(window)]
        if self._new_rows and num_rows:
            self._keep([rows[:num_rows] for rows in self._new_rows])
        self._conv_rows, self._new_rows = [], []
        self.is_whole = True

    def _keep(self, new: list[Float]) -> None:
        """Put rows aside for the next call, which writes where they lie now."""
        if [rows.shape for rows in new] != [rows.shape for rows in self._aside]:
            self._aside = [np.empty_like(rows) for rows in new]
        for ours, rows in zip(self._aside, new, strict=True):
            ours[:] = rows
        self._pending = self._aside

    def copy(self) -> StateCopy:
        """A copy to come back to; only after a certain call, when nothing is left to replay."""
        assert self.is_whole and not self._pending
        states, windows = (tuple(a.copy() for a in x) for x in (self._states, self._windows))
        return StateCopy(states, windows)

    def restore(self, copy: StateCopy | None) -> None:
        """Go back to a copy, or to the state before any row."""
        for ours, theirs in (
            (self._states, copy and copy.states),
            (self._windows, copy and copy.windows),
        ):
            for i, array in enumerate(ours):
                array[:] = theirs[i] if theirs else 0
        self._conv_rows, self._new_rows, self._pending = [], [], []
        self.is_whole = True

    def _bind(self, certain: bool) -> None:
        """Let calls write the state after all rows, or only after those that are replayed."""
        # Until all of it is bound: an interrupt in between must not look like either.
        self._bound_as = None
        for i, state, window in zip(self._layers, self._states, self._windows, strict=True):
            self._binding.unshare(f"state_committed.{i}")
            self._binding.unshare(f"state_all.{i}")
            for kept in self._kept_states(certain):
                self._binding.share(f"state.{i}", f"{kept}.{i}", state)
            self._binding.share(f"conv_window.{i}", f"conv_last.{i}", window)
            if not certain:
                self._binding.unshare(f"conv_last.{i}")
        self._bound_as = certain

    def _kept_states(self, certain: bool) -> tuple[str, ...]:
        """Outputs in the state's own memory; one in between costs a copy, unless it is there too.

        Only an operator that updates in place may find its output there (`idle_rows` 0).
        """
        if not certain:
            return ("state_committed",)
        return ("state_all",) if self._idle_rows else ("state_committed", "state_all")

    def _replay(self, rows: list[Float]) -> None:
        """Bind rows to replay; those that stand for nothing are masked."""
        mask = self._idle_mask
        if rows is not self._nothing:
            if len(self._mask) != len(rows[0]):
                self._mask = np.ones(len(rows[0]), np.float32)
            mask = self._mask
        self._binding.attach("replay_mask", mask, shapes_outputs=False)
        for i, kept in zip(self._layers, rows, strict=True):
            self._binding.attach(f"replay.{i}", kept, shapes_outputs=False)
