# SPDX-License-Identifier: Apache-2.0
"""Spinning is worthwhile while no other thread waits for the core."""

from __future__ import annotations

import math
import threading

import pytest

from mooncake.rpc.adaptive_spin import AdaptiveSpin, thread_schedstat

MS = 1_000_000


@pytest.mark.parametrize(
    ("ran", "waited", "times", "is_worthwhile"),
    [
        (10 * MS, 0, 50, True),
        (10 * MS, 1 * MS, 10, True),
        (10 * MS, 40 * MS, 5, False),
        (1 * MS, 4 * MS, 50, False),
        (1 * MS, MS // 2, 50, True),
    ],
    ids=["alone", "hardly disturbed", "spins and is preempted", "sleeps and is kept waiting", "only woken"],
)
def test_is_worthwhile_while_cores_are_free(ran: int, waited: int, times: int, is_worthwhile: bool) -> None:
    spin = AdaptiveSpin(sample_s=math.inf)
    spin.add_sample((5, 7, 3))
    assert spin.is_worthwhile
    spin.add_sample((5 + ran, 7 + waited, 3 + times))
    assert spin.is_worthwhile is is_worthwhile


def test_spins_again_when_other_threads_have_ended() -> None:
    spin = AdaptiveSpin(sample_s=math.inf)
    for counts in ((0, 0, 0), (MS, 9 * MS, 2)):
        spin.add_sample(counts)
    assert not spin.is_worthwhile
    spin.add_sample((2 * MS, 9 * MS, 4))
    assert spin.is_worthwhile


def test_samples_of_another_thread_or_without_counters_are_ignored() -> None:
    spin = AdaptiveSpin(sample_s=math.inf)
    for counts in ((0, 0, 0), (MS, 9 * MS, 2), (5, 0, 1), None):
        spin.add_sample(counts)
    assert not spin.is_worthwhile


def test_the_kernel_counts_per_thread() -> None:
    mine = thread_schedstat()
    found: list[tuple[int, int, int] | None] = []
    thread = threading.Thread(target=lambda: found.append(thread_schedstat()))
    thread.start()
    thread.join()
    if mine is None:
        pytest.skip("this kernel has no /proc/thread-self/schedstat")
    [others] = found
    assert others is not None and others[2] < mine[2]
