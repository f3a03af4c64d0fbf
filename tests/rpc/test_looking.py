"""Looking pays where nobody else wants the core."""

from __future__ import annotations

import math
import threading

import pytest

from mooncake.rpc.looking import Looking, scheduled

MS = 1_000_000


@pytest.mark.parametrize(
    ("ran", "waited", "times", "pays"),
    [
        (10 * MS, 0, 50, True),
        (10 * MS, 1 * MS, 10, True),
        (10 * MS, 40 * MS, 5, False),
        (1 * MS, 4 * MS, 50, False),
        (1 * MS, MS // 2, 50, True),
    ],
    ids=["alone", "hardly disturbed", "looks and is preempted", "sleeps and is kept waiting", "only woken"],
)
def test_it_pays_while_no_core_is_waited_for(ran: int, waited: int, times: int, pays: bool) -> None:
    looking = Looking(sample_s=math.inf)
    looking.sampled((5, 7, 3))
    assert looking.pays
    looking.sampled((5 + ran, 7 + waited, 3 + times))
    assert looking.pays is pays


def test_it_begins_again_when_the_others_are_gone() -> None:
    looking = Looking(sample_s=math.inf)
    for counts in ((0, 0, 0), (MS, 9 * MS, 2)):
        looking.sampled(counts)
    assert not looking.pays
    looking.sampled((2 * MS, 9 * MS, 4))
    assert looking.pays


def test_another_thread_and_a_kernel_that_does_not_count_change_nothing() -> None:
    looking = Looking(sample_s=math.inf)
    for counts in ((0, 0, 0), (MS, 9 * MS, 2), (5, 0, 1), None):
        looking.sampled(counts)
    assert not looking.pays


def test_the_kernel_counts_for_each_thread() -> None:
    mine = scheduled()
    found: list[tuple[int, int, int] | None] = []
    thread = threading.Thread(target=lambda: found.append(scheduled()))
    thread.start()
    thread.join()
    if mine is None:
        pytest.skip("this kernel has no /proc/thread-self/schedstat")
    [others] = found
    assert others is not None and others[2] < mine[2]
