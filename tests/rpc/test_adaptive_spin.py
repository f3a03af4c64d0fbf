"""Looking pays where nobody else wants the core."""

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
    ids=["alone", "hardly disturbed", "looks and is preempted", "sleeps and is kept waiting", "only woken"],
)
def test_it_pays_while_no_core_is_waited_for(ran: int, waited: int, times: int, is_worthwhile: bool) -> None:
    looking = AdaptiveSpin(sample_s=math.inf)
    looking.add_sample((5, 7, 3))
    assert looking.is_worthwhile
    looking.add_sample((5 + ran, 7 + waited, 3 + times))
    assert looking.is_worthwhile is is_worthwhile


def test_it_begins_again_when_the_others_are_gone() -> None:
    looking = AdaptiveSpin(sample_s=math.inf)
    for counts in ((0, 0, 0), (MS, 9 * MS, 2)):
        looking.add_sample(counts)
    assert not looking.is_worthwhile
    looking.add_sample((2 * MS, 9 * MS, 4))
    assert looking.is_worthwhile


def test_another_thread_and_a_kernel_that_does_not_count_change_nothing() -> None:
    looking = AdaptiveSpin(sample_s=math.inf)
    for counts in ((0, 0, 0), (MS, 9 * MS, 2), (5, 0, 1), None):
        looking.add_sample(counts)
    assert not looking.is_worthwhile


def test_the_kernel_counts_for_each_thread() -> None:
    mine = thread_schedstat()
    found: list[tuple[int, int, int] | None] = []
    thread = threading.Thread(target=lambda: found.append(thread_schedstat()))
    thread.start()
    thread.join()
    if mine is None:
        pytest.skip("this kernel has no /proc/thread-self/schedstat")
    [others] = found
    assert others is not None and others[2] < mine[2]
