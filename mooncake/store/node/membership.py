# SPDX-License-Identifier: Apache-2.0
"""Membership of a segment in the store: mount, heartbeat, mount again after any loss, leave.

docs/reference/state-machines.md has the diagram, drawn from ``MOVES`` at the end of this module.

A master that does not know the segment's content receives a report of it before the first heartbeat
(REPORTING). The memory and its epoch outlive every connection: a master that knows them finds its objects
again, and for one that doesn't ``rest_s`` states how long an earlier master's grants may still be in use.
This class opens no socket: ``mounted_segment.py`` and the simulator perform its effects.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import msgspec

from mooncake.machine import Wake
from mooncake.state_table import Move, StateTable, move
from mooncake.store import messages as m
from mooncake.store.node.task_agent import reports
from mooncake.types import Tier

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
ANSWER_S = 3.0
"""Time that a connection attempt or a reply may take before the connection is dropped."""
CONNECT_S = 2.5
"""Time after which an attempt ends with its reason, which must come before the attempt is dropped."""


class MembershipPhase(enum.StrEnum):
    """Phase of the membership."""

    WAITING = "waiting"
    CONNECTING = "connecting"
    MOUNTING = "mounting"
    REPORTING = "reporting"
    MOUNTED = "mounted"
    LEAVING = "leaving"
    LEFT = "left"


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """The connection is up."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The attempt failed, or the connection is gone."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyReceived:
    """The master replied to a message."""

    message: msgspec.Struct


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """The process is about to stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connect:
    """Effect: open a connection to the master; ConnectionOpened or ConnectionClosed follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Disconnect:
    """Effect: drop the connection (or the attempt); no further event of it is delivered."""


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Effect: send ``message``; ReplyReceived or ConnectionClosed follows."""

    message: msgspec.Struct


@dataclasses.dataclass(frozen=True, slots=True)
class LogEvent:
    """Effect: write a log event."""

    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class DropObjects:
    """Effect: the master refused these objects; remove them from the journal."""

    object_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """Effect: the membership has ended; the master knows it or can't be reached."""


Event = ConnectionOpened | ConnectionClosed | ReplyReceived | Leave
Effect = Connect | Disconnect | Send | LogEvent | DropObjects | Left


def _nothing() -> Iterable[m.SegmentEntry]:
    return ()


