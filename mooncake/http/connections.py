"""The connections of an HTTP server: what each may take how long for, and who goes when there are too many.

A connection waits for a request's header, for its body, for the end of the answer, or idles between two
requests; besides, its peer has to read what is written to it. Each of these has a deadline, because otherwise
a peer that sends nothing, half a header, or reads nothing costs a file and memory for as long as it likes.
When the server has as many connections as it may, whoever has asked for nothing yet goes first, the oldest
before the others: a real client sends its header as soon as it is connected.

It opens no socket and knows no HTTP; ``http/server.py`` tells it what happens and closes whom it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20

STALLED_S = 0.5
"""Who has sent nothing of its body for so long makes room for a newcomer."""


RESERVED_FILES = 64
"""Files that a process opens beside its connections: listeners, logs, the store, the model."""

MAX_CONNECTIONS = 1 << 14


def connections_within(num_files: int) -> int:
    """How many connections fit where a process may open ``num_files`` (negative: any number).

    Half of the files are left to what answering needs: a gateway has a connection to a worker for each of its
    clients.
    """
    if num_files < 0:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(8, (num_files - RESERVED_FILES) // 2))


class ConnectionPhase(StrEnum):
    """What a connection waits for."""

    HEADER = "header"
    BODY = "body"
    ANSWER = "answer"
    IDLE = "idle"
    """Its next request, if there is one."""
    REFUSED = "refused"
    """It was answered before its body was read; what still comes is thrown away, for a moment."""


@dataclass(frozen=True)
class Deadlines:
    """How long a connection may wait for what."""

    header_s: float = 10.0
    "From the connection, or the first byte of a request, to the end of its header."

    body_s: float = 30.0
    "From the end of the header to the end of the body, and one second more for each MiB received."

    send_s: float = 30.0
    "How long a peer may take nothing of what is written to it."

    idle_s: float = 75.0
    "Between two requests. Longer than clients keep connections, or one closes as its client writes."

    refused_s: float = 2.0
    "For a peer that still sends a body which was refused, so that it can read the answer."

    header_bytes: int = 64 << 10
    "The most that a request's header may have."


class ConnectionState:
    """One of them, as ``ConnectionTable`` knows it."""

    __slots__ = (
        *("heard_at", "is_over", "moved_at", "phase", "since"),
        *("num_open", "num_read", "num_received", "num_unread"),
    )

    def __init__(self, now: float) -> None:
        self.phase = ConnectionPhase.HEADER
        self.since = now
        self.num_received = 0
        """Bytes of the header or body that it waits for."""
        self.num_open = 0
        """Requests whose answers have not ended."""
        self.num_read = 0
        """Bytes that its peer has taken."""
        self.num_unread = 0
        self.heard_at = now
        """When something last came from it."""
        self.moved_at = now
        """When its peer last took some, or there was nothing to take."""
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
        """Who goes for a newcomer; None while all of them are being served."""
        for phase in (ConnectionPhase.HEADER, ConnectionPhase.REFUSED, ConnectionPhase.IDLE):
            for one in self._by_phase[phase]:
                return one
        # Who sends its body as fast as it can is not the one that holds connections.
        silent = min(self._by_phase[ConnectionPhase.BODY], key=lambda one: one.heard_at, default=None)
        return silent if silent is not None and now - silent.heard_at >= STALLED_S else None

    def received(self, one: ConnectionState, num_bytes: int, now: float) -> bool:
        """Something came. Returns whether the header is not too large so far."""
        if one.phase is ConnectionPhase.IDLE:
            self._enter(one, ConnectionPhase.HEADER, now)
        one.num_received += num_bytes
        if num_bytes:
            one.heard_at = now
        return one.phase is not ConnectionPhase.HEADER or one.num_received <= self.deadlines.header_bytes

    def header_received(self, one: ConnectionState, now: float) -> None:
        """A header is complete."""
        one.num_open += 1
        self._enter(one, ConnectionPhase.BODY, now)

    def body_received(self, one: ConnectionState, now: float) -> None:
        """A body is complete."""
        if one.phase is ConnectionPhase.BODY:
            self._enter(one, ConnectionPhase.ANSWER, now)
        elif one.phase is ConnectionPhase.REFUSED:
            self._enter(one, ConnectionPhase.IDLE, now)

    def response_sent(self, one: ConnectionState, now: float) -> None:
        """An answer has ended."""
        one.num_open = max(0, one.num_open - 1)
        if one.num_open:
            return  # the next one was asked for already
        self._enter(
            one, ConnectionPhase.REFUSED if one.phase is ConnectionPhase.BODY else ConnectionPhase.IDLE, now
        )

    def read(self, one: ConnectionState, num_read: int, num_unread: int, now: float) -> None:
        """How much its peer has taken since it connected, and how much is there for it to take."""
        if num_read > one.num_read or not num_unread:
            one.moved_at = now
        one.num_read, one.num_unread = num_read, num_unread

    def overdue(self, now: float) -> list[tuple[ConnectionState, str]]:
        """Those to be closed, each with the reason."""
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
                elif one.num_unread and now - one.moved_at >= allowed.send_s:
                    found.append((one, "unread"))
        return found

    def check(self) -> None:
        for phase, them in self._by_phase.items():
            for one in them:
                assert one.phase is phase and not one.is_over, one

    def _enter(self, one: ConnectionState, phase: ConnectionPhase, now: float) -> None:
        if one.is_over:
            return
        del self._by_phase[one.phase][one]
        one.phase, one.since, one.num_received = phase, now, 0
        self._by_phase[phase][one] = None
