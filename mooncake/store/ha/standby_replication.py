# SPDX-License-Identifier: Apache-2.0
"""The leader's side of replication to standbys: what each one has, and which replies may therefore be sent.

Every record the master writes down gets a number and goes to every standby: first a snapshot of the whole
state, then each record. A standby sends ``Follow`` with the number it has; the answer waits until there are
records. The master's replies wait as well, until every master that may lead next has the records they rest
on. A standby that is too slow, or lost, is first removed from the leader record's list; until that is done,
no reply is sent. A new standby goes the other way: replies wait for it first, and then it is listed.

The messages are not among the store's, because they carry the master's log records, which those do not know.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from mooncake.security.principal import NODES, Level
from mooncake.store.ha.election import Standby
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Reply
from mooncake.store.master.log_records import Record, SpaceHeld
from mooncake.store.master.snapshot import Snapshot

MAX_RECORDS = 4000
"""Maximum number of records in one answer."""
MAX_CHECKSUM_BYTES = 8 << 20
"""Maximum size of the checksums and of many places in an answer with several records: no other part may be
large."""
IDLE_S = 0.5
"""Time after which a standby gets an answer without records, so that both sides notice a lost peer."""
ANSWER_S = 4 * IDLE_S
"""How long a leader may take to answer a Follow, which it does every ``IDLE_S``."""
RETRY_S = 0.1
"""How long a standby that has lost its leader waits before it tries again."""


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """A standby has everything up to ``have`` of ``session`` (0: nothing) and wants what comes next."""

    standby: str
    address: str
    term: int
    session: int
    have: int


class Followed(msgspec.Struct, frozen=True, array_like=True, tag="followed"):
    """With these records, the standby has everything up to ``number``, if ``is_complete``.

    A ``session`` other than the requested one means that a new snapshot begins.
    """

    session: int
    number: int
    records: list[Record]
    is_complete: bool


ACCESS: dict[type[msgspec.Struct], frozenset[Level]] = {Follow: NODES}
"""Permitted senders, as in ``store.messages.ACCESS``. Only nodes may follow: a standby gets a copy of the
whole state, and replies wait for it."""


class StandbyCursor:
    """A standby's side of one connection to the leader of a term: what it requests next."""

    def __init__(self, me: Standby, term: int) -> None:
        self._me = me
        self._term = term
        self._session = self._have = 0
        self.is_in_sync = False
        """The leader has reported it complete."""

    def question(self) -> Follow:
        return Follow(self._me.id, self._me.address, self._term, self._session, self._have)

    def begins_anew(self, answer: Followed) -> bool:
        """Whether a snapshot begins with this answer. Call before ``entered``."""
        return answer.session != self._session

    def entered(self, answer: Followed) -> None:
        """The answer was entered and written down: the next request acknowledges it."""
        is_same = answer.session == self._session
        self._session, self._have = answer.session, answer.number
        self.is_in_sync = answer.is_complete or (is_same and self.is_in_sync)

    def __repr__(self) -> str:
        return f"<StandbyCursor in term {self._term}: has {self._have} of session {self._session}>"


@dataclasses.dataclass(slots=True, eq=False)
class _StandbyProgress:
    who: Standby
    session: int
    connection: Hashable
    copy: Snapshot | None
    last_message_at: float
    out: list[Record] = dataclasses.field(default_factory=list)
    """Records to be sent."""
    sent: int = 0
    acked: int = 0
    complete_at: int | None = None
    """The number with which its snapshot was complete; it has everything once that is acknowledged."""
    is_complete: bool = False
    joins_at: int | None = None
    """Once it has this number, it can be listed: no reply beyond it was sent without this standby."""
    origin: Any = None
    """The origin of its pending request, if any."""


