# SPDX-License-Identifier: Apache-2.0
"""When the KV of placed prompts is expected to move from their prefill instances to their decode instances.

It owns these times and refuses to know why an instance was chosen. A prompt's KV moves in the time before its
first token. Where two move to one instance at a time, they share its network card, and both are late: the
second token then waits for the KV. An answer of a few tokens has too few intervals to hide that. So a
decision asks, for every instance, how much of a window is taken already. Columns without gaps, as in
``load.py``; rows whose time has passed are dropped when room is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mooncake.conductor.prediction import Floats, Slots


class HandoverWindows:
    """The windows of all decode instances."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._slots: Slots = np.empty(64, np.int64)
        self._times: Floats = np.empty((2, 64))

    def add(self, slot: int, begins_at: float, ends_at: float, now: float) -> None:
        """Expect a prompt's KV at ``slot`` in this time."""
        if self._num_rows == len(self._slots):
            self._drop_past(now)
        row = self._num_rows
        self._slots[row], self._times[0, row], self._times[1, row] = slot, begins_at, ends_at
        self._num_rows += 1

    def forget(self, slot: int) -> None:
        """Drop the windows of a slot, which another instance has now."""
        self._keep(self._slots[: self._num_rows] != slot)

    def taken_s(self, num_slots: int, begins_at: float, ends_at: float) -> Floats:
        """By slot: the seconds of others' windows within this one."""
        begins, ends = self._times[:, : self._num_rows]
        shared = np.maximum(np.minimum(ends, ends_at) - np.maximum(begins, begins_at), 0.0)
        taken: Any = np.bincount(self._slots[: self._num_rows], shared, num_slots)
        return np.asarray(taken, dtype=np.float64)

    def check(self) -> None:
        assert self._num_rows <= len(self._slots) == self._times.shape[1]
        begins, ends = self._times[:, : self._num_rows]
        assert (begins <= ends).all()

    def _drop_past(self, now: float) -> None:
        self._keep(self._times[1, : self._num_rows] >= now)
        if self._num_rows > len(self._slots) // 2:
            self._slots = np.append(self._slots, self._slots)
            self._times = np.hstack([self._times, self._times])

    def _keep(self, kept: np.ndarray) -> None:
        count = int(np.count_nonzero(kept))
        self._slots[:count] = self._slots[: self._num_rows][kept]
        self._times[:, :count] = self._times[:, : self._num_rows][:, kept]
        self._num_rows = count
