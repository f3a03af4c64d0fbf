# SPDX-License-Identifier: Apache-2.0
"""Placement of a new object: the preferred segments, the writer's own host, then those with most room.

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

import heapq
from collections.abc import Collection, Generator, Iterable
from functools import cached_property
from typing import TypeAlias

from mooncake.store.master.objects import DEFAULT_POLICY
from mooncake.store.master.segments import Segment, Segments
from mooncake.store.messages import PutPolicy
from mooncake.types import Tier

JOIN_S = 60.0
"""How long a segment counts as new."""
FIRST_SHARE = 0.1
"""Initial share of a new segment's free bytes that counts."""

Order: TypeAlias = list[tuple[float, int, Segment]]
"""A heap of (minus the weight, tie-breaker, segment)."""


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
            and (not self._policy.is_durable or self._has_ssd(segment))
        )

    def _has_ssd(self, segment: Segment) -> bool:
        """Whether the node's SSD could take a copy: one that rests takes it after the writer has given up."""
        return any(
            s.tier is Tier.SSD and s.is_alive and s.rests_until <= self._now
            for s in self._segments.of(segment.node)
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
