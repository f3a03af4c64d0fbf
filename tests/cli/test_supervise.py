from __future__ import annotations

import heapq
from random import Random

import pytest

from mooncake.cli.supervise import (
    GRACE_S,
    LONGEST_REST_S,
    QUIET_S,
    STARTING_GRACE_S,
    AllReady,
    BecameReady,
    Begin,
    Effect,
    Event,
    Exited,
    Finished,
    Kill,
    RoleSpec,
    Say,
    Start,
    State,
    Stop,
    Supervisor,
    Terminate,
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
        self(Begin())
        for name in self.core.roles:
            self(BecameReady(name))
        return self


def deeds(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Say)]


def words(effects: list[Effect]) -> list[str]:
    return [f"{effect.name}: {effect.text}" for effect in effects if isinstance(effect, Say)]


def test_roles_start_when_those_before_them_are_ready() -> None:
    probe = Probe()
    assert deeds(probe(Begin())) == [Start("master")]
    assert deeds(probe(BecameReady("master"), at=1.0)) == [Start("node")]
    assert deeds(probe(BecameReady("node"))) == [Start("worker")]
    assert deeds(probe(BecameReady("worker"))) == [Start("gateway")]
    assert deeds(probe(BecameReady("gateway"))) == [AllReady()]


def test_a_role_that_dies_rests_and_starts_again() -> None:
    probe = Probe().all_ready()
    effects = probe(Exited("worker", -9), at=5.0)
    assert effects == [Say("worker", "died (killed by signal 9); starting again in 0.5 s", show_log=True)]
    assert probe.core.deadline() == 5.5
    assert probe(Wake(), at=5.4) == []
    assert probe(Wake(), at=5.5) == [Start("worker")]
    assert probe(BecameReady("worker"), at=7.5) == [Say("worker", "ready after 2.0 s")]


def test_rests_double_up_to_a_limit_and_never_end() -> None:
    probe = Probe().all_ready()
    rests = []
    for _ in range(9):
        probe(Exited("node", 1))
        wake_at = probe.core.deadline()
        assert wake_at is not None
        rests.append(wake_at - probe.now)
        assert probe(Wake(), at=wake_at) == [Start("node")]
    assert rests == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S]


def test_a_quiet_while_forgets_earlier_deaths() -> None:
    probe = Probe().all_ready()
    probe(Exited("node", 1), at=1.0)
    probe(Wake(), at=1.5)
    probe(BecameReady("node"), at=2.0)
    [said] = words(probe(Exited("node", 1), at=2.0 + QUIET_S - 0.01))
    assert said == "node: died (exit status 1), death 2 in a row; starting again in 1 s"
    probe(Wake(), at=100.0)
    probe(BecameReady("node"), at=100.0)
    [said] = words(probe(Exited("node", 1), at=100.0 + QUIET_S))
    assert said == "node: died (exit status 1); starting again in 0.5 s"


def test_a_restart_waits_for_nobody() -> None:
    probe = Probe().all_ready()
    probe(Exited("master", 1), at=1.0)
    probe(Exited("node", 1), at=1.1)
    assert probe(Wake(), at=1.6) == [Start("master"), Start("node")]


def test_one_that_is_never_ready_is_killed_and_rests() -> None:
    probe = Probe()
    probe(Begin())
    assert probe.core.deadline() == 60.0
    assert deeds(probe(Wake(), at=60.0)) == [Kill("master")]
    assert probe(BecameReady("master")) == []
    assert words(probe(Exited("master", -9))) == [
        "master: died (was not ready in time); starting again in 0.5 s"
    ]
    assert deeds(probe(Wake(), at=61.0)) == [Start("master")]


def test_refused_settings_stop_everything() -> None:
    probe = Probe()
    probe(Begin())
    probe(BecameReady("master"))
    effects = probe(Exited("node", 2))
    assert effects[0] == Say("node", "refused its settings; stopping everything", show_log=True)
    assert deeds(effects) == [Terminate("master")]
    assert deeds(probe(Exited("master", 0))) == [Finished(2)]


def test_the_same_status_from_one_that_served_is_only_a_death() -> None:
    probe = Probe().all_ready()
    assert deeds(probe(Exited("node", 2))) == []
    assert probe.core.roles["node"].state is State.RESTING


def test_stopping_goes_backwards() -> None:
    probe = Probe().all_ready()
    assert deeds(probe(Stop(), at=10.0)) == [Terminate("gateway")]
    assert deeds(probe(Exited("gateway", 0))) == [Terminate("worker")]
    assert deeds(probe(Exited("worker", 0))) == [Terminate("node")]
    assert deeds(probe(Exited("node", 0))) == [Terminate("master")]
    assert deeds(probe(Exited("master", 0))) == [Finished(0)]
    assert probe.core.deadline() is None


