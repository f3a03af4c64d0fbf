# SPDX-License-Identifier: Apache-2.0
"""Decides which role of a one-host cluster starts, restarts and stops, and when.

A role starts once everything it comes ``after`` has been ready; one that dies is restarted after a delay that
doubles with every consecutive death and is reset after a stable period. Restarts never end: a cluster that
heals by itself at night beats one that waits for an operator. The one exception is a role that refuses its
settings (exit status 2) before it ever served: trying again cannot help, so everything stops.

Knows names and instants only. ``processes.py`` starts processes, watches them and reports here. A role's
states and moves are in ``ROLE_MOVES`` at the end, drawn in docs/reference/state-machines.md.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mooncake.machine import Wake
from mooncake.state_table import Move, StateTable, move

FIRST_REST_S = 0.5
LONGEST_REST_S = 30.0
QUIET_S = 60.0
"""A role that was ready for this long starts counting its deaths from zero again."""
GRACE_S = 10.0
"""How long a role may take to stop after SIGTERM before it is killed."""
STARTING_GRACE_S = 2.0
"""The same for one that does not serve yet: it has no state to save."""
STATUS_BAD_SETTINGS = 2
"""Exit status of a role that refused its settings."""


class RoleState(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTING = "resting"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RoleSpec:
    """A role to keep running."""

    name: str
    after: tuple[str, ...] = ()
    """Roles that must have been ready before its first start, and that stop only when it has stopped."""
    stops_before: tuple[str, ...] = ()
    """More roles that stop only when it has stopped, though it may start without them."""
    ready_within_s: float = 60.0


@dataclass(frozen=True)
class StartAll:
    """Start everything."""


@dataclass(frozen=True)
class RoleReady:
    name: str


@dataclass(frozen=True)
class RoleExited:
    """A process ended. ``status`` is negative when a signal ended it, as in ``subprocess``."""

    name: str
    status: int


@dataclass(frozen=True)
class StopAll:
    """Stop everything; a second one kills at once."""


Event = StartAll | RoleReady | RoleExited | StopAll


@dataclass(frozen=True)
class StartRole:
    name: str


@dataclass(frozen=True)
class TerminateRole:
    name: str


@dataclass(frozen=True)
class KillRole:
    name: str


@dataclass(frozen=True)
class Announce:
    """Show the user a line. ``show_log`` requests the last lines of the role's log as well."""

    name: str
    text: str
    show_log: bool = False


@dataclass(frozen=True)
class AllReady:
    """For the first time everything serves."""


@dataclass(frozen=True)
class AllStopped:
    """No process is left; exit with ``status``."""

    status: int


MAY_START, MAY_STOP, STOP, KILL = "may start", "may stop", "stop all", "kill all"
"""Events of one role that follow from those of others, and from StopAll."""

RoleEvent = RoleReady | RoleExited | Wake | str
Effect = StartRole | TerminateRole | KillRole | Announce | AllReady | AllStopped


@dataclass
class RoleStatus:
    spec: RoleSpec
    state: RoleState = RoleState.WAITING
    since: float = 0.0
    wake_at: float | None = None
    num_deaths: int = 0
    num_starts: int = 0
    was_ready: bool = False
    is_overdue: bool = False
    """Whether it was killed because it did not become ready in time."""
    transitions: deque[str] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def runs(self) -> bool:
        return self.state in (RoleState.STARTING, RoleState.READY, RoleState.STOPPING)

    def enter(self, state: RoleState, now: float, why: str, wake_at: float | None = None) -> None:
        self.state, self.since, self.wake_at = state, now, wake_at
        self.transitions.append(f"{now:.3f} {state}: {why}")


