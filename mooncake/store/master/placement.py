# SPDX-License-Identifier: Apache-2.0
"""Space for puts: free, or freed by eviction; never more of it than the tenant's quota allows.

The preferred segments are tried first, then the writer's own host, then those with most room.
Local first, because a block is most often read again where it was written, and a local read is a
view instead of a transfer. Beyond that the emptiest segment, which spreads a batch over the nodes
and so over their links. Further replicas go to other segments, on other hosts while there are any.

A node that just joined is the emptiest of all: without precaution every put of the cluster would go
to it, its link would be the bottleneck of all of them, and its content would be all of one age and
be evicted at once. So the free bytes of a new segment count only in part, a share that grows over
its first minute. It is a weight and no limit: where no other has room, a new segment takes everything.
(Power of two choices would need randomness, and would still send it half of the puts that draw it.)

A placement lives for one request: its weights are updated by reports of what was allocated.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
from collections.abc import Collection, Generator, Iterable
from functools import cached_property
from typing import TypeAlias

from mooncake.errors import Refusal
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.eviction import MAX_SPARED
from mooncake.store.master.objects import DEFAULT_POLICY, Extent, StoredObject
from mooncake.store.master.segments import Segment, Segments
from mooncake.store.master.tenants import Account, aligned
from mooncake.store.messages import PutPolicy
from mooncake.types import Tier

JOIN_S = 60.0
"""How long a segment counts as new."""
FIRST_SHARE = 0.1
"""Initial share of a new segment's free bytes that counts."""
ROW_BYTES = 1 << 20
"""Bytes that are put side by side while another segment could take a part of them."""

Order: TypeAlias = list[tuple[float, int, Segment]]
"""A heap of (minus the weight, tie-breaker, segment)."""
MAX_NAMED = 8
"""Segments that a refusal names."""
WATCH_SHARE = 0.005
"""Share of the capacity; the watermark is overshot by no more than this."""


def has_ssd(segments: Segments, segment: Segment, now: float) -> bool:
    """Whether the SSD of the segment's node could take a copy: one that rests takes it after the writer of a
    durable object has given up."""
    return any(s.tier is Tier.SSD and s.is_alive and s.rests_until <= now for s in segments.of(segment.node))


