"""Whether to look for what comes next instead of sleeping until it is there.

Waking an idle core of a virtual machine takes about 25 us on each side, and a small question is answered in
little more, so who looks for a moment before he sleeps is faster by half. But where cores are fewer than
those who want them, the one that is looked for can't run as long as somebody looks: then looking costs all
of its time, every time. Which of the two it is the kernel knows: it counts how long a thread that could run
had to wait for a core. Whether looking *finds* something says nothing about that: a client that asks once in
a millisecond is found by no look and disturbed by none.
"""

from __future__ import annotations

import time

SPIN_S = 100e-6
"""A server looks so long for the next question: the time between the two of a put."""
REPLY_SPIN_S = 300e-6
"""A client for its answer: the time of a small one from a server that had to be woken."""
SAMPLE_S = 0.02
"""The kernel is asked that often; asking takes some 10 us."""
MAX_WAIT_SHARE = 0.2
"""Of the time in which a thread ran or wanted to, that it may have waited for a core."""
MAX_WAIT_NS = 20_000
"""And how long at a time: waking up takes a few microseconds also where nobody else wants the core."""
_SCHEDSTAT = "/proc/thread-self/schedstat"


class AdaptiveSpin:
    """One side's experience. Threads may share it: each asks for itself, the last one's answer counts."""

    __slots__ = ("_before", "_is_worthwhile", "_sample_s", "_sampled_at")

    def __init__(self, sample_s: float = SAMPLE_S) -> None:
        self._is_worthwhile = True
        self._sample_s = sample_s
        self._sampled_at = 0.0
        self._before: tuple[int, int, int] | None = None

    @property
    def is_worthwhile(self) -> bool:
        """Ask once before each time."""
        now = time.perf_counter()
        if now - self._sampled_at > self._sample_s:
            self._sampled_at = now
            self.add_sample(thread_schedstat())
        return self._is_worthwhile

    def add_sample(self, counts: tuple[int, int, int] | None) -> None:
        """What the kernel says of the calling thread: ns run, ns waited, times it got a core."""
        before, self._before = self._before, counts
        if before is None or counts is None or counts[2] <= before[2]:
            return  # a kernel that doesn't count, or another thread than before
        ran, waited, times = (now - then for now, then in zip(counts, before, strict=True))
        if ran < 0 or waited < 0:
            return
        self._is_worthwhile = waited <= MAX_WAIT_SHARE * (ran + waited) or waited <= MAX_WAIT_NS * times

    def __repr__(self) -> str:
        return f"<AdaptiveSpin is_worthwhile={self._is_worthwhile}>"


def thread_schedstat() -> tuple[int, int, int] | None:
    """Of the calling thread, since it began: ns run, ns waited for a core, times it got one."""
    try:
        with open(_SCHEDSTAT, "rb") as file:
            ran, waited, times = file.read().split()
            return int(ran), int(waited), int(times)
    except (OSError, ValueError):
        return None
