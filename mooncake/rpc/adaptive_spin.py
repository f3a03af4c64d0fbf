# SPDX-License-Identifier: Apache-2.0
"""Adaptive spinning: whether to poll for the next message for a moment instead of sleeping at once.

Waking an idle core of a virtual machine takes about 25 us on each side, and a small request is answered in
little more, so a thread that spins for a moment before it sleeps halves the latency. But where there are
fewer cores than runnable threads, the awaited thread can't run while another one spins: then every spin
wastes all of its time. The kernel knows which of the two is the case: it counts how long a runnable thread
had to wait for a core. Whether spinning *finds* a message does not show that: a client that sends one
request per millisecond is neither found by a spin nor disturbed by it.
"""

from __future__ import annotations

import time

SPIN_S = 100e-6
"""Time that a server spins for the next request: the interval between the two of a put."""
REPLY_SPIN_S = 300e-6
"""Time that a client spins for its reply: that of a small one from a server that had to be woken."""
SAMPLE_S = 0.02
"""Interval of the samples from the kernel; one takes some 10 us."""
MAX_WAIT_SHARE = 0.2
"""Limit of the share of waiting for a core in the time that a thread ran or waited for one."""
MAX_WAIT_NS = 20_000
"""Limit of one wait for a core: waking up takes a few microseconds even on an idle core."""
_SCHEDSTAT = "/proc/thread-self/schedstat"


class AdaptiveSpin:
    """One side's measurements. Threads may share them: each samples itself, and the last sample counts."""

    __slots__ = ("_before", "_is_worthwhile", "_sample_s", "_sampled_at")

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self._is_worthwhile = True
        self._sample_s = sample_s
        self._sampled_at = 0.0
        self._before: tuple[int, int, int] | None = None

    @property
    def is_worthwhile(self) -> bool:
        """Whether spinning pays now; to be called once before each spin."""
        now = time.perf_counter()
        if now - self._sampled_at > self._sample_s:
            self._sampled_at = now
            self.add_sample(thread_schedstat())
        return self._is_worthwhile

    def add_sample(self, counts: tuple[int, int, int] | None) -> None:
        """Take a sample of the calling thread: ns run, ns waited, times it got a core."""
        before, self._before = self._before, counts
        if before is None or counts is None or counts[2] <= before[2]:
            return  # a kernel without these counters, or another thread than before
        ran, waited, times = (now - then for now, then in zip(counts, before, strict=True))
        if ran < 0 or waited < 0:
            return
        self._is_worthwhile = waited <= MAX_WAIT_SHARE * (ran + waited) or waited <= MAX_WAIT_NS * times

    def __repr__(self) -> str:
        return f"<AdaptiveSpin is_worthwhile={self._is_worthwhile}>"


def thread_schedstat() -> tuple[int, int, int] | None:
    """The calling thread's counters since its start: ns run, ns waited for a core, times it got one."""
    try:
        with open(_SCHEDSTAT, "rb") as file:
            ran, waited, times = file.read().split()
            return int(ran), int(waited), int(times)
    except (OSError, ValueError):
        return None
