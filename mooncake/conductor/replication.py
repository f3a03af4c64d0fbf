# SPDX-License-Identifier: Apache-2.0
"""What conductors report to each other, in order and without gaps, and who reports a request's end.

Each conductor sends to each other one what its clients reported to it, and nothing that it received itself
from another conductor: so every fact takes one hop and none goes round. ``FactStream`` is the sender's side
of one connection: numbered facts, and a snapshot after anything that may have been lost. ``RequestOwners``
knows for each request in flight whose reports count: those of a gateway's connection, or of the conductor
that this gateway uses. ``Replicas`` is the receiver's side of all connections. Nothing here is sent or timed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from mooncake.conductor.messages import (
    Abandoned,
    AddInstance,
    Assumed,
    BlocksRemoved,
    BlocksStored,
    Finished,
    Placed,
    Replicate,
    ReportedFact,
    SharedFact,
    Standing,
)
from mooncake.types import InstanceId

MAX_UNSENT = 20_000
"""Facts that wait for a receiver; beyond it a snapshot replaces them."""

_MAX_FACTS = 512
_MAX_KEYS = 1 << 20
"""Keys of blocks in one message, about 9 MB."""

_MAX_SENDERS = 64
_MAX_ENDED = 1 << 14
"""Ends that are remembered, the latest ones: those of a minute or more in most clusters."""


class RequestOwners:
    """Which requests in flight belong to whom, and by which of their gateways' claims."""

    def __init__(self) -> None:
        self._owners: dict[str, Hashable] = {}
        self._claims: dict[str, int] = {}
        self._requests: dict[Hashable, dict[str, None]] = {}

    def owner(self, request_id: str) -> Hashable | None:
        return self._owners.get(request_id)

    def claim(self, request_id: str) -> int:
        """Number of the latest claim that named the request; 0: none has."""
        return self._claims.get(request_id, 0)

    def requests(self, owner: Hashable) -> list[str]:
        """The owner's requests, in the order in which they became its own."""
        return list(self._requests.get(owner, ()))

    def put(self, request_id: str, owner: Hashable, claim: int = 0) -> None:
        """Make ``owner`` the one whose reports about this request count, by the claim with this number."""
        claim = max(claim, self.claim(request_id))
        self.remove(request_id)
        if claim:
            self._claims[request_id] = claim
        self._owners[request_id] = owner
        self._requests.setdefault(owner, {})[request_id] = None

    def remove(self, request_id: str) -> None:
        owner = self._owners.pop(request_id, None)
        self._claims.pop(request_id, None)
        if owner is not None:
            requests = self._requests[owner]
            del requests[request_id]
            if not requests:
                del self._requests[owner]

    def drop(self, owner: Hashable) -> list[str]:
        """Forget an owner; returns the requests that it had."""
        requests = self.requests(owner)
        for request_id in requests:
            self.remove(request_id)
        return requests

    def check(self) -> None:
        assert sum(map(len, self._requests.values())) == len(self._owners)
        assert all(one in self._owners for one in self._claims)
        for owner, requests in self._requests.items():
            assert requests and all(self._owners[one] == owner for one in requests)


