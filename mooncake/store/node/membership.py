# SPDX-License-Identifier: Apache-2.0
"""Membership of a segment in the store: mount, heartbeat, mount again after any loss, leave.

::

    WAITING ──back-off over──▶ CONNECTING ──opened──▶ MOUNTING ──Mounted──▶ MOUNTED ⟲ heartbeats
       ▲                           │                     │  └▶ REPORTING ──▶──┤
       └──────────── refused, closed, or no answer in time (Disconnect) ──────┘

A master that does not know the segment's content receives a report of it before the first heartbeat
(REPORTING). The memory and its epoch outlive every connection: a master that knows them finds its objects
again, and for one that doesn't ``rest_s`` states how long an earlier master's grants may still be in use.
This class opens no socket: ``mounted_segment.py`` and the simulator perform its effects.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import msgspec

from mooncake.machine import Wake
from mooncake.store import messages as m
from mooncake.store.node.task_agent import reports
from mooncake.types import Tier

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
ANSWER_S = 3.0
"""Time that a connection attempt or a reply may take before the connection is dropped."""


class MembershipPhase(enum.StrEnum):
    """Phase of the membership, as in the diagram above."""

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
        if self.phase is MembershipPhase.LEFT:
            return []
        if isinstance(event, Wake):
            return self._wake(now) if self._wake_at is not None and self._wake_at <= now else []
        if isinstance(event, Leave):
            return self._leave(now)
        if isinstance(event, ConnectionClosed):
            return self._closed(event.reason, now)
        if isinstance(event, ConnectionOpened):
            return self._send_mount(now) if self.phase is MembershipPhase.CONNECTING else []
        return self._answered(event.message, now)

    def deadline(self) -> float | None:
        return self._wake_at

    def check(self) -> None:
        assert (self._wake_at is None) == (self.phase is MembershipPhase.LEFT), (self.phase, self._wake_at)
        assert FIRST_BACKOFF_S <= self._backoff_s <= MAX_BACKOFF_S

    def story(self, key: str) -> list[str]:
        """Last phases of the membership; ``key`` is the name of the segment."""
        return list(self._lines) if key == self._mount.segment else []

    def _wake(self, now: float) -> list[Effect]:
        if self.phase is MembershipPhase.WAITING:
            self._enter(MembershipPhase.CONNECTING, now, ANSWER_S)
            return [Connect()]
        if self.phase is MembershipPhase.MOUNTED and not self._is_beat_open:
            self._is_beat_open = True
            self._wake_at = now + ANSWER_S
            return [Send(m.Heartbeat(self._mount.segment, self._mount.epoch))]
        if self.phase is MembershipPhase.LEAVING:
            return self._left(now)
        return [Disconnect(), *self._closed(f"no answer within {ANSWER_S} s", now)]

    def _answered(self, message: msgspec.Struct, now: float) -> list[Effect]:
        if self.phase is MembershipPhase.LEAVING:
            return self._left(now)
        if isinstance(message, m.Mounted) and self.phase is MembershipPhase.MOUNTING:
            if message.refusal is not None:
                reason = str(message.refusal)
                return [Disconnect(), *self._closed(f"mount refused: {reason}", now)]
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
        if isinstance(message, m.Reported) and self.phase is MembershipPhase.REPORTING:
            dropped = [DropObjects(message.unwanted)] if message.unwanted else []
            return [*dropped, *(self._report(now) if self._reports else self._settle(now))]
        if isinstance(message, m.Beat) and self.phase is MembershipPhase.MOUNTED:
            self._is_beat_open = False
            self._wake_at = now + self._heartbeat_s
            self._is_confirmed = message.is_known
            self._note_largest_id(message.last_id)
            if not message.is_known:
                return [
                    LogEvent("segment_unknown_to_master", {"segment": self._mount.segment}),
                    *self._send_mount(now),
                ]
        return []

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

    def _closed(self, reason: str, now: float) -> list[Effect]:
        if self.phase is MembershipPhase.LEAVING:
            return self._left(now)
        delay_s = self._backoff_s * self._random.uniform(0.75, 1.25)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        was = self.phase
        self._enter(MembershipPhase.WAITING, now, delay_s)
        if was is MembershipPhase.WAITING:
            return []
        fields = {"segment": self._mount.segment, "reason": reason, "retry_in_s": round(delay_s, 3)}
        return [LogEvent("master_lost" if was is MembershipPhase.MOUNTED else "mount_failed", fields)]

    def _leave(self, now: float) -> list[Effect]:
        if self._mount.tier is Tier.SSD:
            # An SSD keeps its content: the next process that serves it finds it unchanged.
            return self._left(now)
        if self.phase not in (MembershipPhase.MOUNTED, MembershipPhase.MOUNTING, MembershipPhase.REPORTING):
            return self._left(now)
        self._enter(MembershipPhase.LEAVING, now, ANSWER_S)
        return [Send(m.Unmount(self._mount.segment, self._mount.epoch))]

    def _left(self, now: float) -> list[Effect]:
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
