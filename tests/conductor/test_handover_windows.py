# SPDX-License-Identifier: Apache-2.0
"""The times in which KV moves, against plain sums."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from mooncake.conductor.handover_windows import HandoverWindows


def test_a_window_is_taken_as_far_as_others_are_within_it() -> None:
    windows = HandoverWindows()
    windows.add(1, 10.0, 12.0, 0.0)
    windows.add(1, 11.0, 14.0, 0.0)
    windows.add(2, 20.0, 21.0, 0.0)
    assert windows.taken_s(4, 11.0, 13.0).tolist() == [0.0, 3.0, 0.0, 0.0]
    assert windows.taken_s(4, 0.0, 10.0).tolist() == [0.0] * 4, "it ends when the first begins"
    windows.check()


def test_nothing_is_taken_of_an_instance_that_left() -> None:
    windows = HandoverWindows()
    for slot in (0, 1, 0):
        windows.add(slot, 1.0, 2.0, 0.0)
    windows.forget(0)
    assert windows.taken_s(2, 0.0, 9.0).tolist() == [0.0, 1.0]
    windows.check()


@pytest.mark.parametrize("seed", range(4))
def test_past_windows_make_room_and_no_other_is_dropped(seed: int) -> None:
    random, windows = Random(seed), HandoverWindows()
    added: list[tuple[int, float, float]] = []
    for number in range(1000):
        now = number * 0.1
        begins_at = now + random.uniform(0, 20)
        added.append((random.randrange(8), begins_at, begins_at + random.uniform(0, 3)))
        windows.add(*added[-1], now)
        windows.check()
        if number % 50 == 0:
            first, last = now + 1.0, now + 4.0
            plain = np.zeros(8)
            for slot, begins, ends in added:
                plain[slot] += max(0.0, min(ends, last) - max(begins, first))
            assert windows.taken_s(8, first, last) == pytest.approx(plain)
