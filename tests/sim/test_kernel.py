# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mooncake.machine import Wake
from mooncake.sim.kernel import Kernel, Process, SimDriver


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
