# SPDX-License-Identifier: Apache-2.0
"""Order in which replicas leave a segment. Never a leased object, never a hard-pinned one.

Each segment has three orders, and evicts first from the first: replicas whose object stays readable
on a slower tier (*spare*), replicas with which the object is lost (*sole*), and softly pinned ones
(*pinned*, earliest pin end first). Within an order the policy decides:

* ``lru``: the object whose last lease ended first. A lookup moves that instant without touching the
  heap: an entry that turns out older than its object goes back with the true value when it
  surfaces. Since lease ends only grow, the first entry that is up to date is the least recently
  used of all, and if its lease still runs, so does every other.
* ``lfu``: the fewest lookups, plus the rank at which the last victim left, so that objects popular
  long ago age (LFU with dynamic aging: Arlitt, Cherkasova et al., "Evaluating content management
  techniques for Web proxy caches", 2000).
* ``chain``: lru, but an ancestor block never before its descendants, because a prefix is useless
  without its beginning (leaves first, as in RadixAttention: Zheng et al., "SGLang: Efficient
  Execution of Structured Language Model Programs", 2024).

A replica that can't leave for a reason that time does not remove (a hard pin, a descendant) has no
entry at all until that reason ends, so that it costs no search anything.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Generator, Iterable
from typing import Literal, TypeAlias

from mooncake.store.master.objects import Extent, StoredObject
from mooncake.store.master.segments import Segment
from mooncake.types import ObjectKey

MAX_SPARED = 4096
"""Entries skipped in one search, so that a large suspected node can't make every put slow."""

Policy: TypeAlias = Literal["lru", "lfu", "chain"]


class EvictionOrder(enum.IntEnum):
    SPARE = 0
    SOLE = 1
    PINNED = 2


Entry: TypeAlias = tuple[float, int, int, int, StoredObject, Extent]
"""(rank, object id, ticket, uses when it was entered, object, replica)."""


class EvictionQueue:
    """A heap of entries, some of which may be out of date."""

    __slots__ = ("entries", "num_dead", "order")

    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self.entries: list[Entry] = []
        self.num_dead = 0
        """Approximate number of entries that are out of date."""

    def push(self, entry: Entry) -> None:
        heapq.heappush(self.entries, entry)
        entry[5].place = (self, entry[2])

    def is_current(self, entry: Entry) -> bool:
        place = entry[5].place
        return place is not None and place[0] is self and place[1] == entry[2]

    def leave(self, extent: Extent) -> None:
        extent.place = None
        self.num_dead += 1
        if self.num_dead > 1024 and 2 * self.num_dead > len(self.entries):
            self.entries = [entry for entry in self.entries if self.is_current(entry)]
            heapq.heapify(self.entries)
            self.num_dead = 0

    def drop_top(self) -> None:
        """Remove the first entry, which is out of date."""
        heapq.heappop(self.entries)
        self.num_dead -= 1


