"""Which segments receive a new object: the writer's own host first, then wherever is most room.

Local first, because a block is most often read again where it was written, and a local read is a
view instead of a transfer. Beyond that the emptiest segment, which spreads a batch over the nodes
and so over their links. A placement lives for one request: the free sizes it orders by are kept up
to date by telling it what was taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TypeAlias

from mooncake.store.segments import Segment, Segments
from mooncake.types import Tier

Order: TypeAlias = list[tuple[int, int, Segment]]
"""A heap of (minus the free bytes, tie-breaker, segment)."""


class Placement:
    """The order in which one put-start tries segments."""

    def __init__(self, segments: Segments, host: str, avoid: Collection[str], now: float) -> None:
        self._segments = segments
        self._host = host
        self._avoid = avoid
        self._now = now
        self._local = self._order(segments.on(host))

    @cached_property
    def _remote(self) -> Order:
        return self._order(s for s in self._segments.mounted.values() if s.host != self._host)

    def _order(self, segments: Iterable[Segment]) -> Order:
        order: Order = [
            (-segment.allocator.free_bytes, number, segment)
            for number, segment in enumerate(segments)
            if self._covers(segment)
        ]
        heapq.heapify(order)
        return order

    @property
    def largest_bytes(self) -> int:
        """No object larger than this can ever be placed on these segments."""
        every = (*self._local, *self._remote)
        return max((segment.allocator.size_bytes for _, _, segment in every), default=0)

    @property
    def segments(self) -> list[Segment]:
        """Those that this put-start may use."""
        return [segment for _, _, segment in (*self._local, *self._remote)]

    def allocate(self, size_bytes: int) -> tuple[Segment, int] | None:
        """A segment and an offset in it, or None when no segment has a hole that large."""
        return _allocate_in(self._local, size_bytes) or _allocate_in(self._remote, size_bytes)

    def freed(self, segment: Segment) -> None:
        """Space was won in ``segment`` (by eviction): order it anew."""
        near = self._local if segment.host == self._host else self._remote
        for index, (_, number, other) in enumerate(near):
            if other is segment:
                near[index] = (-segment.allocator.free_bytes, number, segment)
                heapq.heapify(near)
                return

    def _covers(self, segment: Segment) -> bool:
        is_memory = segment.tier is Tier.MEMORY
        return is_memory and segment.takes_objects(self._now) and segment.name not in self._avoid


def _allocate_in(near: Order, size_bytes: int) -> tuple[Segment, int] | None:
    if not near:
        return None
    _, number, segment = near[0]
    offset = segment.allocator.allocate(size_bytes)
    if offset is not None:
        heapq.heapreplace(near, (-segment.allocator.free_bytes, number, segment))
        return segment, offset
    # The emptiest has no hole that large (it is full, or in pieces): any other may.
    for index, (_, number, segment) in enumerate(near):
        offset = segment.allocator.allocate(size_bytes)
        if offset is not None:
            near[index] = (-segment.allocator.free_bytes, number, segment)
            heapq.heapify(near)
            return segment, offset
    return None