class FactStream:
    """The facts for one receiver. A snapshot begins each connection, so without one no facts are kept."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[float, SharedFact]] = deque()
        self._next = 0
        self._sent: tuple[int, int] | None = None
        """Number of the first fact after the message under way, and how many of ``_unsent`` are in it."""
        self._needs_snapshot = True

    @property
    def has_facts(self) -> bool:
        return bool(self._unsent)

    def lag_s(self, now: float) -> float:
        """Age of the oldest fact that was not acknowledged; 0 with none."""
        return now - self._unsent[0][0] if self._unsent else 0.0

    def add(self, fact: SharedFact, now: float) -> None:
        if self._needs_snapshot:
            return  # the snapshot will include it
        self._unsent.append((now, fact))
        if len(self._unsent) > MAX_UNSENT:
            self.lost()

    def message(
        self,
        sender: Standing,
        snapshot: Callable[[], tuple[Sequence[SharedFact], Iterable[SharedFact]]],
        now: float,
    ) -> Replicate:
        """The next message; its answer, or its loss, is to be reported before the one after it.

        ``snapshot`` returns the present state, and facts that follow it in further messages.
        """
        if self._needs_snapshot:
            facts, later = snapshot()
            self._needs_snapshot = False
            self._unsent.extend((now, fact) for fact in later)
            self._sent = self._next + len(facts), 0
            return Replicate(sender, self._next, list(facts), is_snapshot=True)
        taken: list[SharedFact] = []
        num_keys = 0
        for _, fact in self._unsent:
            num_keys += _num_keys(fact)
            if taken and (len(taken) == _MAX_FACTS or num_keys > _MAX_KEYS):
                break
            taken.append(fact)
        self._sent = self._next + len(taken), len(taken)
        return Replicate(sender, self._next, taken)

    def acknowledged(self, wanted: int) -> bool:
        """Take the answer to the message under way; False when a snapshot must follow."""
        sent, self._sent = self._sent, None
        if sent is None or wanted != sent[0]:
            self.lost()
            return False
        self._next = sent[0]
        for _ in range(sent[1]):
            self._unsent.popleft()
        return True

    def lost(self) -> None:
        """Forget what was not acknowledged: the receiver may have it or not, so a snapshot follows."""
        self._unsent.clear()
        self._sent = None
        self._needs_snapshot = True


class Replicas:
    """The receiver's side: the streams of all other conductors, and the owners of all requests in flight.

    Owners are connections of gateways, or other conductors by their ids. A gateway's report counts by
    whichever way it comes. That a gateway is lost counts only from the conductor that owns its requests:
    after a gateway has changed over, its connection to the conductor that it left may end at any time. What a
    conductor reports late, because it stood still, must not undo that: a gateway's claims are numbered, and
    only a later one takes a request from a connection here.

    Ends are remembered with their instants. A conductor that stood still has missed them, and its snapshot
    names the requests once more.
    """

    def __init__(self, grace_s: float) -> None:
        """``grace_s``: how long the requests of a conductor that is gone wait for their gateways."""
        self.owners = RequestOwners()
        self._grace_s = grace_s
        self._next: dict[int, int] = {}
        self._received_at: dict[int, float] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()
        """By request: when it ended, the latest last."""

    def note_ended(self, request_id: str, ended_at: float) -> None:
        """Remember an end: a placement from before it does not count from now on."""
        self._ended[request_id] = max(ended_at, self.ended_at(request_id))
        self._ended.move_to_end(request_id)
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def ended_at(self, request_id: str) -> float:
        """When a request ended; -inf where no end is remembered."""
        return self._ended.get(request_id, -math.inf)

    def recent_ends(self, now: float) -> list[tuple[str, float]]:
        """The ends that are remembered, each with the seconds since then."""
        return [(request_id, max(0.0, now - ended_at)) for request_id, ended_at in self._ended.items()]

    def receive(self, message: Replicate, now: float) -> tuple[list[ReportedFact], int]:
        """The facts that count, in order, and the number of the fact that is expected next."""
        sender = message.sender.id
        self._received_at[sender] = now
        if not message.is_snapshot and self._next.get(sender) != message.first:
            return [], -1
        self._next.pop(sender, None)
        self._next[sender] = message.first + len(message.facts)
        if len(self._next) > _MAX_SENDERS:
            del self._next[next(iter(self._next))]
        facts: list[ReportedFact] = []
        ended: dict[str, None] = {}
        if message.is_snapshot:
            ended = dict.fromkeys(self.owners.requests(sender))
            for request_id, age_s in message.ended:
                self.note_ended(request_id, now - max(0.0, age_s))
        for fact in message.facts:
            if isinstance(fact, Placed):
                request_id = fact.place.request_id
                if message.is_snapshot and now - fact.age_s <= self.ended_at(request_id):
                    continue  # the sender has missed its end
                if not self._is_taken_from_owner(fact, sender):
                    continue
                ended.pop(request_id, None)
                self.owners.put(request_id, sender, fact.claim)
            elif isinstance(fact, Abandoned):
                if self.owners.owner(fact.request_id) != sender:
                    continue
                fact = Finished(fact.request_id)
            elif isinstance(fact, Finished):
                self.note_ended(fact.request_id, now)
            if isinstance(fact, Finished):
                self.owners.remove(fact.request_id)
            facts.append(fact)
        for request_id in ended:
            self.owners.remove(request_id)
        return [*(Finished(request_id) for request_id in ended), *facts], self._next[sender]

    def _is_taken_from_owner(self, placed: Placed, sender: int) -> bool:
        """Whether another conductor's placement counts although the request may have an owner already."""
        owner, claim = self.owners.owner(placed.place.request_id), self.owners.claim(placed.place.request_id)
        if owner is None or owner == sender:
            return True
        if isinstance(owner, int):
            return placed.claim >= claim
        return placed.claim > claim  # else its gateway has changed over to this conductor

    def removed_members(self, message: Replicate, members: Iterable[InstanceId]) -> list[InstanceId]:
        """Members here that are none in the leader's snapshot.

        A leader without any was just started and leads because it reached neither gateways nor this conductor
        before: gateways will add the instances to it. To remove them here would drop their index, too.
        """
        if not (message.is_snapshot and message.sender.is_leader):
            return []
        there = {fact.instance for fact in message.facts if isinstance(fact, AddInstance)}
        return [one for one in members if one not in there] if there else []

    def expired(self, now: float) -> list[str]:
        """Drop the requests of conductors that are gone if no gateway has reported them; returns these."""
        found: list[str] = []
        for sender, received_at in list(self._received_at.items()):
            if now - received_at >= self._grace_s:
                del self._received_at[sender]
                self._next.pop(sender, None)
                found += self.owners.drop(sender)
        return found

    def check(self) -> None:
        self.owners.check()
        assert len(self._next) <= _MAX_SENDERS
        assert len(self._ended) <= _MAX_ENDED


def settled_members(
    facts: Sequence[ReportedFact], message: Replicate, members: Sequence[InstanceId], is_leader: bool
) -> list[ReportedFact]:
    """The facts of a message, with the members of a snapshot as far as they count here.

    The leader's are those of all conductors: its snapshot also ends drains and changes roles. Those of
    another one, which may lack the latest changes, remind of instances; where this conductor leads
    (``is_leader``) and has ``members``, an instance that it lacks was removed here, or its gateway is about
    to add it.
    """
    if not message.is_snapshot:
        return [*facts]
    settled: list[ReportedFact] = []
    for fact in facts:
        if isinstance(fact, AddInstance):
            if is_leader and members and fact.instance not in members:
                continue
            is_reminder = is_leader or not message.sender.is_leader
            fact = msgspec.structs.replace(fact, is_reminder=is_reminder)
        settled.append(fact)
    return settled


def _num_keys(fact: SharedFact) -> int:
    if isinstance(fact, Placed):
        return len(fact.place.keys)
    return len(fact.keys) if isinstance(fact, Assumed | BlocksStored | BlocksRemoved) else 0
