# SPDX-License-Identifier: Apache-2.0
"""Requests that wait: for space that demotion is about to free, for a copy on SSD, and for nodes.

**Space.** Where objects without a copy on SSD may not be evicted (``evict_undemoted`` off), full memory is
not full for long: objects are being copied to SSD, and leave when they are there. A writer with a waiting
time (``PutStart.wait_s``; clients set it for durable puts) is not refused meanwhile. Its put is tried again
whenever a demotion ends, in order of arrival, and refused when its time is over or when no demotion is under
way, because then waiting is useless. A writer counts the time for writing from its request, so a put waits no
longer than for half of ``put_s``.

**Durability.** A durable object is readable at once; only its writer waits for the answer to its last
request, because that means that the bytes outlive the process. ``tiering.py`` plans the copy when the object
becomes readable, and retries it if it fails. A writer that would wait too long is refused, at once where the
disks of all nodes are full, and the object stays in memory; a durable one that it replaced is kept until it
is on SSD, or restored when it is lost (``catalog.confirm``). The next durable put of the key is refused, as
it is not on SSD (``put.py``).

**Nodes.** A master that took over knows which objects there are before their nodes have mounted. Until then
(``Segments.awaited``) it does not answer that such an object is missing, and refuses no put because those
nodes are away: these requests wait, and are answered when the nodes are back or their time is over. One of an
unknown key, or of an object that another node has too, does not wait. A put waits for ``HOLD_S`` at a
time; then the answer is a failure after which its client sends it again. Otherwise a put that its client has
given up would reserve space later, and other puts of the key would be refused until that reservation ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeAlias

import msgspec

from mooncake.errors import PeerLost, Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import ObjectRemoved, ReplicaCompleted
from mooncake.store.master.effects import Received, Reply
from mooncake.store.master.objects import StoredObject, scoped_all
from mooncake.store.master.placement import SegmentPlacement
from mooncake.store.master.segments import Segment
from mooncake.types import ObjectKey, Tier

MAX_WAITING = 1024
HOLD_S = 0.5
"""How long a put waits for nodes until its client has to repeat it."""
MAX_HELD = 1 << 16
"""Requests that wait for nodes; more are answered at once."""


@dataclasses.dataclass(slots=True, eq=False)
class _WaitingPut:
    event: Received
    until: float
    retry: Callable[[float], bool]
    """Try the missing keys again; returns whether some are still missing."""
    answer: Callable[[float], m.PutStarted]
    must_last: bool
    """Like ``Catalog.must_last``: one of the objects exists already, and is durable."""


class PutQueue:
    """A clock of the catalog. ``is_freeing()``: whether demotions are under way that will free space."""

    def __init__(self, catalog: Catalog, is_freeing: Callable[[], bool]) -> None:
        self._catalog = catalog
        self._is_freeing = is_freeing
        self._waiting: list[_WaitingPut] = []
        """In order of arrival."""
        self._has_news = False
        self.on_end: Callable[[msgspec.Struct, msgspec.Struct], None] = lambda message, reply: None
        """Called with requests that were not answered at once, and their answers."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def may_wait(self, wait_s: float) -> bool:
        return wait_s > 0 and len(self._waiting) < MAX_WAITING and self._is_freeing()

    def wait(
        self,
        event: Received,
        wait_s: float,
        retry: Callable[[float], bool],
        answer: Callable[[float], m.PutStarted],
        now: float,
    ) -> None:
        until = now + min(wait_s, self._catalog.settings.put_s / 2)
        self._waiting.append(_WaitingPut(event, until, retry, answer, self._catalog.must_last))

    def demoted(self) -> None:
        """A demotion has ended, with or without success."""
        self._has_news = bool(self._waiting)

    def deadline(self) -> float | None:
        if self._has_news:
            return -math.inf
        return min((one.until for one in self._waiting), default=None)

    def expire(self, now: float) -> None:
        has_news, self._has_news = self._has_news, False
        is_freeing = self._is_freeing()
        left: list[_WaitingPut] = []
        for one in self._waiting:
            self._catalog.must_last = one.must_last
            is_missing = one.retry(now) if has_news else True
            one.must_last = self._catalog.must_last
            if is_missing and is_freeing and one.until > now:
                left.append(one)
                continue
            reply = one.answer(now)
            self.on_end(one.event.message, reply)
            self._catalog.replies.append(Reply(one.event.origin, reply, one.must_last))
        self._waiting = left

    def check(self) -> None:
        assert len(self._waiting) <= MAX_WAITING
        assert self._waiting or not self._has_news

    def __repr__(self) -> str:
        return f"<PutQueue {len(self._waiting)} waiting>"


