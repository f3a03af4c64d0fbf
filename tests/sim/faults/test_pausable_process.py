# SPDX-License-Identifier: Apache-2.0
"""A paused process does everything afterwards, in order, and nothing that was cancelled."""

from __future__ import annotations

from mooncake.sim.faults.pausable_process import PausableProcess
from mooncake.sim.kernel import Kernel


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