class StandbyReplicator:
    """All standbys of one term.

    Args:
        inherited: the standbys listed as the term begins.
        eligible: ids of all masters that may lead next, without this one.
        first_session: different for each term of each master.
    """

    def __init__(
        self,
        catalog: Catalog,
        inherited: list[Standby],
        eligible: Callable[[], dict[str, None]],
        ack_s: float,
        first_session: int,
    ) -> None:
        self._catalog = catalog
        self._eligible = eligible
        self._ack_s = ack_s
        self._last_session = first_session
        self._followers: dict[str, _StandbyProgress] = {}
        self._held: deque[tuple[int, float, Reply]] = deque()
        self.listed: dict[str, Standby] = {one.id: one for one in inherited}
        """The standbys that should be in the leader record."""
        self.number = 1 if inherited else 0
        """Number of the last records. With inherited standbys, the first number stands for what this master
        had when the term began: they need not have all of it, and no reply is sent before they do."""
        self.floor = 0
        """Every master that counts has the records up to this number."""
        self._reconsider()

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def lag(self) -> int:
        """How many numbers the slowest listed standby is behind."""
        return self.number - min((self._acked(who) for who in self.listed), default=self.number)

    # Events of the master

    def keep(self, records: list[Record], now: float) -> list[Reply]:
        """Send records that were written down to the standbys."""
        self.number += 1
        answers: list[Reply] = []
        for follower in self._followers.values():
            follower.out += records if follower.copy is None else follower.copy.between(records)
            answers += self._answer(follower, now)
        self._reconsider()
        return answers

    def say(self, reply: Reply, now: float, *, may_go: bool = True) -> list[Reply]:
        """Return the reply if it may be sent now; otherwise hold it."""
        if may_go and self.floor >= self.number and not self._held:
            return [reply]
        self._held.append((self.number, now, reply))
        return []

    def let_go(self) -> list[Reply]:
        """Return held replies that may be sent; call after any event of standbys or of the election."""
        self._reconsider()
        replies: list[Reply] = []
        while self._held and self._held[0][0] <= self.floor:
            replies.append(self._held.popleft()[2])
        return replies

    def withdraw(self) -> list[Reply]:
        """Return the held replies, which will not be sent."""
        held, self._held = self._held, deque()
        return [reply for _, _, reply in held]

    # Events of standbys

    def follow(self, message: Follow, origin: Any, connection: Hashable, now: float) -> list[Reply]:
        follower = self._followers.get(message.standby)
        if follower is None or follower.session != message.session or follower.connection != connection:
            self.listed.pop(message.standby, None)
            self._last_session += 1
            who = Standby(message.standby, message.address)
            follower = _StandbyProgress(who, self._last_session, connection, Snapshot(self._catalog), now)
            self._followers[message.standby] = follower
        else:
            follower.acked = max(follower.acked, min(message.have, follower.sent))
            if follower.complete_at is not None and message.have >= follower.complete_at:
                follower.is_complete = True
                if follower.joins_at is None:
                    follower.joins_at = self.number
            if follower.joins_at is not None and follower.acked >= follower.joins_at:
                self.listed[follower.who.id] = follower.who
        follower.last_message_at, follower.origin = now, origin
        return self._answer(follower, now)

    def lost(self, connection: Hashable) -> None:
        """Remove the standbys of a connection that broke."""
        for follower in [one for one in self._followers.values() if one.connection == connection]:
            self._strike(follower.who.id)

    # Time

    def deadline(self) -> float | None:
        wakes = [
            one.last_message_at + (IDLE_S if one.origin is not None else self._patience_s)
            for one in self._followers.values()
        ]
        if self._held and self._counting():
            wakes.append(self._held[0][1] + self._ack_s)
        return min(wakes, default=None)

    def expire(self, now: float) -> list[Reply]:
        """Answer requests that waited for ``IDLE_S``, and remove standbys that did not acknowledge in
        time."""
        answers: list[Reply] = []
        for follower in list(self._followers.values()):
            if follower.origin is not None and follower.last_message_at + IDLE_S <= now:
                answers += self._answer(follower, now, is_patient=False)
            elif follower.origin is None and follower.last_message_at + self._patience_s <= now:
                self._strike(follower.who.id)
        if self._held and self._held[0][1] + self._ack_s <= now:
            number = self._held[0][0]
            for who in self._counting():
                if self._acked(who) < number:
                    self._strike(who)
            # One that could not be removed yet counts until the leader record is changed; check again then.
            self._held = deque((n, max(at, now - self._ack_s * 0.9), reply) for n, at, reply in self._held)
        return answers

    def check(self) -> None:
        assert self.floor <= self.number
        assert all(number > self.floor for number, _, _ in self._held), "held for nothing"

    @property
    def _patience_s(self) -> float:
        return max(self._ack_s, 2 * IDLE_S)

    def _counting(self) -> dict[str, None]:
        """Ids of all masters whose acknowledgement is needed."""
        joining = {one.who.id: None for one in self._followers.values() if one.joins_at is not None}
        return {**self._eligible(), **joining}

    def _acked(self, who: str) -> int:
        follower = self._followers.get(who)
        return follower.acked if follower is not None and follower.is_complete else 0

    def _reconsider(self) -> None:
        self.floor = min((self._acked(who) for who in self._counting()), default=self.number)

    def _strike(self, who: str) -> None:
        self._followers.pop(who, None)
        self.listed.pop(who, None)

    def _answer(self, follower: _StandbyProgress, now: float, is_patient: bool = True) -> list[Reply]:
        if follower.origin is None:
            return []
        copy = follower.copy
        if copy is not None and len(follower.out) < MAX_RECORDS:
            follower.out += copy.piece()
            if copy.is_over:
                follower.copy = None
        if is_patient and copy is None and not follower.out and follower.sent == self.number:
            return []
        count = _fitting(follower.out)
        records, follower.out = follower.out[:count], follower.out[count:]
        if not follower.out:
            follower.sent = self.number
            if follower.copy is None and follower.complete_at is None:
                follower.complete_at = self.number
        origin, follower.origin, follower.last_message_at = follower.origin, None, now
        is_complete = follower.complete_at is not None and not follower.out
        return [Reply(origin, Followed(follower.session, follower.sent, records, is_complete))]

    def __repr__(self) -> str:
        return f"<StandbyReplicator [{len(self.listed)} listed] {self.number}, {self.floor} everywhere>"


def _fitting(records: list[Record]) -> int:
    """How many of the first records fit into one answer."""
    num_bytes = 0
    for number, record in enumerate(records[:MAX_RECORDS]):
        num_bytes += len(getattr(record, "checksums", b""))
        if isinstance(record, SpaceHeld):  # of a row of objects
            num_bytes += sum(len(segment) + 16 for segment, _ in record.places)
        if num_bytes > MAX_CHECKSUM_BYTES and number:
            return number
    return min(len(records), MAX_RECORDS)
