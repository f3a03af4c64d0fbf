# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import heapq
from random import Random

import pytest

from mooncake.cli.supervisor import (
    GRACE_S,
    LONGEST_REST_S,
    QUIET_S,
    STARTING_GRACE_S,
    AllReady,
    AllStopped,
    Announce,
    Effect,
    Event,
    KillRole,
    RoleExited,
    RoleReady,
    RoleSpec,
    RoleState,
    StartAll,
    StartRole,
    StopAll,
    Supervisor,
    TerminateRole,
)
from mooncake.machine import Wake

SPECS = [
    RoleSpec("master"),
    RoleSpec("node", after=("master",)),
    RoleSpec("worker", after=("master", "node"), ready_within_s=100.0),
    RoleSpec("gateway", after=("worker",)),
]


class Probe:
    """A supervisor whose invariants are checked after every event."""

    def __init__(self, specs: list[RoleSpec] = SPECS) -> None:
        self.core = Supervisor(specs)
        self.now = 0.0

    def __call__(self, event: Event | Wake, at: float | None = None) -> list[Effect]:
        self.now = self.now if at is None else at
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def all_ready(self) -> Probe:
        self(StartAll())
        for name in self.core.roles:
            self(RoleReady(name))
        return self


def deeds(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Announce)]


def words(effects: list[Effect]) -> list[str]:
    return [f"{effect.name}: {effect.text}" for effect in effects if isinstance(effect, Announce)]


def test_roles_start_when_those_before_them_are_ready() -> None:
    probe = Probe()
    assert deeds(probe(StartAll())) == [StartRole("master")]
    assert deeds(probe(RoleReady("master"), at=1.0)) == [StartRole("node")]
    assert deeds(probe(RoleReady("node"))) == [StartRole("worker")]
    assert deeds(probe(RoleReady("worker"))) == [StartRole("gateway")]
    assert deeds(probe(RoleReady("gateway"))) == [AllReady()]


def test_a_role_that_dies_rests_and_starts_again() -> None:
    probe = Probe().all_ready()
    effects = probe(RoleExited("worker", -9), at=5.0)
    assert effects == [Announce("worker", "died (killed by signal 9); restarting in 0.5 s", show_log=True)]
    assert probe.core.deadline() == 5.5
    assert probe(Wake(), at=5.4) == []
    assert probe(Wake(), at=5.5) == [StartRole("worker")]
    assert probe(RoleReady("worker"), at=7.5) == [Announce("worker", "ready after 2.0 s")]


def test_rests_double_up_to_a_limit_and_never_end() -> None:
    probe = Probe().all_ready()
    rests = []
    for _ in range(9):
        probe(RoleExited("node", 1))
        wake_at = probe.core.deadline()
        assert wake_at is not None
        rests.append(wake_at - probe.now)
        assert probe(Wake(), at=wake_at) == [StartRole("node")]
    assert rests == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S]


def test_a_stable_period_resets_the_count_of_deaths() -> None:
    probe = Probe().all_ready()
    probe(RoleExited("node", 1), at=1.0)
    probe(Wake(), at=1.5)
    probe(RoleReady("node"), at=2.0)
    [text] = words(probe(RoleExited("node", 1), at=2.0 + QUIET_S - 0.01))
    assert text == "node: died (exit status 1), consecutive death 2; restarting in 1 s"
    probe(Wake(), at=100.0)
    probe(RoleReady("node"), at=100.0)
    [text] = words(probe(RoleExited("node", 1), at=100.0 + QUIET_S))
    assert text == "node: died (exit status 1); restarting in 0.5 s"


def test_a_restart_waits_for_no_other_role() -> None:
    probe = Probe().all_ready()
    probe(RoleExited("master", 1), at=1.0)
    probe(RoleExited("node", 1), at=1.1)
    assert probe(Wake(), at=1.6) == [StartRole("master"), StartRole("node")]


def test_one_that_is_never_ready_is_killed_and_rests() -> None:
    probe = Probe()
    probe(StartAll())
    assert probe.core.deadline() == 60.0
    assert deeds(probe(Wake(), at=60.0)) == [KillRole("master")]
    assert probe(RoleReady("master")) == []
    assert words(probe(RoleExited("master", -9))) == [
        "master: died (was not ready in time); restarting in 0.5 s"
    ]
    assert deeds(probe(Wake(), at=61.0)) == [StartRole("master")]


def test_refused_settings_stop_everything() -> None:
    probe = Probe()
    probe(StartAll())
    probe(RoleReady("master"))
    effects = probe(RoleExited("node", 2))
    assert effects[0] == Announce("node", "refused its settings; stopping everything", show_log=True)
    assert deeds(effects) == [TerminateRole("master")]
    assert deeds(probe(RoleExited("master", 0))) == [AllStopped(2)]


def test_the_same_status_from_one_that_served_is_only_a_death() -> None:
    probe = Probe().all_ready()
    assert deeds(probe(RoleExited("node", 2))) == []
    assert probe.core.roles["node"].state is RoleState.RESTING


def test_stopping_goes_backwards() -> None:
    probe = Probe().all_ready()
    assert deeds(probe(StopAll(), at=10.0)) == [TerminateRole("gateway")]
    assert deeds(probe(RoleExited("gateway", 0))) == [TerminateRole("worker")]
    assert deeds(probe(RoleExited("worker", 0))) == [TerminateRole("node")]
    assert deeds(probe(RoleExited("node", 0))) == [TerminateRole("master")]
    assert deeds(probe(RoleExited("master", 0))) == [AllStopped(0)]
    assert probe.core.deadline() is None