class Membership:
    """State machine of one segment's membership. Deliver a first ``Wake()`` to start it.

    ``held`` returns the segment's content for reports to the master.
    """

    def __init__(
        self,
        segment: str,
        epoch: int,
        host: str,
        address: int,
        size_bytes: int,
        descriptor: bytes,
        random: Random,
        *,
        tier: Tier = Tier.MEMORY,
        content_id: int = 0,
        node: str = "",
        held: Callable[[], Iterable[m.SegmentEntry]] = _nothing,
    ) -> None:
        place = (segment, epoch, host, address, size_bytes, descriptor)
        self._mount = m.Mount(*place, rest_s=0.0, tier=tier, content_id=content_id, node=node)
        self._random = random
        self._held = held
        self._reports: list[m.ReportContents] = []
        """Messages still to be sent, the next one last."""
        self.phase = MembershipPhase.WAITING
        self._wake_at: float | None = 0.0
        """Time at which the current phase must be handled."""
        self._backoff_s = FIRST_BACKOFF_S
        self._heartbeat_s = 1.0
        self._is_beat_open = False
        self._is_confirmed = False
        self._lines: list[str] = []

    @property
    def is_usable(self) -> bool:
        """Whether the master has mounted the segment and received a heartbeat: it allocates space on it."""
        return self.phase is MembershipPhase.MOUNTED and self._is_confirmed

    @property
    def rest_s(self) -> float:
        return self._mount.rest_s

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        if isinstance(event, Wake) and (self._wake_at is None or self._wake_at > now):
            return []
        return MOVES.handle(lambda: self.phase, event, self, event, now)

    def deadline(self) -> float | None:
        return self._wake_at

    def check(self) -> None:
        assert (self._wake_at is None) == (self.phase is MembershipPhase.LEFT), (self.phase, self._wake_at)
        assert FIRST_BACKOFF_S <= self._backoff_s <= MAX_BACKOFF_S

    def story(self, key: str) -> list[str]:
        """Last phases of the membership; ``key`` is the name of the segment."""
        return list(self._lines) if key == self._mount.segment else []

    def _connect(self, _: Wake, now: float) -> list[Effect]:
        self._enter(MembershipPhase.CONNECTING, now, ANSWER_S)
        return [Connect()]

    def _opened(self, _: ConnectionOpened, now: float) -> list[Effect]:
        return self._send_mount(now)

    def _mount_answered(self, event: ReplyReceived, now: float) -> list[Effect]:
        message = event.message
        if not isinstance(message, m.Mounted):
            return []
        if message.refusal is not None:
            return [Disconnect(), *self._back_off(f"mount refused: {message.refusal}", now)]
        self._heartbeat_s = message.heartbeat_s
        rest_s = max(message.rest_s, self._mount.rest_s)
        self._mount = msgspec.structs.replace(self._mount, rest_s=rest_s, line=message.line)
        self._note_largest_id(message.last_id)
        self._backoff_s = FIRST_BACKOFF_S
        fields = {"segment": self._mount.segment, "num_objects": message.num_objects}
        if message.wants_report:
            self._reports = reports(self._mount.segment, self._mount.epoch, self._held())[::-1]
            return [LogEvent("mounted", fields), *self._report(now)]
        return [LogEvent("mounted", fields), *self._settle(now)]

    def _report_answered(self, event: ReplyReceived, now: float) -> list[Effect]:
        message = event.message
        if not isinstance(message, m.Reported):
            return []
        dropped = [DropObjects(message.unwanted)] if message.unwanted else []
        return [*dropped, *(self._report(now) if self._reports else self._settle(now))]

    def _beat(self, event: Wake, now: float) -> list[Effect]:
        if self._is_beat_open:
            return self._timed_out(event, now)
        self._is_beat_open = True
        self._wake_at = now + ANSWER_S
        return [Send(m.Heartbeat(self._mount.segment, self._mount.epoch))]

    def _beat_answered(self, event: ReplyReceived, now: float) -> list[Effect]:
        message = event.message
        if not isinstance(message, m.Beat):
            return []
        self._is_beat_open = False
        self._wake_at = now + self._heartbeat_s
        self._is_confirmed = message.is_known
        self._note_largest_id(message.last_id)
        if message.is_known:
            return []
        return [
            LogEvent("segment_unknown_to_master", {"segment": self._mount.segment}),
            *self._send_mount(now),
        ]

    def _report(self, now: float) -> list[Effect]:
        self._enter(MembershipPhase.REPORTING, now, ANSWER_S)
        return [Send(self._reports.pop())]

    def _settle(self, now: float) -> list[Effect]:
        """Become mounted, with the first heartbeat at once: before it, the master allocates no space here."""
        self._is_beat_open = False
        self._enter(MembershipPhase.MOUNTED, now, 0.0)
        return []

    def _send_mount(self, now: float) -> list[Effect]:
        self._is_confirmed = False
        self._note_largest_id(max((entry.object_id for entry in self._held()), default=0))
        self._enter(MembershipPhase.MOUNTING, now, ANSWER_S)
        return [Send(self._mount)]

    def _note_largest_id(self, object_id: int) -> None:
        """Keep the largest object id of a master or the journal, for a later master with a slower clock."""
        if object_id > self._mount.largest_id:
            self._mount = msgspec.structs.replace(self._mount, largest_id=object_id)

    def _closed(self, event: ConnectionClosed, now: float) -> list[Effect]:
        return self._back_off(event.reason, now)

    def _timed_out(self, _: Wake, now: float) -> list[Effect]:
        return [Disconnect(), *self._back_off(f"no answer within {ANSWER_S} s", now)]

    def _back_off(self, reason: str, now: float) -> list[Effect]:
        delay_s = self._backoff_s * self._random.uniform(0.75, 1.25)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        was = self.phase
        self._enter(MembershipPhase.WAITING, now, delay_s)
        if was is MembershipPhase.WAITING:
            return []
        fields = {"segment": self._mount.segment, "reason": reason, "retry_in_s": round(delay_s, 3)}
        return [LogEvent("master_lost" if was is MembershipPhase.MOUNTED else "mount_failed", fields)]

    def _leave(self, event: Leave, now: float) -> list[Effect]:
        if self._mount.tier is Tier.SSD:
            # An SSD keeps its content: the next process that serves it finds it unchanged.
            return self._left(event, now)
        self._enter(MembershipPhase.LEAVING, now, ANSWER_S)
        return [Send(m.Unmount(self._mount.segment, self._mount.epoch))]

    def _left(self, _: Event | Wake, now: float) -> list[Effect]:
        self._enter(MembershipPhase.LEFT, now, 0.0)
        self._wake_at = None
        return [Disconnect(), Left()]

    def _enter(self, phase: MembershipPhase, now: float, wait_s: float) -> None:
        self.phase = phase
        self._wake_at = now + wait_s
        self._lines.append(f"{now:.6f} {phase}")
        del self._lines[:-100]

    def __repr__(self) -> str:
        return f"<Membership of {self._mount.segment!r} [{self.phase}]>"


def _moves() -> Iterator[tuple[tuple[MembershipPhase, type], Move[MembershipPhase]]]:
    waiting, connecting, mounting = (
        MembershipPhase.WAITING,
        MembershipPhase.CONNECTING,
        MembershipPhase.MOUNTING,
    )
    reporting, mounted = MembershipPhase.REPORTING, MembershipPhase.MOUNTED
    leaving, left = MembershipPhase.LEAVING, MembershipPhase.LEFT
    yield (waiting, Wake), move(connecting, by=Membership._connect, meaning="back-off over")
    yield (connecting, ConnectionOpened), move(mounting, by=Membership._opened)
    yield (
        (mounting, ReplyReceived),
        move(mounting, mounted, reporting, waiting, by=Membership._mount_answered),
    )
    yield (reporting, ReplyReceived), move(reporting, mounted, by=Membership._report_answered)
    yield (mounted, Wake), move(mounted, waiting, by=Membership._beat, meaning="heartbeat due, or unanswered")
    yield (mounted, ReplyReceived), move(mounted, mounting, by=Membership._beat_answered)
    for phase in (connecting, mounting, reporting):
        yield (phase, Wake), move(waiting, by=Membership._timed_out, meaning="no answer in time")
    for phase in (waiting, connecting, mounting, reporting, mounted):
        yield (phase, ConnectionClosed), move(waiting, by=Membership._closed)
    for phase in (waiting, connecting, leaving):
        yield (phase, Leave), move(left, by=Membership._left)
    yield (waiting, ConnectionOpened), move(waiting, meaning="opened too late")
    for phase in (mounting, reporting, mounted):
        yield (phase, Leave), move(leaving, left, by=Membership._leave)
    late: tuple[type, ...] = (ConnectionClosed, ReplyReceived)
    for event in (Wake, *late):
        yield (leaving, event), move(left, by=Membership._left)
    for event in (Leave, ConnectionOpened, *late):
        yield (left, event), move(left, meaning="too late")


MOVES: StateTable[MembershipPhase] = StateTable("membership", MembershipPhase, dict(_moves()))