class SegmentPlacement:
    """The order in which one put-start tries segments."""

    def __init__(
        self,
        segments: Segments,
        host: str,
        avoid: Collection[str],
        now: float,
        policy: PutPolicy = DEFAULT_POLICY,
    ) -> None:
        self._segments = segments
        self._host = host
        self._avoid = avoid
        self._now = now
        self._policy = policy
        self.is_durable = policy.is_durable
        self._local = self._order(segments.on(host))
        wanted = (segments.mounted.get(name) for name in policy.preferred_segments)
        self._preferred = [segment for segment in wanted if segment is not None and self._covers(segment)]

    @cached_property
    def _remote(self) -> Order:
        if self._policy.is_same_host:
            return []
        return self._order(s for s in self._segments.mounted.values() if s.host != self._host)

    def _order(self, segments: Iterable[Segment]) -> Order:
        order: Order = [
            (-self._weight(segment), number, segment)
            for number, segment in enumerate(segments)
            if self._covers(segment)
        ]
        heapq.heapify(order)
        return order

    def _weight(self, segment: Segment) -> float:
        age_s = self._now - segment.joined_at
        if age_s >= JOIN_S:
            return segment.allocator.free_bytes
        return segment.allocator.free_bytes * (FIRST_SHARE + (1 - FIRST_SHARE) * age_s / JOIN_S)

    def _covers(self, segment: Segment) -> bool:
        return (
            segment.tier is Tier.MEMORY
            and segment.takes_objects(self._now)
            and segment.name not in self._avoid
            and (segment.host == self._host or not self._policy.is_same_host)
            and (not self._policy.is_durable or has_ssd(self._segments, segment, self._now))
        )

    @property
    def segments(self) -> list[Segment]:
        """Segments that this put-start may use."""
        return [segment for _, _, segment in (*self._local, *self._remote)]

    @property
    def largest_bytes(self) -> int:
        """The size of the largest object that can ever be placed on these segments."""
        every = (*self._local, *self._remote)
        return max((segment.allocator.size_bytes for _, _, segment in every), default=0)

    def allocate(self, size_bytes: int) -> tuple[Segment, int] | None:
        """Return a segment and an offset in it, or None when no segment has a hole that large."""
        for segment in self._preferred:
            offset = segment.allocator.allocate(size_bytes)
            if offset is not None:
                self.freed(segment)
                return segment, offset
        return self._allocate_in(self._local, size_bytes) or self._allocate_in(self._remote, size_bytes)

    def row_length(self, size_bytes: int) -> int:
        """How many objects of that size may lie side by side: where there is a choice of segments, large ones
        are spread, so that they are written and read over several links at once."""
        num_segments = len(self._local) or len(self._remote)
        return max(1, ROW_BYTES // size_bytes) if num_segments > 1 else sys.maxsize

    def allocate_row(self, size_bytes: int, limit: int) -> tuple[Segment, list[int]] | None:
        """Return the segment to be tried first and up to ``limit`` adjacent offsets in it for objects of that
        size; None if there is no segment, or no room for two of them."""
        near = self._local or self._remote
        if not near:
            return None
        segment = self._preferred[0] if self._preferred else near[0][2]
        size_bytes = aligned(size_bytes)
        count = min(limit, segment.allocator.free_bytes // size_bytes)
        while count > 1:
            row_bytes = count * size_bytes
            offset = segment.allocator.allocate(row_bytes)
            if offset is not None:
                self.freed(segment)
                segment.allocator.split(offset, size_bytes)
                return segment, list(range(offset, offset + row_bytes, size_bytes))
            count //= 2
        return None

    def others(self, taken: list[Segment]) -> Generator[Segment, None, None]:
        """Segments for a further replica, the best first: no segment twice, other hosts first.

        The caller adds the segments that it uses to ``taken``.
        """
        later: list[Segment] = []
        for segment in self._in_order():
            if all(segment.host != other.host for other in taken):
                yield segment
            elif segment not in taken:
                later.append(segment)
        yield from later

    def _in_order(self) -> Generator[Segment, None, None]:
        yield from self._preferred
        every = (*self._local, *self._remote)
        rest: Order = [(weight, number, segment) for number, (weight, _, segment) in enumerate(every)]
        heapq.heapify(rest)
        while rest:
            segment = heapq.heappop(rest)[2]
            if segment not in self._preferred:
                yield segment

    def freed(self, segment: Segment) -> None:
        """Update the order after the free room of ``segment`` has changed."""
        near = self._local if segment.host == self._host else self._remote
        for index, (_, number, other) in enumerate(near):
            if other is segment:
                near[index] = (-self._weight(segment), number, segment)
                heapq.heapify(near)
                return

    def _allocate_in(self, near: Order, size_bytes: int) -> tuple[Segment, int] | None:
        if not near:
            return None
        _, number, segment = near[0]
        offset = segment.allocator.allocate(size_bytes)
        if offset is not None:
            heapq.heapreplace(near, (-self._weight(segment), number, segment))
            return segment, offset
        # The emptiest has no hole that large (it is full, or fragmented): another may.
        for index, (_, number, segment) in enumerate(near):
            offset = segment.allocator.allocate(size_bytes)
            if offset is not None:
                near[index] = (-self._weight(segment), number, segment)
                heapq.heapify(near)
                return segment, offset
        return None


class FreeSpace:
    """Allocates extents."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._unwatched_bytes = 0
        self._watch_bytes = 0.0
        """Adding up a thousand nodes for every put would cost more than the put, so the watermark is
        checked when that many bytes have been allocated."""

    def make_room(
        self, size_bytes: int, num_replicas: int, placement: SegmentPlacement, account: Account, now: float
    ) -> list[Extent] | Refusal:
        """Space for as many of the replicas as possible, at least one; evicts where none is free."""
        if not account.has_room(aligned(size_bytes)) and size_bytes > placement.largest_bytes:
            return self._no_segment(size_bytes, now)  # before anything is evicted
        refusal = self.fit(size_bytes, account, now)
        if refusal is not None:
            return refusal
        place = placement.allocate(size_bytes)
        if place is None and size_bytes > placement.largest_bytes:
            return self._no_segment(size_bytes, now)
        if place is None:
            place = self._evict_for(size_bytes, placement, now)
        if place is None:
            reason = "the stored objects are leased, pinned, being written, not on SSD yet, or too few"
            return Refusal("no_space", f"no hole of {size_bytes} bytes, and {reason}; try again later")
        extents = [Extent(*place)]
        if num_replicas > 1:
            self._replicate(extents, size_bytes, num_replicas, placement, account, now)
        self._unwatched_bytes += aligned(size_bytes) * len(extents)
        return extents

    def _replicate(
        self,
        extents: list[Extent],
        size_bytes: int,
        num_replicas: int,
        placement: SegmentPlacement,
        account: Account,
        now: float,
    ) -> None:
        taken = [extents[0].segment]
        for segment in placement.others(taken):
            if len(extents) == num_replicas or not account.has_room((len(extents) + 1) * aligned(size_bytes)):
                break
            if self._catalog.make_room(segment, size_bytes, now):
                offset = segment.allocator.allocate(size_bytes)
                assert offset is not None, segment
                extents.append(Extent(segment, offset))
                taken.append(segment)
                placement.freed(segment)

    def fit(self, size_bytes: int, account: Account, now: float) -> Refusal | None:
        """Make room within the tenant's quota for an object, by evicting its own objects.

        What could not succeed if all of them left evicts nothing. Where leases or descendants keep some, a
        put may evict others and be refused: fewer bytes than it takes. To know before would cost a visit of
        all objects, for each such put.
        """
        size_bytes = aligned(size_bytes)
        if account.has_room(size_bytes):
            return None
        if account.could_have_room(size_bytes) and self._evict_from(account, size_bytes, now):
            return None
        used = f"{account.used_bytes} of {account.quota_bytes} bytes are used"
        takes = f"the object takes {size_bytes} bytes of tenant {account.name!r}"
        return Refusal("quota_exceeded", f"{takes}, and {used}")

    def _evict_from(self, account: Account, size_bytes: int, now: float) -> bool:
        """Repeat while something is evicted: of a victim with more replicas than wanted, only one leaves."""
        whole, num_evicted, num_spared = self._catalog.settings.evict_undemoted, -1, 0
        while num_evicted and num_spared < MAX_SPARED:
            num_evicted = 0
            with contextlib.closing(account.victims(now, self._may_leave)) as victims:
                for victim, extent in victims:
                    if whole or victim.all_have_slower(extent):
                        self._catalog.evict(victim, extent, "its tenant is over its quota", now)
                        num_evicted += 1
                    else:
                        num_spared += 1
                    if account.has_room(size_bytes):
                        return True
                    if num_spared == MAX_SPARED:
                        break
        return False

    def _may_leave(self, stored: StoredObject, extent: Extent) -> bool:
        """Whether nothing but time, or other members of its group, keeps the replica where it is."""
        catalog = self._catalog
        has_copy = catalog.settings.evict_undemoted or stored.has_slower(extent)
        return has_copy and not catalog.eviction.is_blocked(stored, extent)

    def _evict_for(
        self, size_bytes: int, placement: SegmentPlacement, now: float
    ) -> tuple[Segment, int] | None:
        # A hole need not open where the oldest objects are, but a put without success must not
        # flush the whole cache either.
        budget_bytes = max(
            8 * size_bytes, int(self._catalog.settings.eviction_ratio * self._catalog.capacity_bytes)
        )
        with contextlib.closing(self._catalog.victims(placement.segments, now)) as victims:
            for victim, extent in victims:
                segments = [extent.segment for extent in victim.extents]
                budget_bytes -= self._catalog.evict(victim, extent, "no space for a put", now)
                for segment in segments:
                    placement.freed(segment)
                place = placement.allocate(size_bytes)
                if place is not None or budget_bytes < 0:
                    return place
        return None

    def _no_segment(self, size_bytes: int, now: float) -> Refusal:
        """Why no segment may be tried at all."""
        alive = self._catalog.alive(Tier.MEMORY)
        if not alive:
            return Refusal("no_space", "no segment is mounted; is a node running?")
        largest_bytes = max(segment.allocator.size_bytes for segment in alive)
        if size_bytes > largest_bytes:
            return Refusal("too_large", f"{size_bytes} bytes; the largest segment has {largest_bytes}")
        taking = [segment for segment in alive if not segment.is_draining]
        if not taking:
            names = ", ".join(sorted(segment.name for segment in alive)[:MAX_NAMED])
            return Refusal("no_space", f"all segments are being drained: {names}")
        rests_s = [segment.rests_until - now for segment in taking if segment.rests_until > now]
        if not rests_s:
            return Refusal("no_space", "the remaining segments were just mounted, or can't be reached")
        reason = "promises of an earlier master may still be in use; space is allocated again in"
        return Refusal("no_space", f"{reason} {min(rests_s):.3g} s")

    def given(self, size_bytes: int) -> None:
        """Count space that was allocated elsewhere."""
        self._unwatched_bytes += size_bytes

    def evict_to_watermark(self, now: float) -> None:
        if self._unwatched_bytes < self._watch_bytes:
            return
        capacity_bytes, allocated_bytes = self._catalog.capacity_bytes, self._catalog.allocated_bytes
        self._unwatched_bytes = 0
        self._watch_bytes = WATCH_SHARE * capacity_bytes
        if allocated_bytes <= self._catalog.settings.high_watermark * capacity_bytes:
            return
        target_bytes = (
            self._catalog.settings.high_watermark - self._catalog.settings.eviction_ratio
        ) * capacity_bytes
        alive = self._catalog.alive(Tier.MEMORY)
        with contextlib.closing(self._catalog.victims(alive, now)) as victims:
            for victim, extent in victims:
                allocated_bytes -= self._catalog.evict(victim, extent, "watermark", now)
                if allocated_bytes <= target_bytes:
                    break
