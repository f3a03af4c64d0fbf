# SPDX-License-Identifier: Apache-2.0
"""The connections of an HTTP server: deadlines of each phase, and which one to close when there are too many.

A connection waits for a request's header, for its body, for the end of the answer, or idles between two
requests; in addition, its peer has to read what is written to it. Each of these has a deadline, because
otherwise a peer that sends nothing, half a header, or reads nothing takes a descriptor and memory without
limit. At the limit of connections, those that have not sent a request yet are closed first, the oldest
before the others: a real client sends its header as soon as it is connected.

It opens no socket and knows no HTTP; ``http/server.py`` reports events and closes the connections it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mooncake.state_table import StateTable, move

MIB = 1 << 20

STALLED_S = 0.5
"""Time without bytes of a body after which a connection may be closed for a new one."""


class ConnectionPhase(StrEnum):
    """Event that a connection waits for."""

    HEADER = "header"
    BODY = "body"
    ANSWER = "answer"
    IDLE = "idle"
    """The next request, if there is one."""
    REFUSED = "refused"
    """The end of a body that was answered before it was read; received bytes are discarded for a moment."""


BYTES, HEADER_RECEIVED, BODY_RECEIVED, ANSWERED = (
    "bytes received",
    "header received",
    "body received",
    "last answer sent",
)
PHASE_MOVES: StateTable[ConnectionPhase] = StateTable(
    "connection of an HTTP server",
    ConnectionPhase,
    {
        # The HTTP library reports in any order, so that every pair has an entry.
        **{(phase, BYTES): move(phase) for phase in ConnectionPhase},
        **{(phase, HEADER_RECEIVED): move(ConnectionPhase.BODY) for phase in ConnectionPhase},
        **{(phase, BODY_RECEIVED): move(phase) for phase in ConnectionPhase},
        **{(phase, ANSWERED): move(ConnectionPhase.IDLE) for phase in ConnectionPhase},
        (ConnectionPhase.IDLE, BYTES): move(ConnectionPhase.HEADER),
        (ConnectionPhase.BODY, BODY_RECEIVED): move(ConnectionPhase.ANSWER),
        (ConnectionPhase.REFUSED, BODY_RECEIVED): move(ConnectionPhase.IDLE),
        (ConnectionPhase.BODY, ANSWERED): move(ConnectionPhase.REFUSED),
    },
)


@dataclass(frozen=True)
class Deadlines:
    """Time limits of a connection's phases."""

    header_s: float = 10.0
    "Time from the connection, or the first byte of a request, to the end of its header."

    body_s: float = 30.0
    "Time from the end of the header to the end of the body, and one second more for each MiB received."

    send_s: float = 30.0
    "Time in which a peer must read some of the bytes written to it."

    idle_s: float = 75.0
    "Time between two requests. Longer than clients keep connections, or one closes as its client writes."

    refused_s: float = 2.0
    "Time for a peer that still sends a refused body, so that it can read the answer."

    header_bytes: int = 64 << 10
    "Largest size of a request's header, and of the trailer after its body."


class ConnectionState:
    """State of one connection in a ``ConnectionTable``."""

    __slots__ = (
        "is_over",
        "num_header",
        "num_open",
        "num_read",
        "num_received",
        "num_unread",
        "phase",
        "read_at",
        "received_at",
        "since",
    )

    def __init__(self, now: float) -> None:
        self.phase = ConnectionPhase.HEADER
        self.since = now
        self.num_received = 0
        """Bytes received of the header or body that it waits for."""
        self.num_header = 0
        """Bytes received since the end of a header, or since bytes of a body: those of a trailer, of a
        chunk's header, or of the next header, which may come before the last answer has ended."""
        self.num_open = 0
        """Number of requests whose answers have not ended."""
        self.num_read = 0
        """Bytes that its peer has read."""
        self.num_unread = 0
        self.received_at = now
        """Time when bytes were last received from it."""
        self.read_at = now
        """Time when its peer last read some bytes, or there were none to read."""
        self.is_over = False

    def __repr__(self) -> str:
        return f"<Connection {self.phase} since {self.since:.3f}, {self.num_unread} bytes unread>"


