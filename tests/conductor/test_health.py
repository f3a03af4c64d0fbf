# SPDX-License-Identifier: Apache-2.0
"""An instance's health moves only on evidence, and its accounts add up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake.conductor.health import Health, Instance, ProbeOutcome
from mooncake.conductor.settings import SchedulingSettings
from mooncake.types import WorkerRole

SETTINGS = SchedulingSettings(slow_start_s=10.0)


@pytest.fixture
def instance() -> Iterator[Instance]:
    instance = Instance("h:1", WorkerRole.PREFILL, next_probe_at=0.0)
    yield instance
    instance.check()


def probe(instance: Instance, outcome: ProbeOutcome, now: float, started_at: float | None = None) -> Health:
    instance.probe_started_at, instance.next_probe_at = now if started_at is None else started_at, None
    instance.on_probe(outcome, "for a test", now, SETTINGS)
    return instance.health


def test_one_failed_probe_makes_suspect_and_three_make_down(instance: Instance) -> None:
    assert probe(instance, ProbeOutcome.READY, 1.0) is Health.READY
    assert probe(instance, ProbeOutcome.FAILED, 3.0) is Health.SUSPECT
    assert probe(instance, ProbeOutcome.FAILED, 3.5) is Health.SUSPECT
    assert probe(instance, ProbeOutcome.FAILED, 4.0) is Health.DOWN
    assert probe(instance, ProbeOutcome.READY, 9.0) is Health.READY


def test_a_starting_instance_is_not_lost(instance: Instance) -> None:
    for now in range(10):
        assert probe(instance, ProbeOutcome.FAILED, float(now)) is Health.STARTING
        assert instance.next_probe_at == now + SETTINGS.suspect_probe_interval_s


def test_alive_but_not_ready_gets_no_work(instance: Instance) -> None:
    probe(instance, ProbeOutcome.READY, 1.0)
    assert probe(instance, ProbeOutcome.ALIVE, 3.0) is Health.STARTING


def test_one_that_never_answered_is_not_coming(instance: Instance) -> None:
    assert (instance.has_answered, instance.is_coming) == (False, False), "it was not probed yet"
    probe(instance, ProbeOutcome.FAILED, 1.0)
    assert (instance.has_answered, instance.is_coming) == (False, False)
    probe(instance, ProbeOutcome.ALIVE, 2.0)
    assert (instance.has_answered, instance.is_coming) == (True, True)
    probe(instance, ProbeOutcome.FAILED, 3.0)
    assert (instance.has_answered, instance.is_coming) == (True, False), "it was lost, but it exists"


def test_a_probe_sent_before_the_failure_proves_nothing(instance: Instance) -> None:
    probe(instance, ProbeOutcome.READY, 1.0)
    instance.on_failure("connection reset", 5.0)
    assert instance.health is Health.SUSPECT
    assert probe(instance, ProbeOutcome.READY, 6.0, started_at=4.9) is Health.SUSPECT
    assert probe(instance, ProbeOutcome.READY, 7.0, started_at=6.5) is Health.READY


def test_a_lost_instance_is_probed_at_growing_intervals(instance: Instance) -> None:
    probe(instance, ProbeOutcome.READY, 0.0)
    pauses = []
    for _ in range(12):
        probe(instance, ProbeOutcome.FAILED, 0.0)
        assert instance.next_probe_at is not None
        pauses.append(instance.next_probe_at)
    assert pauses == sorted(pauses)
    assert pauses[0] == SETTINGS.suspect_probe_interval_s
    assert pauses[-1] == SETTINGS.max_probe_interval_s