class Eviction:
    """Every complete replica of a readable object that may ever be evicted has one current entry."""

    def __init__(self, policy: Policy = "lru") -> None:
        self._policy = policy
        self._queues: dict[Segment, tuple[EvictionQueue, EvictionQueue, EvictionQueue]] = {}
        self._num_tickets = 0
        self._age = 0.0
        """lfu: the rank of the last victim."""
        self._news: list[EvictionQueue] | None = None
        """Queues with new entries while a search waits for its victim's removal: an ancestor may be free."""
        self._children: dict[ObjectKey, dict[int, StoredObject]] = {}
        """chain: parent -> its readable children."""

    def __len__(self) -> int:
        """Number of entries, including those that are out of date."""
        return sum(len(queue.entries) for queues in self._queues.values() for queue in queues)

    # Events from the catalog

    def add(self, stored: StoredObject, now: float) -> None:
        """Add ``stored``, which has become readable."""
        if self._policy == "chain" and stored.parent:
            self._children.setdefault(stored.parent, {})[stored.object_id] = stored
        self.changed(stored, now)

    def changed(self, stored: StoredObject, now: float) -> None:
        """Update the entries after its replicas, its pins or those of its group have changed."""
        for extent in stored.extents:
            if extent.is_complete:
                self._enter(stored, extent, now)

    def left(self, stored: StoredObject, extent: Extent) -> None:
        """Remove the entry of a removed replica."""
        if extent.place is not None:
            extent.place[0].leave(extent)

    def unlinked(self, stored: StoredObject) -> None:
        """Remove a formerly readable object; its replicas have left."""
        siblings = self._children.get(stored.parent)
        if siblings is not None and siblings.pop(stored.object_id, None) is not None and not siblings:
            del self._children[stored.parent]

    def parent_of(self, stored: StoredObject) -> ObjectKey:
        """The key of the object that may have become evictable by a change of ``stored``."""
        return stored.parent if self._policy == "chain" else ""

    def forget(self, segment: Segment) -> None:
        """Remove a segment with every replica on it."""
        self._queues.pop(segment, None)

    # Queries

    def victims(
        self,
        segments: Iterable[Segment],
        now: float,
        spare: StoredObject | None = None,
        *,
        whole: bool = True,
    ) -> Generator[tuple[StoredObject, Extent], None, None]:
        """Replicas to evict from ``segments``, in order. The caller removes each, or leaves it, before the
        next. ``whole`` False: only where the object and its group stay readable."""
        places = [self._queues[segment] for segment in segments if segment in self._queues]
        for queues in places:
            self._end_pins(queues[EvictionOrder.PINNED], now)
        for order in EvictionOrder if whole else (EvictionOrder.SPARE,):
            yield from self._merge([queues[order] for queues in places], now, spare, whole)

    def coldest(self, segment: Segment, limit: int) -> list[StoredObject]:
        """Objects that are lost with their replica on ``segment``, roughly in order of eviction.

        Leased ones are included: this is for copying ahead of need.
        """
        found: list[StoredObject] = []
        set_aside: list[Entry] = []
        queue = (
            self._queues[segment][EvictionOrder.SOLE]
            if segment in self._queues
            else EvictionQueue(EvictionOrder.SOLE)
        )
        while len(found) < limit:
            entry = self._surface(queue)
            if entry is None:
                break
            set_aside.append(heapq.heappop(queue.entries))
            found.append(entry[4])
        for entry in set_aside:
            heapq.heappush(queue.entries, entry)
        return found

    # The orders

    def _merge(
        self, queues: list[EvictionQueue], now: float, spare: StoredObject | None, whole: bool
    ) -> Generator[tuple[StoredObject, Extent], None, None]:
        """Merge the queues: repeatedly the first entry of all."""
        numbers = {queue: number for number, queue in enumerate(queues)}
        heads = [(*queue.entries[0][:2], number, queue) for queue, number in numbers.items() if queue.entries]
        heapq.heapify(heads)
        spared: list[tuple[EvictionQueue, Entry]] = []
        try:
            while heads and len(spared) < MAX_SPARED:
                rank, object_id, number, queue = heads[0]
                entry = self._surface(queue)
                if entry is None:
                    heapq.heappop(heads)
                    continue
                if entry[:2] > (rank, object_id):
                    heapq.heapreplace(heads, (*entry[:2], number, queue))
                    continue
                stored, extent = entry[4], entry[5]
                if self._is_misplaced(entry, queue, now):
                    self._enter(stored, extent, now)
                elif stored.leased_until > now:
                    if self._policy != "lfu" and queue.order is not EvictionOrder.PINNED:
                        heapq.heappop(heads)  # so is everything behind it
                        continue
                elif self._children and self.is_blocked(stored, extent):
                    heapq.heappop(queue.entries)  # until a descendant leaves
                    extent.place = None
                    continue
                elif (
                    stored is not spare
                    and extent.held_until <= now
                    and (whole or stored.all_have_slower(extent))
                ):
                    self._age = entry[0] if self._policy == "lfu" else 0.0
                    self._news = []
                    yield stored, extent
                    for other in self._news:
                        if other.entries and other in numbers:
                            heapq.heappush(heads, (*other.entries[0][:2], numbers[other], other))
                    self._news = None
                if extent.place is not None and queue.entries and queue.entries[0] is entry:
                    spared.append((queue, heapq.heappop(queue.entries)))
        finally:
            self._news = None
            for queue, entry in spared:
                if queue.is_current(entry):
                    heapq.heappush(queue.entries, entry)

    def _surface(self, queue: EvictionQueue) -> Entry | None:
        """The first entry that is up to date."""
        while queue.entries:
            entry = queue.entries[0]
            if not queue.is_current(entry):
                queue.drop_top()
                continue
            rank, object_id, ticket, uses, stored, extent = entry
            if queue.order is EvictionOrder.PINNED or not self._has_aged(rank, uses, stored):
                return entry
            true = (self._rank(stored), object_id, ticket, stored.num_uses, stored, extent)
            heapq.heapreplace(queue.entries, true)
        return None

    def _has_aged(self, rank: float, uses: int, stored: StoredObject) -> bool:
        return stored.num_uses != uses if self._policy == "lfu" else stored.leased_until > rank

    def _rank(self, stored: StoredObject) -> float:
        return self._age + stored.num_uses if self._policy == "lfu" else stored.leased_until

    def _is_misplaced(self, entry: Entry, queue: EvictionQueue, now: float) -> bool:
        """Whether its group's soft pin has changed since it was entered."""
        pinned_until = entry[4].pinned_until
        return pinned_until != entry[0] if queue.order is EvictionOrder.PINNED else pinned_until > now

    def is_blocked(self, stored: StoredObject, extent: Extent) -> bool:
        """Whether descendants prevent its eviction.

        Children that don't are moved behind the others: each time one of thousands that have left memory is
        passed over, all would be until the next one leaves.
        """
        children, stays_readable = self._children.get(stored.key, {}), stored.has_slower(extent)
        passed: list[int] = []
        for number, child in children.items():
            is_joint = child is stored or (child.joint is not None and child.joint is stored.joint)
            if not is_joint and (not stays_readable or child.complete(extent.segment.tier)):
                break
            passed.append(number)
        else:
            return False
        for number in passed:
            children[number] = children.pop(number)
        return True

    def _end_pins(self, queue: EvictionQueue, now: float) -> None:
        while queue.entries:
            entry = queue.entries[0]
            if not queue.is_current(entry):
                queue.drop_top()
            elif entry[0] <= now:
                self._enter(entry[4], entry[5], now)
            else:
                break

    def _enter(self, stored: StoredObject, extent: Extent, now: float) -> None:
        """Give the replica its entry, or none; an older entry is out of date."""
        if extent.place is not None:
            extent.place[0].leave(extent)
        if not stored.may_be_evicted:
            return
        rank, pinned_until = self._rank(stored), stored.pinned_until
        order = (
            EvictionOrder.SPARE
            if len(stored.extents) > 1 and stored.has_slower(extent)
            else EvictionOrder.SOLE
        )
        if pinned_until > now:
            rank, order = pinned_until, EvictionOrder.PINNED
        queues = self._queues.get(extent.segment)
        if queues is None:
            queues = self._queues[extent.segment] = (
                EvictionQueue(EvictionOrder.SPARE),
                EvictionQueue(EvictionOrder.SOLE),
                EvictionQueue(EvictionOrder.PINNED),
            )
        self._num_tickets += 1
        entry = (rank, stored.object_id, self._num_tickets, stored.num_uses, stored, extent)
        queues[order].push(entry)
        if self._news is not None:
            self._news.append(queues[order])

    def check(self, readable: dict[ObjectKey, StoredObject]) -> None:
        """Assert that each replica that may leave has exactly one current entry, in the right order."""
        entered: dict[int, EvictionOrder] = {}
        for segment, queues in self._queues.items():
            for order, queue in zip(EvictionOrder, queues, strict=True):
                current = [entry for entry in queue.entries if queue.is_current(entry)]
                for rank, _, _, _, stored, extent in current:
                    assert extent.segment is segment and extent in stored.extents, (stored, extent)
                    assert readable.get(stored.key) is stored, stored
                    assert id(extent) not in entered, (stored, extent)
                    if self._policy != "lfu" and order is not EvictionOrder.PINNED:
                        assert rank <= stored.leased_until, stored
                    entered[id(extent)] = order
        for stored in readable.values():
            for extent in stored.complete():
                entry = entered.get(id(extent))
                if not stored.may_be_evicted:
                    assert entry is None, stored
                elif entry is None:
                    assert self._children.get(stored.key), f"{stored} can never be evicted"
                elif entry is not EvictionOrder.PINNED:
                    assert (entry is EvictionOrder.SPARE) == stored.has_slower(extent), (stored, extent)
        if self._policy == "chain":
            children = {s.object_id for s in readable.values() if s.parent}
            assert children == {number for known in self._children.values() for number in known}