def test_a_role_that_stops_last_delays_no_start() -> None:
    probe = Probe([RoleSpec("worker"), RoleSpec("gateway", stops_before=("worker",))])
    assert deeds(probe(StartAll())) == [StartRole("worker"), StartRole("gateway")]
    assert deeds(probe(StopAll())) == [TerminateRole("gateway")]
    assert deeds(probe(RoleExited("gateway", 0))) == [TerminateRole("worker")]


def test_one_that_does_not_stop_is_killed_after_the_grace() -> None:
    probe = Probe().all_ready()
    probe(StopAll(), at=10.0)
    assert probe.core.deadline() == 10.0 + GRACE_S
    effects = probe(Wake(), at=10.0 + GRACE_S)
    assert effects == [Announce("gateway", "did not stop within 10 s; killing it"), KillRole("gateway")]
    effects = probe(RoleExited("gateway", -9))
    assert effects == [Announce("gateway", "stopped (killed by signal 9)"), TerminateRole("worker")]


def test_one_that_did_not_serve_yet_is_killed_sooner() -> None:
    probe = Probe()
    probe(StartAll(), at=1.0)
    probe(StopAll(), at=10.0)
    assert probe.core.deadline() == 10.0 + STARTING_GRACE_S
    assert deeds(probe(Wake(), at=10.0 + STARTING_GRACE_S)) == [KillRole("master")]


def test_a_second_stop_kills_at_once() -> None:
    probe = Probe().all_ready()
    probe(StopAll())
    assert deeds(probe(StopAll())) == [
        KillRole("master"),
        KillRole("node"),
        KillRole("worker"),
        KillRole("gateway"),
    ]
    for name in ("gateway", "node", "worker"):
        assert deeds(probe(RoleExited(name, -9))) == []
    assert deeds(probe(RoleExited("master", -9))) == [AllStopped(0)]


def test_what_rests_or_waits_is_not_started_while_stopping() -> None:
    probe = Probe().all_ready()
    probe(RoleExited("gateway", 1), at=1.0)
    assert deeds(probe(StopAll(), at=1.2)) == [TerminateRole("worker")]
    assert probe(Wake(), at=1.5) == []
    early = Probe()
    early(StartAll())
    assert deeds(early(StopAll())) == [TerminateRole("master")]
    assert deeds(early(RoleExited("master", -15))) == [AllStopped(0)]


def test_stopping_before_anything_started_ends_at_once() -> None:
    assert deeds(Probe()(StopAll())) == [AllStopped(0)]


def test_the_story_of_a_role() -> None:
    probe = Probe().all_ready()
    probe(RoleExited("node", 3), at=4.0)
    story = probe.core.story("node")
    assert story == [
        "0.000 starting: first start",
        "0.000 ready: after 0.0 s",
        "4.000 resting: exit status 3; restart in 0.5 s",
    ]
    assert probe.core.story("unknown") == []


@pytest.mark.parametrize("seed", range(40))
def test_any_sequence_ends_with_nothing_running(seed: int) -> None:
    """A small world: processes become ready, die or hang at random; then everything is stopped."""
    random = Random(seed)
    probe = Probe()
    running: dict[str, int] = {}
    num_started = 0
    events: list[tuple[float, int, Event, int]] = []
    status: int | None = None

    def later(delay: float, event: Event, incarnation: int) -> None:
        heapq.heappush(
            events, (probe.now + delay, len(events) + random.randrange(1 << 30), event, incarnation)
        )

    def perform(effect: Effect) -> None:
        nonlocal num_started, status
        match effect:
            case StartRole(name):
                assert name not in running, "started twice"
                num_started += 1
                running[name] = num_started
                if random.random() < 0.9:
                    later(random.uniform(0, 5), RoleReady(name), num_started)
                if random.random() < 0.5:
                    later(random.expovariate(0.1), RoleExited(name, random.choice([1, -9, -11])), num_started)
            case TerminateRole(name) if random.random() < 0.7:
                later(random.uniform(0, 2), RoleExited(name, 0), running[name])
            case KillRole(name):
                later(0.01, RoleExited(name, -9), running[name])
            case AllStopped(found):
                status = found

    def run(event: Event | Wake, at: float) -> None:
        for effect in probe(event, at):
            perform(effect)

    run(StartAll(), 0.0)
    is_stopped = False
    while status is None:
        deadline = probe.core.deadline()
        at_event = events[0][0] if events else None
        if not is_stopped and min(x for x in (deadline, at_event, 300.0) if x is not None) >= 300.0:
            is_stopped = True
            run(StopAll(), 300.0)
        elif at_event is not None and (deadline is None or at_event <= deadline):
            at, _, event, incarnation = heapq.heappop(events)
            assert isinstance(event, RoleReady | RoleExited)
            if running.get(event.name) == incarnation:
                if isinstance(event, RoleExited):
                    del running[event.name]
                run(event, max(at, probe.now))
        else:
            assert deadline is not None, f"stuck: {probe.core!r}"
            run(Wake(), max(deadline, probe.now))
    assert running == {}
    assert status == 0
