"""The master's part for people and dashboards: what there is, and why."""

from __future__ import annotations

import dataclasses
import itertools

from mooncake.store import messages as m
from mooncake.store.catalog import Catalog
from mooncake.store.effects import Received


class Asking:
    """Answers Status, ListKeys and Story."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def status(self, _: m.Status, __: Received, now: float) -> m.MasterStatus:
        segments = [
            m.SegmentStatus(
                segment=segment.name,
                epoch=segment.epoch,
                host=segment.host,
                state=str(segment.state),
                size_bytes=segment.allocator.size_bytes,
                allocated_bytes=segment.allocator.allocated_bytes,
                largest_free_bytes=segment.allocator.largest_free_bytes,
                num_objects=len(segment.holders),
                rests_s=max(0.0, segment.rests_until - now),
                tier=segment.tier,
                node=segment.node,
                address=segment.address,
                is_draining=segment.is_draining,
                num_tasks=segment.num_tasks,
            )
            for segment in self._catalog.segments.mounted.values()
        ]
        return m.MasterStatus(
            num_objects=len(self._catalog.objects.readable),
            num_writing=len(self._catalog.objects.writing),
            capacity_bytes=self._catalog.capacity_bytes,
            allocated_bytes=self._catalog.allocated_bytes,
            counts=dataclasses.asdict(self._catalog.counts),
            segments=segments,
        )

    def list_keys(self, message: m.ListKeys, _: Received, now: float) -> m.Keys:
        matching = (
            key
            for key, stored in self._catalog.objects.readable.items()
            if key.startswith(message.prefix) and stored.is_visible
        )
        return m.Keys(list(itertools.islice(matching, max(0, message.limit))))

    def tell(self, message: m.Story, _: Received, now: float) -> m.Told:
        return m.Told(self._catalog.story(message.key))