def test_one_that_others_lean_on_outlives_them_but_holds_up_nobody() -> None:
    probe = Probe([RoleSpec("worker"), RoleSpec("gateway", leans_on=("worker",))])
    assert deeds(probe(Begin())) == [Start("worker"), Start("gateway")]
    assert deeds(probe(Stop())) == [Terminate("gateway")]
    assert deeds(probe(Exited("gateway", 0))) == [Terminate("worker")]


def test_one_that_does_not_stop_is_killed_after_the_grace() -> None:
    probe = Probe().all_ready()
    probe(Stop(), at=10.0)
    assert probe.core.deadline() == 10.0 + GRACE_S
    effects = probe(Wake(), at=10.0 + GRACE_S)
    assert effects == [Say("gateway", "did not stop within 10 s; killing it"), Kill("gateway")]
    effects = probe(Exited("gateway", -9))
    assert effects == [Say("gateway", "stopped (killed by signal 9)"), Terminate("worker")]


def test_one_that_did_not_serve_yet_is_killed_sooner() -> None:
    probe = Probe()
    probe(Begin(), at=1.0)
    probe(Stop(), at=10.0)
    assert probe.core.deadline() == 10.0 + STARTING_GRACE_S
    assert deeds(probe(Wake(), at=10.0 + STARTING_GRACE_S)) == [Kill("master")]


def test_a_second_stop_kills_at_once() -> None:
    probe = Probe().all_ready()
    probe(Stop())
    assert deeds(probe(Stop())) == [Kill("master"), Kill("node"), Kill("worker"), Kill("gateway")]
    for name in ("gateway", "node", "worker"):
        assert deeds(probe(Exited(name, -9))) == []
    assert deeds(probe(Exited("master", -9))) == [Finished(0)]


def test_what_rests_or_waits_is_not_started_while_stopping() -> None:
    probe = Probe().all_ready()
    probe(Exited("gateway", 1), at=1.0)
    assert deeds(probe(Stop(), at=1.2)) == [Terminate("worker")]
    assert probe(Wake(), at=1.5) == []
    early = Probe()
    early(Begin())
    assert deeds(early(Stop())) == [Terminate("master")]
    assert deeds(early(Exited("master", -15))) == [Finished(0)]


def test_stopping_before_anything_started_ends_at_once() -> None:
    assert deeds(Probe()(Stop())) == [Finished(0)]


def test_the_story_of_a_role() -> None:
    probe = Probe().all_ready()
    probe(Exited("node", 3), at=4.0)
    story = probe.core.story("node")
    assert story == [
        "0.000 starting: first start",
        "0.000 ready: after 0.0 s",
        "4.000 resting: exit status 3; rests 0.5 s",
    ]
    assert probe.core.story("nobody") == []


@pytest.mark.parametrize("seed", range(40))
def test_any_weather_ends_with_nothing_running(seed: int) -> None:
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
            case Start(name):
                assert name not in running, "started twice"
                num_started += 1
                running[name] = num_started
                if random.random() < 0.9:
                    later(random.uniform(0, 5), BecameReady(name), num_started)
                if random.random() < 0.5:
                    later(random.expovariate(0.1), Exited(name, random.choice([1, -9, -11])), num_started)
            case Terminate(name) if random.random() < 0.7:
                later(random.uniform(0, 2), Exited(name, 0), running[name])
            case Kill(name):
                later(0.01, Exited(name, -9), running[name])
            case Finished(found):
                status = found

    def run(event: Event | Wake, at: float) -> None:
        for effect in probe(event, at):
            perform(effect)

    run(Begin(), 0.0)
    asked = False
    while status is None:
        deadline = probe.core.deadline()
        at_event = events[0][0] if events else None
        if not asked and min(x for x in (deadline, at_event, 300.0) if x is not None) >= 300.0:
            asked = True
            run(Stop(), 300.0)
        elif at_event is not None and (deadline is None or at_event <= deadline):
            at, _, event, incarnation = heapq.heappop(events)
            assert isinstance(event, BecameReady | Exited)
            if running.get(event.name) == incarnation:
                if isinstance(event, Exited):
                    del running[event.name]
                run(event, max(at, probe.now))
        else:
            assert deadline is not None, f"stuck: {probe.core!r}"
            run(Wake(), max(deadline, probe.now))
    assert running == {}
    assert status == 0
