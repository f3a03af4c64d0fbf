"""Which segments receive a new object: the writer's own host first, then wherever is most room.

Local first, because a block is most often read again where it was written, and a local read is a
view instead of a transfer. Beyond that the emptiest segment, which spreads a batch over the nodes
and so over their links. A placement lives for one request: the free sizes it orders by are kept up
to date by telling it what was taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from mooncake.store.segments import Segment


class Placement:
    """The order in which one put-start tries segments."""

    def __init__(self, segments: Iterable[Segment], host: str, avoid: list[str], now: float) -> None:
        self._local: list[tuple[int, int, Segment]] = []
        self._remote: list[tuple[int, int, Segment]] = []
        for order, segment in enumerate(segments):
            if segment.takes_objects(now) and segment.name not in avoid:
                near = self._local if segment.host == host else self._remote
                near.append((-segment.allocator.free_bytes, order, segment))
        heapq.heapify(self._local)
        heapq.heapify(self._remote)
        every = (*self._local, *self._remote)
        self.largest_bytes = max((segment.allocator.size_bytes for _, _, segment in every), default=0)
        """No object larger than this can ever be placed on these segments."""

    def allocate(self, size_bytes: int) -> tuple[Segment, int] | None:
        """A segment and an offset in it, or None when no segment has a hole that large."""
        for near in (self._local, self._remote):
            if not near:
                continue
            _, order, segment = near[0]
            offset = segment.allocator.allocate(size_bytes)
            if offset is not None:
                heapq.heapreplace(near, (-segment.allocator.free_bytes, order, segment))
                return segment, offset
            # The emptiest has no hole that large (it is full, or in pieces): any other may.
            for index, (_, order, segment) in enumerate(near):
                offset = segment.allocator.allocate(size_bytes)
                if offset is not None:
                    near[index] = (-segment.allocator.free_bytes, order, segment)
                    heapq.heapify(near)
                    return segment, offset
        return None

    def freed(self, segment: Segment) -> None:
        """Space was won in ``segment`` (by eviction): order it anew."""
        for near in (self._local, self._remote):
            for index, (_, order, other) in enumerate(near):
                if other is segment:
                    near[index] = (-segment.allocator.free_bytes, order, segment)
                    heapq.heapify(near)
                    return

    def covers(self, segment: Segment) -> bool:
        """Whether this put-start may use ``segment``."""
        return any(other is segment for near in (self._local, self._remote) for _, _, other in near)
