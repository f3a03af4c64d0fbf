# SPDX-License-Identifier: Apache-2.0
"""Which of several conductors leads, decided from what they state to each other; no service is needed.

A leader states its term several times per ``lease_s``. A follower that receives no such statement for
``lease_s`` leads with the next term, unless another follower that it still receives statements from ranks
higher. Of two leaders the one with the lower term follows (of equal terms the one with the lower id).

A follower that was itself stopped for longer than its lease has statements that it has not read: it reads for
another half a lease before it decides. It would else replace a leader that it was only unable to receive
from, and of the two it is the one that may lack facts.

While a network is divided there can be two leaders. This is allowed on purpose: a placement is a hint. Two
leaders place requests without knowing of each other's latest ones, which costs efficiency and never a right
answer, and a conductor that does not lead answers all the same. So there is no quorum and no lease in an
external service, whose loss would be one more reason for not being able to place a request. When the
network is whole again, the terms decide.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from mooncake.conductor.messages import MAX_TERM, Standing
from mooncake.machine import Wake

_STORY_LINES = 100
_MOST_PEERS = 64
_LATE_PART = 4
"""A follower that wakes this part of a lease too late was stopped, or its machine is overloaded."""


@dataclass(frozen=True, slots=True)
class StandingReceived:
    """A conductor stated its standing."""

    standing: Standing


@dataclass(frozen=True, slots=True)
class ConductorLeaderChanged:
    """Another conductor leads now."""

    leader: int
    term: int
    is_own: bool
    is_takeover: bool
    "This conductor leads in place of another one that did."
    reason: str


class ConductorLeadership:
    """The standing of one conductor among several."""

    def __init__(self, own_id: int, lease_s: float, now: float, *, is_alone: bool) -> None:
        """``is_alone``: there are no others, so it leads at once."""
        self.standing = Standing(own_id, int(is_alone), is_alone)
        self.leader: int | None = own_id if is_alone else None
        """The id of the leader, as far as it is known."""
        self._lease_s = lease_s
        self._until = now + lease_s
        """A follower leads after this instant."""
        self._has_waited = False
        """It has waited once more since the leader's last statement, because it had woken late."""
        self._others: dict[int, tuple[Standing, float]] = {}
        self._story: deque[tuple[float, str]] = deque(maxlen=_STORY_LINES)

    def __repr__(self) -> str:
        return f"<ConductorLeadership {self.standing} of leader {self.leader}>"

    def handle(self, event: StandingReceived | Wake, now: float) -> list[ConductorLeaderChanged]:
        return self._wake(now) if isinstance(event, Wake) else self._received(event.standing, now)

    def deadline(self) -> float | None:
        return None if self.standing.is_leader else self._until

    def check(self) -> None:
        assert self.standing.is_leader == (self.leader == self.standing.id)
        assert self.standing.term > 0 or self.leader is None
        assert len(self._others) <= _MOST_PEERS

    def story(self, key: str) -> list[str]:
        """The changes of the leader; there is one key only."""
        return [f"{now:.3f} {text}" for now, text in self._story]

    def _received(self, other: Standing, now: float) -> list[ConductorLeaderChanged]:
        own = self.standing
        if other.id == own.id:
            return []
        self._others.pop(other.id, None)
        self._others[other.id] = (other, now)
        if len(self._others) > _MOST_PEERS:
            del self._others[next(iter(self._others))]
        if not other.is_leader:
            return []
        if (other.term, other.id) < (own.term, self.leader or 0):
            return []  # it will follow when it receives our statement, or the leader's
        self._until, self._has_waited = now + self._lease_s, False
        if other.id == self.leader and other.term == own.term:
            return []
        reason = "its term is higher" if own.is_leader else "it states that it leads"
        self.standing = Standing(own.id, other.term)
        return [self._changed(other.id, False, reason, now)]

    def _wake(self, now: float) -> list[ConductorLeaderChanged]:
        own = self.standing
        if own.is_leader or now < self._until:
            return []
        if now - self._until > self._lease_s / _LATE_PART and not self._has_waited:
            self._until, self._has_waited = now + self._lease_s / 2, True
            return []
        for other, received_at in self._others.values():
            is_present = now - received_at < self._lease_s and other.id != self.leader
            if is_present and (other.term, other.id) > (own.term, own.id):
                self._until = now + self._lease_s
                return []
        reason = f"no leader stated its term for {self._lease_s:g} s"
        is_takeover = self.leader is not None
        self.standing = Standing(own.id, min(own.term + 1, MAX_TERM), True)
        return [self._changed(own.id, is_takeover, reason, now)]

    def _changed(self, leader: int, is_takeover: bool, reason: str, now: float) -> ConductorLeaderChanged:
        self.leader = leader
        term = self.standing.term
        self._story.append((now, f"{leader} leads with term {term}: {reason}"))
        return ConductorLeaderChanged(leader, term, leader == self.standing.id, is_takeover, reason)