@dataclasses.dataclass(eq=False)
class PendingPut:
    """One put-end, or a put of written objects, without an answer."""

    event: Received
    answer: Callable[[list[bool | Refusal]], msgspec.Struct]
    """The answer with these outcomes."""
    outcomes: list[bool | Refusal]
    waiting: dict[int, list[int]]
    """Indices in ``outcomes`` by object id."""
    deadline: float


class DurablePuts:
    """Holds those answers. A clock of the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._parked: dict[PendingPut, None] = {}
        """In order of their deadlines."""
        self._by_object: dict[int, list[PendingPut]] = {}
        """The parked ones that wait for an object, by its id."""
        self._failures: dict[int, Refusal] = {}
        """Why the last copy of such an object failed, by its id."""
        self.on_end: Callable[[msgspec.Struct, msgspec.Struct], None] = lambda message, reply: None
        """As in ``PutQueue``."""
        catalog.clocks.append(self)
        catalog.observe({ReplicaCompleted: self._completed, ObjectRemoved: self._removed})

    def is_awaited(self, stored: StoredObject) -> bool:
        """Whether the answer to its writer must wait."""
        return stored.policy.is_durable and not stored.complete(Tier.SSD)

    def park(
        self,
        event: Received,
        answer: Callable[[list[bool | Refusal]], msgspec.Struct],
        outcomes: list[bool | Refusal],
        waiting: dict[int, StoredObject],
        now: float,
    ) -> None:
        """Answer when these objects are on SSD; ``waiting`` has them by their index in ``outcomes``."""
        places: dict[int, list[int]] = {}
        for index, stored in waiting.items():
            places.setdefault(stored.object_id, []).append(index)
        deadline = now + self._catalog.settings.put_s
        parked = PendingPut(event, answer, outcomes, places, deadline)
        self._parked[parked] = None
        for object_id in places:
            self._by_object.setdefault(object_id, []).append(parked)
        self._catalog.keeps_deadline = False

    def copy_failed(self, stored: StoredObject, refusal: Refusal) -> None:
        """A copy of this object to SSD was given up. Another one may be planned, but is not waited for if the
        disk of every node is full: it may be so for long, and the writer would not learn the reason."""
        if stored.object_id not in self._by_object:
            return
        ssds = [one for one in self._catalog.alive(Tier.SSD) if not one.is_draining]
        if ssds and all(one.disk_full for one in ssds):
            self._end(stored, Refusal("no_ssd", f"no copy is on SSD: {refusal}"))
        else:
            self._failures[stored.object_id] = refusal

    def _completed(self, event: ReplicaCompleted) -> None:
        if event.extent.segment.tier is Tier.SSD and event.stored.policy.is_durable:
            self._catalog.confirm(event.stored, event.now)
            self._end(event.stored, None)

    def _removed(self, event: ObjectRemoved) -> None:
        if event.stored.policy.is_durable:
            reason = "the object was removed before a copy of it was on SSD"
            self._end(event.stored, Refusal("no_ssd", reason))

    def _end(self, stored: StoredObject, refusal: Refusal | None) -> None:
        self._failures.pop(stored.object_id, None)
        for parked in self._by_object.pop(stored.object_id, ()):
            self._settle(parked, stored.object_id, refusal)

    def _settle(self, parked: PendingPut, object_id: int, refusal: Refusal | None) -> None:
        for index in parked.waiting.pop(object_id):
            if refusal is not None:
                parked.outcomes[index] = refusal
                self._catalog.counts.refused_puts += 1
        if not parked.waiting:
            del self._parked[parked]
            answer = parked.answer(parked.outcomes)
            self.on_end(parked.event.message, answer)
            self._catalog.replies.append(Reply(parked.event.origin, answer, must_last=True))

    def deadline(self) -> float | None:
        return next((parked.deadline for parked in self._parked), None)

    def check(self) -> None:
        waited_for = {(object_id, parked) for parked in self._parked for object_id in parked.waiting}
        assert waited_for == {(one, parked) for one, found in self._by_object.items() for parked in found}
        assert all(parked.waiting for parked in self._parked)
        assert self._failures.keys() <= self._by_object.keys()

    def expire(self, now: float) -> None:
        late = list(itertools.takewhile(lambda parked: parked.deadline <= now, self._parked))
        for parked in late:
            for object_id in list(parked.waiting):
                others = self._by_object[object_id]
                others.remove(parked)
                reason = "no copy was on SSD in time"
                if object_id in self._failures:
                    reason += f"; the last one failed: {self._failures[object_id]}"
                if not others:
                    del self._by_object[object_id]
                    self._failures.pop(object_id, None)
                self._settle(parked, object_id, Refusal("no_ssd", reason))


Awaited: TypeAlias = Segment | str | None
"""What a request waits for: a segment; space on any segment of a host, by its name; None: space anywhere."""


@dataclasses.dataclass(slots=True, eq=False)
class _HeldRequest:
    event: Received
    number: int
    """In order of arrival."""
    until: float
    is_held: bool = True


class NodeReturns:
    """Holds requests that depend on nodes which have yet to mount here. A clock of the catalog.

    ``answer(event, now)``: handle the request and return its reply, or None if that comes later.
    """

    def __init__(self, catalog: Catalog, answer: Callable[[Received, float], msgspec.Struct | None]) -> None:
        self._catalog = catalog
        self._answer = answer
        self._held: dict[Awaited, list[_HeldRequest]] = {}
        """Only those that wait for a node, or for space anywhere, are looked at again when it returns:
        thousands of nodes may return while thousands of requests wait, each for many keys."""
        self._puts: deque[_HeldRequest] = deque()
        """Held puts in order of arrival, so that the first is failed first; some are answered already."""
        self._returned: dict[Segment, None] = {}
        """Segments that returned, or are awaited no longer, since ``expire``."""
        self._numbers = itertools.count()
        self.num_held = 0
        catalog.segments.on_return = self._on_return

    def holds(self, event: Received, now: float) -> bool:
        """Whether the request waits; then its reply follows later."""
        if self.num_held >= MAX_HELD:
            return False
        waits, awaited = self._waits_for(event.message, now, {})
        if not waits:
            return False
        is_put = isinstance(event.message, m.PutStart | m.PutWritten)
        until = now + min(HOLD_S, self._catalog.settings.put_s / 2) if is_put else math.inf
        one = _HeldRequest(event, next(self._numbers), until)
        if is_put:
            self._puts.append(one)
        self._held.setdefault(awaited, []).append(one)
        self.num_held += 1
        return True

    def _on_return(self, segment: Segment) -> None:
        if self.num_held:
            self._returned[segment] = None

    def deadline(self) -> float | None:
        if self._returned:
            return -math.inf
        segments = self._catalog.segments
        if not segments.awaited:
            return None
        return min(segments.awaited_until, self._puts[0].until if self._puts else math.inf)

    def expire(self, now: float) -> None:
        segments = self._catalog.segments
        if segments.awaited_until <= now:
            segments.end_waiting()
        returned, self._returned = self._returned, {}
        looked_at: dict[int, _HeldRequest] = {}
        hosts = [segment.host for segment in returned]
        for awaited in (None, *returned, *hosts) if returned else ():
            looked_at |= {one.number: one for one in self._held.pop(awaited, ())}
        while self._puts and (self._puts[0].until <= now or not self._puts[0].is_held):
            one = self._puts.popleft()
            looked_at[one.number] = one
        space: dict[Hashable, tuple[float, float]] = {}
        for number in sorted(looked_at):
            if looked_at[number].is_held:
                self._look_at(looked_at[number], now, space)
        if not self.num_held:  # what is left was answered because its time was over
            self._held.clear()

    def _look_at(self, one: _HeldRequest, now: float, space: dict[Hashable, tuple[float, float]]) -> None:
        """Answer the request, or hold it on."""
        message = one.event.message
        waits, awaited = self._waits_for(message, now, space)
        if waits and one.until > now:
            self._held.setdefault(awaited, []).append(one)
            return
        one.is_held = False
        self.num_held -= 1
        self._catalog.must_last = False
        reply: msgspec.Struct | None
        if waits:
            reply = Failure(PeerLost.code, "a node that it needs has not mounted at the new master yet")
            if isinstance(message, m.PutStart | m.PutWritten):
                self._catalog.counts.refused_puts += len(message.keys)
        else:
            reply = self._answer(one.event, now)
        if reply is not None:
            self._catalog.replies.append(Reply(one.event.origin, reply, self._catalog.must_last))

    def _waits_for(
        self, message: msgspec.Struct, now: float, space: dict[Hashable, tuple[float, float]]
    ) -> tuple[bool, Awaited]:
        """Whether the request has to wait, and for what."""
        hidden: Segment | None = None
        if not self._catalog.segments.awaited:
            return False, None
        if isinstance(message, m.LookupObjects | m.Exists | m.Renew | m.PutWritten):
            hidden = self._hidden_on(message.tenant, message.keys)
        elif isinstance(message, m.PutStart):
            hidden = None if message.replace else self._hidden_on(message.tenant, message.keys)
            if hidden is None:
                near = message.host if message.policy.is_same_host else None
                return self._needs_space(message, now, space), near
        return hidden is not None, hidden

    def _hidden_on(self, tenant: str, keys: list[ObjectKey]) -> Segment | None:
        """A segment that is not mounted yet and has one of these objects, which no mounted one has."""
        readable = self._catalog.objects.readable
        for key in scoped_all(tenant, keys):
            stored = readable.get(key)
            if stored is None or stored.is_visible:
                continue
            for extent in stored.extents:
                if extent.is_complete and extent.segment.was_restored:
                    return extent.segment
        return None

    def _needs_space(
        self, message: m.PutStart, now: float, space: dict[Hashable, tuple[float, float]]
    ) -> bool:
        """Whether no segment that takes objects now is large enough for all of them, but an awaited one may
        be. ``space``: what was found for other requests at this instant."""
        policy = message.policy
        place = policy.is_durable, policy.is_same_host and message.host, tuple(message.avoid)
        if place not in space:
            space[place] = self._largest(message, now)
        present, awaited = space[place]
        return present < max(message.sizes, default=0) <= awaited

    def _largest(self, message: m.PutStart, now: float) -> tuple[float, float]:
        """Size of the largest object for which there can be space now, and with the awaited segments."""
        segments, policy = self._catalog.segments, message.policy
        placement = SegmentPlacement(segments, message.host, message.avoid, now, policy)
        largest_bytes = 0.0
        for segment in segments.on(message.host) if policy.is_same_host else segments.awaited.values():
            if segments.awaited.get(segment.name) is not segment:
                continue
            if segment.tier is Tier.SSD and policy.is_durable:
                largest_bytes = math.inf  # the memory of its node takes durable objects with it
            elif segment.tier is Tier.MEMORY and segment.name not in message.avoid:
                largest_bytes = max(largest_bytes, segment.allocator.size_bytes)
        return placement.largest_bytes, largest_bytes

    def check(self) -> None:
        awaited, held = self._catalog.segments.awaited, 0
        for what, those in self._held.items():
            held += sum(one.is_held for one in those)
            is_awaited = not isinstance(what, Segment) or awaited.get(what.name) is what
            assert is_awaited or what in self._returned, what
        assert self.num_held == held <= MAX_HELD
        assert not held or awaited or self._returned

    def __repr__(self) -> str:
        return f"<NodeReturns {self.num_held} held>"