class Supervisor:
    """Keeps roles running. A core: see ``machine.py``."""

    def __init__(self, specs: Sequence[RoleSpec]) -> None:
        self.roles = {spec.name: RoleStatus(spec) for spec in specs}
        assert len(self.roles) == len(specs), "two roles have one name"
        for spec in specs:
            assert all(name in self.roles for name in spec.after + spec.stops_before), f"{spec} names no role"
        self.is_stopping = False
        self.exit_status = 0
        self._all_were_ready = False
        self._is_finished = False

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        match event:
            case StartAll():
                return self._start_what_may(now)
            case RoleReady(name) | RoleExited(name):
                return self._move(self.roles[name], event, now)
            case StopAll():
                return self._kill_all(now) if self.is_stopping else self._stop_all(now, "requested to stop")
            case Wake():
                return self._wake(now)

    def deadline(self) -> float | None:
        return min((role.wake_at for role in self.roles.values() if role.wake_at is not None), default=None)

    def check(self) -> None:
        for role in self.roles.values():
            timed = (RoleState.STARTING, RoleState.RESTING, RoleState.STOPPING)
            assert (role.wake_at is not None) == (role.state in timed and not role.is_overdue), role
            assert role.was_ready or role.state is not RoleState.READY, role
            if self.is_stopping:
                assert role.state not in (RoleState.WAITING, RoleState.RESTING), role
            else:
                assert role.state not in (RoleState.STOPPING, RoleState.STOPPED), role
        running = [role for role in self.roles.values() if role.runs]
        assert not (self._is_finished and running), running

    def story(self, key: str) -> list[str]:
        return list(self.roles[key].transitions) if key in self.roles else []

    def __repr__(self) -> str:
        states = " ".join(f"{name}={role.state}" for name, role in self.roles.items())
        return f"<Supervisor {states}>"

    def _move(self, role: RoleStatus, event: RoleEvent, now: float) -> list[Effect]:
        return ROLE_MOVES.handle(lambda: role.state, event, self, role, event, now)

    # -- starting ------------------------------------------------------------------------------------

    def _start_what_may(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for role in self.roles.values():
            if role.state is RoleState.WAITING and all(
                self.roles[name].was_ready for name in role.spec.after
            ):
                effects += self._move(role, MAY_START, now)
        return effects

    def _start(self, role: RoleStatus, _: RoleEvent, now: float) -> list[Effect]:
        why = f"start {role.num_starts + 1}" if role.num_starts else "first start"
        role.num_starts += 1
        role.is_overdue = False
        role.enter(RoleState.STARTING, now, why, wake_at=now + role.spec.ready_within_s)
        return [StartRole(role.spec.name)]

    def _became_ready(self, role: RoleStatus, _: RoleEvent, now: float) -> list[Effect]:
        if role.is_overdue:
            return []  # it was killed while the answer was in transit
        took_s = now - role.since
        role.was_ready = True
        role.enter(RoleState.READY, now, f"after {took_s:.1f} s")
        effects: list[Effect] = [Announce(role.spec.name, f"ready after {took_s:.1f} s")]
        effects += self._start_what_may(now)
        if not self._all_were_ready and all(other.state is RoleState.READY for other in self.roles.values()):
            self._all_were_ready = True
            effects.append(AllReady())
        return effects

    # -- dying and restarting ------------------------------------------------------------------------

    def _stopped(self, role: RoleStatus, event: RoleExited, now: float) -> list[Effect]:
        how = how_it_ended(event.status)
        role.enter(RoleState.STOPPED, now, how)
        return [Announce(role.spec.name, f"stopped ({how})"), *self._stop_what_may(now)]

    def _died(self, role: RoleStatus, event: RoleExited, now: float) -> list[Effect]:
        if self.is_stopping:
            return self._stopped(role, event, now)
        status, how = event.status, how_it_ended(event.status)
        if status == STATUS_BAD_SETTINGS and not role.was_ready:
            self.exit_status = STATUS_BAD_SETTINGS
            role.enter(RoleState.STOPPED, now, how)
            announcement = Announce(
                role.spec.name, "refused its settings; stopping everything", show_log=True
            )
            return [announcement, *self._stop_all(now, f"{role.spec.name} refused its settings")]
        if role.state is RoleState.READY and now - role.since >= QUIET_S:
            role.num_deaths = 0
        if role.is_overdue:
            how = "was not ready in time"
        rest_s = min(FIRST_REST_S * 2**role.num_deaths, LONGEST_REST_S)
        role.num_deaths += 1
        role.is_overdue = False
        role.enter(RoleState.RESTING, now, f"{how}; restart in {rest_s:g} s", wake_at=now + rest_s)
        row = f", consecutive death {role.num_deaths}" if role.num_deaths > 1 else ""
        return [Announce(role.spec.name, f"died ({how}){row}; restarting in {rest_s:g} s", show_log=True)]

    def _wake(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for role in self.roles.values():
            if role.wake_at is None or role.wake_at > now:
                continue
            effects += self._move(role, Wake(), now)
        return effects

    def _not_ready(self, role: RoleStatus, _: RoleEvent, now: float) -> list[Effect]:
        text = f"not ready after {role.spec.ready_within_s:g} s; killing it"
        return [Announce(role.spec.name, text), *self._kill(role)]

    # -- stopping ------------------------------------------------------------------------------------

    def _stop_all(self, now: float, why: str) -> list[Effect]:
        self.is_stopping = True
        for role in self.roles.values():
            if not role.runs:
                role.enter(ROLE_MOVES.next(role.state, STOP), now, why)
        return self._stop_what_may(now)

    def _stop_what_may(self, now: float) -> list[Effect]:
        """Stop roles that no running role depends on: the reverse of the order of starting."""
        running = [role.spec for role in self.roles.values() if role.runs]
        needed = {name for spec in running for name in spec.after + spec.stops_before}
        effects: list[Effect] = []
        for role in self.roles.values():
            if role.state in (RoleState.STARTING, RoleState.READY) and role.spec.name not in needed:
                effects += self._move(role, MAY_STOP, now)
        if not self._is_finished and not any(role.runs for role in self.roles.values()):
            self._is_finished = True
            effects.append(AllStopped(self.exit_status))
        return effects

    def _terminate(self, role: RoleStatus, _: RoleEvent, now: float) -> list[Effect]:
        grace_s = GRACE_S if role.state is RoleState.READY else STARTING_GRACE_S
        role.is_overdue = False
        role.enter(RoleState.STOPPING, now, "its turn to stop", wake_at=now + grace_s)
        return [TerminateRole(role.spec.name)]

    def _not_stopped(self, role: RoleStatus, _: RoleEvent, now: float) -> list[Effect]:
        text = f"did not stop within {now - role.since:.0f} s; killing it"
        return [Announce(role.spec.name, text), *self._kill(role)]

    def _kill_all(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for role in self.roles.values():
            if role.runs:
                effects += self._move(role, KILL, now)
        return effects

    def _kill_now(self, role: RoleStatus, _: RoleEvent, now: float) -> list[Effect]:
        role.enter(RoleState.STOPPING, now, "killed")
        return self._kill(role)

    def _kill(self, role: RoleStatus) -> list[Effect]:
        role.is_overdue, role.wake_at = True, None
        return [KillRole(role.spec.name)]


def how_it_ended(status: int) -> str:
    """An exit status as text."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _moves() -> Iterator[tuple[tuple[RoleState, type | str], Move[RoleState]]]:
    waiting, starting, ready = RoleState.WAITING, RoleState.STARTING, RoleState.READY
    resting, stopping, stopped = RoleState.RESTING, RoleState.STOPPING, RoleState.STOPPED
    yield (waiting, MAY_START), move(starting, by=Supervisor._start)
    yield (starting, RoleReady), move(ready, starting, by=Supervisor._became_ready)
    yield (starting, Wake), move(starting, by=Supervisor._not_ready, meaning="not ready in time")
    yield (resting, Wake), move(starting, by=Supervisor._start, meaning="rest over")
    yield (stopping, Wake), move(stopping, by=Supervisor._not_stopped, meaning="not stopped in time")
    yield (stopping, RoleExited), move(stopped, by=Supervisor._stopped)
    for state in (starting, ready):
        yield (state, RoleExited), move(resting, stopped, by=Supervisor._died)
        yield (state, MAY_STOP), move(stopping, by=Supervisor._terminate)
    for state in (starting, ready, stopping):
        yield (state, KILL), move(stopping, by=Supervisor._kill_now)
    for state in (waiting, resting, stopped):
        yield (state, STOP), move(stopped)
    for state in (resting, stopping, stopped):
        yield (state, RoleReady), move(state, meaning="ready too late")


ROLE_MOVES: StateTable[RoleState] = StateTable("role of mooncake up", RoleState, dict(_moves()))
