# SPDX-License-Identifier: Apache-2.0
"""One instant per kind and key, in order, and no more memory than what is set."""

from __future__ import annotations

from mooncake.conductor.due_times import DueTimes


def test_what_is_due_comes_in_order_and_once() -> None:
    times = DueTimes()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        times.set("expiry", key, at)
    times.set("probe", "a", 1.5)
    assert times.next_at == 1.0
    assert list(times.take_due(2.0)) == [("expiry", "a"), ("probe", "a"), ("expiry", "b")]
    assert list(times.take_due(2.0)) == [] and times.keys("expiry") == ["c"]
    times.check()


def test_an_instant_replaces_the_earlier_one_of_its_key() -> None:
    times = DueTimes()
    times.set("expiry", "later", 1.0)
    times.set("expiry", "later", 3.0)
    times.set("expiry", "sooner", 3.0)
    times.set("expiry", "sooner", 1.0)
    times.set("expiry", "gone", 1.0)
    times.cancel("expiry", "gone")
    times.cancel("probe", "unknown")
    assert list(times.take_due(2.0)) == [("expiry", "sooner")]
    assert times.at("expiry", "later") == 3.0 and times.at("expiry", "gone") is None
    assert list(times.take_due(3.0)) == [("expiry", "later")]
    assert times.next_at is None
    times.check()


def test_what_is_set_while_others_are_taken_comes_as_well() -> None:
    times = DueTimes()
    times.set("probe", "a", 1.0)
    seen = []
    for _, key in times.take_due(2.0):
        seen.append(key)
        if key == "a":
            times.set("probe", "b", 2.0)
            times.set("probe", "c", 3.0)
    assert seen == ["a", "b"] and times.keys("probe") == ["c"]


def test_entries_that_no_longer_count_are_dropped() -> None:
    times = DueTimes()
    times.set("probe", "kept", 5.0)
    for number in range(5000):
        times.set("expiry", f"r{number % 7}", float(number))
        times.cancel("expiry", f"r{number % 7}")
        assert len(times) < 1100
    times.check()
    assert list(times.take_due(1e9)) == [("probe", "kept")]
