# SPDX-License-Identifier: Apache-2.0
"""Adaptive spinning: whether to poll for the next message for a moment instead of sleeping at once.

Waking an idle core of a virtual machine takes about 25 us on each side, and a small request is answered in
little more, so a thread that spins for a moment before it sleeps halves the latency. But where there are
fewer cores than threads that want to run, the awaited thread can't run while another one spins, and every
spin wastes all of its time. The spins themselves show which of the two is the case. A spin that suddenly
loses a scheduler's slice was not alone on its core; the short turn of the peer that is being waited for does
not count. A client's spin that ends without a reply was of no use; one that ends with a reply has saved the
time of waking up.

How long the kernel kept the thread waiting for a core shows it less well: it counts the turns of the peer,
too, and probably the time in which an idle core wakes up (``docs/decisions``, 041).
"""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_S = 100e-6
"""Time that a server spins for the next request: the interval between the two of a put."""
REPLY_SPIN_S = 300e-6
"""Time that a client spins for its reply: that of a small one from a server that had to be woken."""
GAP_S = 500e-6
"""A longer pause between two polls is another program's turn: the peer's own takes less."""
WINDOW_S = 5e-3
"""Time of spinning after which it is judged."""
MAX_LOST_SHARE = 0.2
"""Limit of the share of gaps in the time spent spinning."""
MAX_LOST_S = MAX_LOST_SHARE * WINDOW_S
"""Most that one spin counts as lost: a single slice of another program, however long, decides nothing."""
SAVED_S = 100e-6
"""Time that a client's spin saves by its reply: 115 us measured, with puts after a pause."""
FIRST_REST_S = 0.05
MAX_REST_S = 2.0
"""Without spins nothing is learned: one is tried after a time that doubles from failure to failure."""


class AdaptiveSpin:
    """One side's judgement of its spins. Threads may share it: a lost update only delays the judgement."""

    __slots__ = ("_clock", "_lost_s", "_rest_s", "_resting_until", "_spun_s", "_wasted_s")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spun_s = self._lost_s = self._wasted_s = 0.0
        self._rest_s = FIRST_REST_S
        self._resting_until: float | None = None

    @property
    def is_worthwhile(self) -> bool:
        """Whether spinning pays now."""
        if self._resting_until is None:
            return True
        if self._clock() < self._resting_until:
            return False
        self._resting_until = None
        return True

    def spun(self, seconds: float, lost_s: float = 0.0, wasted_s: float = 0.0) -> None:
        """Take the result of a spin: how long it took, how much of that were gaps, how much it has wasted;
        less than 0: saved."""
        if lost_s > MAX_LOST_S:
            seconds, lost_s = seconds - lost_s + MAX_LOST_S, MAX_LOST_S
        self._spun_s += seconds
        self._lost_s += lost_s
        self._wasted_s += wasted_s
        if self._spun_s < WINDOW_S:
            return
        if self._lost_s <= MAX_LOST_SHARE * self._spun_s and self._wasted_s <= 0:
            self._rest_s = FIRST_REST_S
        else:
            self._resting_until = self._clock() + self._rest_s
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)
        self._spun_s = self._lost_s = self._wasted_s = 0.0

    def wait(self, is_ready: Callable[[int], object], limit_s: float = REPLY_SPIN_S) -> bool:
        """Spin until ``is_ready(0)``, a poll that does not wait; False: it was not within ``limit_s``."""
        # Without sched_yield: on a busy machine that gives the core away for milliseconds.
        clock = self._clock
        began = last = clock()
        lost_s, until = 0.0, began + limit_s
        while True:
            is_found = bool(is_ready(0))
            now = clock()
            if now - last > GAP_S:
                lost_s += now - last
            last = now
            if is_found or now >= until:
                break
        # A reply that was found after the limit came while another program had the core.
        self.spun(now - began, lost_s, -SAVED_S if is_found and now <= until else limit_s)
        return is_found

    def __repr__(self) -> str:
        return f"<AdaptiveSpin is_worthwhile={self.is_worthwhile}>"
