# SPDX-License-Identifier: Apache-2.0
"""Memory is free when nothing touches it, now and in the future."""

from __future__ import annotations

import threading

import pytest

from mooncake import clock
from mooncake.connectors import claim as module
from mooncake.connectors.claim import Claim, overdue_seconds, take_overdue_s

FAR = float("inf")


def test_it_is_free_when_it_is_closed_and_everything_has_left() -> None:
    claim = Claim("save", FAR)
    assert claim.enter(0.0) and claim.enter(0.0, 2) and claim.num_inside == 3
    claim.leave()
    claim.close()
    claim.leave()
    assert not claim.is_free
    claim.leave()
    assert claim.is_free


def test_without_being_closed_it_is_not_free() -> None:
    claim = Claim("save", FAR)
    claim.enter(0.0)
    claim.leave()
    assert not claim.is_free, "the next layer may be moved any time"
    claim.close()
    assert claim.is_free


def test_nothing_begins_after_the_deadline_or_after_it_was_closed() -> None:
    claim = Claim("load", 10.0)
    assert claim.enter(9.9)
    assert not claim.enter(10.0)
    claim.leave()
    claim.close()
    assert not claim.enter(1.0)
    assert claim.is_free


def test_callbacks_are_called_when_it_is_free_and_not_before() -> None:
    claim, calls = Claim("load", FAR), list[str]()
    claim.enter(0.0)
    claim.when_free(lambda: calls.append("first"))
    claim.close()
    assert calls == [] and not claim.wait(clock.monotonic())
    claim.leave()
    claim.when_free(lambda: calls.append("second"))
    assert calls == ["first", "second"] and claim.wait(0.0)


def test_a_callback_that_fails_does_not_prevent_the_others() -> None:
    claim, calls = Claim("save", FAR), list[int]()

    def fail() -> None:
        raise RuntimeError("the engine's own")

    claim.when_free(fail)
    claim.when_free(lambda: calls.append(1))
    claim.close()
    assert calls == [1] and claim.is_free


def test_a_wait_for_overdue_memory_logs_it_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOG_EVERY_S", 0.001)
    counter = overdue_seconds.labels("test")
    before = counter._value.get()
    claim, has_logged = Claim("test", clock.monotonic()), threading.Event()
    claim.close()
    claim._num_inside = 1
    monkeypatch.setattr(module.log, "warning", lambda *_, **__: has_logged.set())
    waiter = threading.Thread(target=claim.outlast)
    waiter.start()
    assert has_logged.wait(20.0) and waiter.is_alive()
    claim.leave()
    waiter.join(20.0)
    assert not waiter.is_alive() and counter._value.get() > before


def test_overdue_seconds_are_taken_once() -> None:
    take_overdue_s()
    claim = Claim("load", clock.monotonic())
    claim.log_overdue()
    claim.log_overdue()
    assert take_overdue_s() == 2 * module.LOG_EVERY_S
    assert take_overdue_s() == 0.0


def test_a_wait_ends_where_no_process_can_touch_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_EVERY_S", 0.001)
    claim = Claim("load", FAR)
    claim.enter(0.0)
    claim.outlast(lambda: True)
    assert not claim.is_free


def test_more_than_entered_can_not_leave() -> None:
    with pytest.raises(AssertionError, match="more left a save"):
        Claim("save", FAR).leave()