class ConnectionTable:
    """All connections of a server, at most ``most``."""

    def __init__(self, deadlines: Deadlines, most: int) -> None:
        self.deadlines = deadlines
        self.most = max(1, most)
        self._by_phase: dict[ConnectionPhase, dict[ConnectionState, None]] = {
            phase: {} for phase in ConnectionPhase
        }

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(them)} {phase}" for phase, them in self._by_phase.items() if them)
        return f"<ConnectionTable {counts or 'none'}, at most {self.most}>"

    def __len__(self) -> int:
        return sum(map(len, self._by_phase.values()))

    @property
    def is_full(self) -> bool:
        return len(self) >= self.most

    def count(self, phase: ConnectionPhase) -> int:
        return len(self._by_phase[phase])

    def opened(self, now: float) -> ConnectionState:
        found = ConnectionState(now)
        self._by_phase[ConnectionPhase.HEADER][found] = None
        return found

    def closed(self, one: ConnectionState) -> None:
        """Harmless when repeated."""
        one.is_over = True
        self._by_phase[one.phase].pop(one, None)

    def victim(self, now: float) -> ConnectionState | None:
        """The connection to close for a new one; None while all of them are being served."""
        for phase in (ConnectionPhase.HEADER, ConnectionPhase.REFUSED, ConnectionPhase.IDLE):
            for one in self._by_phase[phase]:
                return one
        # A peer that is sending its body is not the one that blocks connections.
        silent = min(self._by_phase[ConnectionPhase.BODY], key=lambda one: one.received_at, default=None)
        return silent if silent is not None and now - silent.received_at >= STALLED_S else None

    def header_room(self, one: ConnectionState) -> int:
        """Number of bytes of a header or trailer that may still be received, in any phase: the HTTP library
        keeps them without a limit of its own."""
        return max(0, self.deadlines.header_bytes - one.num_header)

    def received(self, one: ConnectionState, num_bytes: int, now: float) -> None:
        """Record received bytes."""
        self._move(one, BYTES, now)
        one.num_received += num_bytes
        one.num_header += num_bytes
        if num_bytes:
            one.received_at = now

    def header_received(self, one: ConnectionState, now: float) -> None:
        """Record that a header is complete."""
        one.num_open += 1
        one.num_header = 0
        self._move(one, HEADER_RECEIVED, now)

    def body_part_received(self, one: ConnectionState) -> None:
        """Record that some of the received bytes were of a body."""
        one.num_header = 0

    def body_received(self, one: ConnectionState, now: float) -> None:
        """Record that a body is complete."""
        one.num_header = 0
        self._move(one, BODY_RECEIVED, now)

    def response_sent(self, one: ConnectionState, now: float) -> None:
        """Record that an answer has ended."""
        one.num_open = max(0, one.num_open - 1)
        if one.num_open:
            return  # the next request was received already
        self._move(one, ANSWERED, now)

    def read(self, one: ConnectionState, num_read: int, num_unread: int, now: float) -> None:
        """Record how much its peer has read since it connected, and how much it has not read yet."""
        if num_read > one.num_read or not num_unread:
            one.read_at = now
        one.num_read, one.num_unread = num_read, num_unread

    def overdue(self, now: float) -> list[tuple[ConnectionState, str]]:
        """Connections that have exceeded a deadline, each with the reason."""
        allowed = self.deadlines
        limits = {
            ConnectionPhase.HEADER: allowed.header_s,
            ConnectionPhase.IDLE: allowed.idle_s,
            ConnectionPhase.REFUSED: allowed.refused_s,
        }
        found: list[tuple[ConnectionState, str]] = []
        for phase, them in self._by_phase.items():
            for one in them:
                limit_s = limits.get(phase)
                if phase is ConnectionPhase.BODY:
                    limit_s = allowed.body_s + one.num_received / MIB
                if limit_s is not None and now - one.since >= limit_s:
                    found.append((one, phase.value))
                elif one.num_unread and now - one.read_at >= allowed.send_s:
                    found.append((one, "unread"))
        return found

    def check(self) -> None:
        for phase, them in self._by_phase.items():
            for one in them:
                assert one.phase is phase and not one.is_over, one

    def _move(self, one: ConnectionState, event: str, now: float) -> None:
        if one.is_over:
            return
        phase = PHASE_MOVES.next(one.phase, event)
        if phase is one.phase:
            return
        del self._by_phase[one.phase][one]
        one.phase, one.since, one.num_received = phase, now, 0
        self._by_phase[phase][one] = None
