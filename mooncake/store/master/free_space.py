# SPDX-License-Identifier: Apache-2.0
"""Space for puts: free, or freed by eviction; never more of it than the tenant's quota allows."""

from __future__ import annotations

import contextlib

from mooncake.errors import Refusal
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.objects import Extent
from mooncake.store.master.placement import SegmentPlacement
from mooncake.store.master.segments import Segment
from mooncake.store.master.tenants import Account
from mooncake.types import Tier

WATCH_SHARE = 0.005
"""Share of the capacity; the watermark is overshot by no more than this."""


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
        refusal = self.fit(size_bytes, account, now)
        if refusal is not None:
            return refusal
        place = placement.allocate(size_bytes)
        if place is None and size_bytes > placement.largest_bytes:
            return self._no_segment(size_bytes, now)
        if place is None:
            place = self._evict_for(size_bytes, placement, now)
        if place is None:
            reason = "the stored objects are leased, being written, not on SSD yet, or too few"
            return Refusal("no_space", f"no hole of {size_bytes} bytes, and {reason}; try again later")
        extents = [Extent(*place)]
        if num_replicas > 1:
            self._replicate(extents, size_bytes, num_replicas, placement, account, now)
        self._unwatched_bytes += size_bytes * len(extents)
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
            if len(extents) == num_replicas or not account.has_room((len(extents) + 1) * size_bytes):
                break
            if self._catalog.make_room(segment, size_bytes, now):
                offset = segment.allocator.allocate(size_bytes)
                assert offset is not None, segment
                extents.append(Extent(segment, offset))
                taken.append(segment)
                placement.freed(segment)

    def fit(self, size_bytes: int, account: Account, now: float) -> Refusal | None:
        """Make room within the tenant's quota, by evicting its own objects."""
        quota_bytes = account.quota_bytes
        if quota_bytes is None or account.has_room(size_bytes):
            return None
        if size_bytes <= quota_bytes and self._evict_from(account, size_bytes, now):
            return None
        used = f"{account.used_bytes} of {quota_bytes} bytes are used"
        return Refusal("quota_exceeded", f"{size_bytes} bytes for tenant {account.name!r}, and {used}")

    def _evict_from(self, account: Account, size_bytes: int, now: float) -> bool:
        """Repeat while something is evicted: an ancestor may be evictable once its descendants are gone."""
        whole, num_evicted = self._catalog.settings.evict_undemoted, -1
        while num_evicted:
            num_evicted = 0
            with contextlib.closing(account.victims(now)) as victims:
                for victim, extent in victims:
                    may_leave = whole or victim.all_have_slower(extent)
                    if may_leave and not self._catalog.eviction.is_blocked(victim, extent):
                        self._catalog.evict(victim, extent, "its tenant is over its quota", now)
                        num_evicted += 1
                    if account.has_room(size_bytes):
                        return True
        return False

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
        rests_s = [segment.rests_until - now for segment in alive if segment.rests_until > now]
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
