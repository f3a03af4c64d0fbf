# SPDX-License-Identifier: Apache-2.0
"""Virtual time: an event heap, a clock that jumps, one source of randomness, processes that die or pause.

Two events of the same instant happen in the order in which they were planned (a counter in the heap's key),
so a seed is a whole history and a failure comes back with it. A process can crash: everything it had planned
for itself is then void, and what others plan for it is dropped. A process can pause, like one that is
stopped, collects garbage or runs on a descheduled virtual machine: what was due meanwhile happens when the
pause ends, all of it at that instant and in the order in which it was due.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Generic, TypeVar

from mooncake.machine import Machine, Wake

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class Timer:
    """A planned action; ``cancel`` makes it void."""

    __slots__ = ("action", "is_void")

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.is_void = False

    def cancel(self) -> None:
        self.is_void = True


class Kernel:
    """The clock and the planned actions."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.num_steps = 0
        self.trace: list[str] = []
        """What happened, for debugging and for comparing two runs of one seed."""
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Plan ``action``; a negative delay counts as 0."""
        timer = Timer(action)
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), next(self._order), _fire, timer))
        return timer

    def call_at(self, at: float, action: Callable[[Any], object], what: Any) -> None:
        """Plan ``action(what)`` without a way to cancel it: millions of events need no timer and no
        closure."""
        heapq.heappush(self._heap, (at, next(self._order), action, what))

    def postpone(self, timer: Timer, until: float) -> None:
        """Move a planned action to a later time, unless it is cancelled."""
        heapq.heappush(self._heap, (until, next(self._order), _fire, timer))

    def repeat_at_random(
        self, every_s: float, action: Callable[[], None], may_strike: Callable[[], bool]
    ) -> None:
        """Plan ``action`` repeatedly, ``every_s`` apart on average (0: never), while ``may_strike``."""
        if not every_s:
            return

        def strike() -> None:
            if may_strike():
                action()
                self.repeat_at_random(every_s, action, may_strike)

        self.after(self.random.expovariate(1 / every_s), strike)

    def run(self, until: float) -> None:
        """Let time pass to ``until``, or to the end of all plans."""
        while self._heap and self._heap[0][0] <= until:
            self.run_one(until)
        self.now = max(self.now, until)

    def run_one(self, until: float) -> None:
        """Run the next planned action at its time; or let time pass to ``until`` if that comes sooner."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(self.now, until)
            return
        at, _, action, what = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        self.num_steps += action is not _fire or not what.is_void
        action(what)

    def run_all(self) -> None:
        """Let time pass until no action is planned."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            at, _, action, what = pop(heap)
            if at > self.now:
                self.now = at
            self.num_steps += 1
            action(what)

    def trace_line(self, line: str) -> None:
        self.trace.append(f"{self.now:.6f} {line}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability


def _fire(timer: Timer) -> None:
    if not timer.is_void:
        timer.action()


class SimClock:
    """A process's own clock: it begins anywhere and runs a little too fast or too slow."""

    def __init__(self, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self._offset_s = offset_s
        self._rate = rate

    def shown(self, instant: float) -> float:
        """The clock's reading at an instant of the kernel."""
        return self._offset_s + instant * self._rate

    def instant(self, shown: float) -> float:
        """The kernel's instant at which the clock shows that."""
        return (shown - self._offset_s) / self._rate

    def true_s(self, shown_s: float) -> float:
        """The true length of a duration on this clock."""
        return shown_s / self._rate


class Process:
    """A process on a host, with a clock of its own; it can crash."""

    def __init__(self, kernel: Kernel, name: str, clock: SimClock | None = None) -> None:
        self.kernel = kernel
        self.name = name
        self.clock = clock if clock is not None else SimClock()
        self.is_alive = True
        self.paused_until = 0.0
        """By the kernel's clock: before this time the process does nothing."""
        self.stopped_until = 0.0
        """The same for its threads that carry bytes, which continue while only its event loop is held."""
        self._on_crash: list[Callable[[], None]] = []

    @property
    def now(self) -> float:
        """By its own clock."""
        return self.clock.shown(self.kernel.now)

    def after(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """As ``Kernel.after``, by its own clock. Dropped if the process has died by then; postponed by a
        pause."""

        def when_awake() -> None:
            if self.is_alive and self.kernel.now < self.paused_until:
                self.kernel.postpone(timer, self.paused_until)
            elif self.is_alive:
                action()

        timer = self.kernel.after(self.clock.true_s(delay_s), when_awake)
        return timer

    def when_awake(self, action: Callable[[], None]) -> None:
        """Run ``action`` now, or when the pause is over: incoming messages wait for that."""
        if self.kernel.now < self.paused_until:
            self.after(0.0, action)
        else:
            action()

    def when_running(self, action: Callable[[], None]) -> None:
        """The same for the threads that carry bytes."""

        def again() -> None:
            if self.kernel.now < self.stopped_until:
                self.kernel.postpone(timer, self.stopped_until)
            else:
                action()

        if self.kernel.now < self.stopped_until:
            timer = self.kernel.after(self.stopped_until - self.kernel.now, again)
        else:
            action()

    @property
    def stopped_s(self) -> float:
        """How long its threads that carry bytes are stopped from now on."""
        return max(0.0, self.stopped_until - self.kernel.now)

    def pause(self, seconds: float, *, is_stopped: bool = False) -> None:
        """Do nothing for ``seconds``. ``is_stopped``: no thread runs; else only the event loop is held."""
        until = self.kernel.now + seconds
        self.paused_until = max(self.paused_until, until)
        if is_stopped:
            self.stopped_until = max(self.stopped_until, until)

    def on_crash(self, action: Callable[[], None]) -> None:
        self._on_crash.append(action)

    def crash(self) -> None:
        """Die at once, without closing anything in good order."""
        if self.is_alive:
            self.is_alive = False
            self.kernel.trace_line(f"{self.name} crashes")
            for action in self._on_crash:
                action()

    def __repr__(self) -> str:
        return f"<Process {self.name} [{'alive' if self.is_alive else 'dead'}]>"


class SimDriver(Generic[EventT, EffectT]):
    """The counterpart of ``driver.Driver``: feeds one machine and wakes it. Checks it at every step."""

    def __init__(
        self,
        process: Process,
        machine: Machine[EventT, EffectT],
        perform: Callable[[EffectT], None],
    ) -> None:
        self._process = process
        self._machine: Any = machine
        self._perform = perform
        self._timer: Timer | None = None
        self.after_step: Callable[[], None] | None = None

    def post(self, event: EventT | Wake) -> None:
        now = self._process.now
        effects = self._machine.handle(event, now)
        self._machine.check()
        if self.after_step is not None:
            self.after_step()
        for effect in effects:
            self._perform(effect)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._machine.deadline()
        if deadline is not None:
            self._timer = self._process.after(deadline - now, lambda: self.post(Wake()))

    def close(self) -> None:
        """Stop waking the machine."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
