# SPDX-License-Identifier: Apache-2.0
"""The kernel: the order of events; processes that crash, or pause and do everything afterwards in order."""

from __future__ import annotations

from mooncake.machine import Wake
from mooncake.sim.kernel import Kernel, PausableProcess, Process, SimDriver


def test_things_of_one_instant_happen_in_the_order_they_were_planned() -> None:
    kernel, seen = Kernel(0), list[str]()
    for name in ("first", "second", "third"):
        kernel.after(1.0, lambda name=name: seen.append(name))  # type: ignore[misc]
    kernel.after(0.5, lambda: seen.append("earlier"))
    kernel.run(0.9)
    assert seen == ["earlier"] and kernel.now == 0.9
    kernel.run(2.0)
    assert seen == ["earlier", "first", "second", "third"] and kernel.now == 2.0


def test_a_cancelled_timer_is_void() -> None:
    kernel, seen = Kernel(0), list[int]()
    kernel.after(1.0, lambda: seen.append(1)).cancel()
    kernel.run(2.0)
    assert seen == []


def test_a_dead_process_does_nothing_more() -> None:
    kernel, seen = Kernel(0), list[str]()
    process = Process(kernel, "p")
    process.on_crash(lambda: seen.append("crashed"))
    process.after(1.0, lambda: seen.append("too late"))
    kernel.after(0.5, process.crash)
    kernel.after(0.6, process.crash)
    kernel.run(2.0)
    assert seen == ["crashed"]


class Ticker:
    """Ticks once a second, three times."""

    def __init__(self) -> None:
        self.next: float | None = 0.0
        self.num_checks = 0

    def handle(self, event: str | Wake, now: float) -> list[str]:
        if isinstance(event, Wake):
            self.next = now + 1.0 if now < 2.0 else None
        return [f"{'tick' if isinstance(event, Wake) else event} at {now}"]

    def deadline(self) -> float | None:
        return self.next

    def check(self) -> None:
        self.num_checks += 1

    def story(self, key: str) -> list[str]:
        return []


def test_the_driver_wakes_its_machine_and_checks_it() -> None:
    kernel, seen, ticker = Kernel(0), list[str](), Ticker()
    driver: SimDriver[str, str] = SimDriver(Process(kernel, "p"), ticker, seen.append)
    driver.post("started")
    kernel.run(10.0)
    assert seen == ["started at 0.0", "tick at 0.0", "tick at 1.0", "tick at 2.0"]
    assert ticker.num_checks == 4


def test_what_was_to_happen_meanwhile_happens_at_once_and_in_order() -> None:
    kernel = Kernel(1)
    process = PausableProcess(kernel, "one")
    done: list[tuple[float, str]] = []
    process.after(1.0, lambda: done.append((kernel.now, "timer")))
    process.suspend(3.0)
    kernel.after(0.5, lambda: process.do(lambda: done.append((kernel.now, "message"))))
    kernel.run(10.0)
    assert done == [(3.0, "message"), (3.0, "timer")]


def test_a_timer_that_was_cancelled_while_it_was_due_does_nothing() -> None:
    kernel = Kernel(1)
    process = PausableProcess(kernel, "one")
    done: list[str] = []
    timer = process.after(1.0, lambda: done.append("timer"))
    process.suspend(3.0)
    kernel.after(2.0, timer.cancel)
    kernel.run(10.0)
    assert done == []


def test_the_rest_of_a_step_comes_before_all_else() -> None:
    kernel = Kernel(1)
    process = PausableProcess(kernel, "one")
    done: list[str] = []

    def slow_write() -> None:
        process.suspend(1.0)
        process.then(lambda: done.append("answer"))

    process.do(slow_write)
    process.do(lambda: done.append("next"))
    assert done == []
    kernel.run(2.0)
    assert done == ["answer", "next"]


def test_nothing_happens_after_a_crash() -> None:
    kernel = Kernel(1)
    process = PausableProcess(kernel, "one")
    process.suspend(1.0)
    process.do(lambda: (_ for _ in ()).throw(AssertionError("it is dead")))
    process.crash()
    kernel.run(2.0)
