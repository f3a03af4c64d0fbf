# SPDX-License-Identifier: Apache-2.0
"""A process that may be paused: stopped, in a slow write, or in a virtual machine that is not scheduled.

Its clock continues. Whatever was due meanwhile (timers, messages) happens when it resumes, all at once and in
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mooncake.sim.kernel import Kernel, Process, SimClock, Timer


class PausableProcess(Process):
    def __init__(self, kernel: Kernel, name: str, clock: SimClock | None = None) -> None:
        super().__init__(kernel, name, clock)
        self._until = 0.0
        self._unfinished: deque[Callable[[], None]] = deque()
        """The rest of the step in which it was paused."""
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_suspended(self) -> bool:
        return self.kernel.now < self._until

    def suspend(self, seconds: float) -> None:
        if self.kernel.now + seconds > self._until:
            self._until = self.kernel.now + seconds
            self.kernel.after(seconds, self._resume)

    def resume(self) -> None:
        """Resume at once."""
        self._until = 0.0
        self._resume()

    def do(self, action: Callable[[], None]) -> None:
        """Run ``action`` now, or when it resumes."""
        if not self.is_alive:
            return
        if self.is_suspended or self._unfinished or self._waiting:
            self._waiting.append(action)
        else:
            action()

    def then(self, action: Callable[[], None]) -> None:
        """Run the rest of a step: now, or before everything else when it resumes."""
        if self.is_suspended or self._unfinished:
            self._unfinished.append(action)
        else:
            action()

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        def unless_cancelled() -> None:
            if not timer.is_void:  # also paused while it was due and waited
                action()

        timer = super().after(delay_s, lambda: self.do(unless_cancelled))
        return timer

    def _resume(self) -> None:
        for queue in (self._unfinished, self._waiting):
            while queue and self.is_alive and not self.is_suspended:
                queue.popleft()()
                if queue is self._waiting and self._unfinished:
                    return self._resume()
