# SPDX-License-Identifier: Apache-2.0
"""Extra replicas in memory for objects read by many clients at once, removed when demand falls.

Lookups pay nothing for it: they count uses anyway, and leave the list of keys of the last requests.
Once a second the objects on those lists are examined: one that is used often is almost surely on them.
Two examinations give a rate. Each multiple of ``hot_uses_per_s`` is worth one more replica, on another
host where there is one, where memory is below the watermark; nothing is evicted for it.

Cooling is slower than heating, so that an object at the threshold is not copied repeatedly.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from mooncake.errors import Refusal
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import COOLED
from mooncake.store.master.device_tier import DeviceTier
from mooncake.store.master.objects import StoredObject
from mooncake.store.master.segments import Segment
from mooncake.store.master.tasks import PlannedCopy, Tasks
from mooncake.types import Tier

CHECK_INTERVAL_S = 1.0
MAX_KEYS = 8192
"""Keys examined each time."""
COOL_SHARE = 0.5
"""Share of ``hot_uses_per_s`` per replica below which an object is cool."""
COOL_CHECKS = 10
"""Consecutive checks that find an object cool before its extra replicas are removed."""


@dataclasses.dataclass(slots=True)
class _HotObject:
    stored: StoredObject
    num_uses: int
    """As of the last examination."""
    added: dict[Segment, None] = dataclasses.field(default_factory=dict)
    num_cool: int = 0


class HotReplicas:
    """A clock of the catalog."""

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self.devices = DeviceTier(catalog, tasks)
        """Decides with the rates that are measured here."""
        self._uses: dict[int, int] = {}
        """Number of lookups of each object on the lists of the last examination, by object id."""
        self._hot: dict[int, _HotObject] = {}
        self._checked_at = 0.0

    def deadline(self) -> float | None:
        is_idle = not (self._hot or self._catalog.recent or self.devices.holds_copies)
        if is_idle or not (self._catalog.settings.hot_uses_per_s or self.devices.is_used):
            return None
        return self._checked_at + CHECK_INTERVAL_S

    def expire(self, now: float) -> None:
        elapsed_s = now - self._checked_at
        self._checked_at = now
        threshold = self._catalog.settings.hot_uses_per_s or math.inf
        feeds_devices = self.devices.is_used
        keys = dict.fromkeys(itertools.islice(itertools.chain(*self._catalog.recent), MAX_KEYS))
        self._catalog.recent.clear()
        uses, self._uses = self._uses, {}
        for key in keys:
            stored = self._catalog.objects.readable.get(key)
            if stored is None:
                continue
            self._uses[stored.object_id] = stored.num_uses
            before = uses.get(stored.object_id)
            # Without an earlier count all uses may be old ones.
            if before is not None and elapsed_s > 0:
                rate = (stored.num_uses - before) / elapsed_s
                if rate >= threshold:
                    self._heat(stored, rate, now)
                if feeds_devices:
                    self.devices.found(stored, rate)
        if feeds_devices or self.devices.holds_copies:
            self.devices.examine(now)
        for hot in list(self._hot.values()):
            self._cool(hot, elapsed_s, now)

    def _heat(self, stored: StoredObject, rate: float, now: float) -> None:
        settings = self._catalog.settings
        wanted = min(settings.max_hot_replicas, 1 + int(rate / settings.hot_uses_per_s))
        coming = sum(task.target.tier is Tier.MEMORY for task in self._tasks.of(stored))
        for _ in range(wanted - len(stored.complete(Tier.MEMORY)) - coming):
            target = self._target(stored, now)
            if target is None:
                return
            if stored.object_id not in self._hot:
                self._hot[stored.object_id] = _HotObject(stored, stored.num_uses)
            self._tasks.plan(stored, target, "hot", now, self._arrived)

    def _target(self, stored: StoredObject, now: float) -> Segment | None:
        taken = [extent.segment for extent in stored.extents]
        taken += [task.target for task in self._tasks.of(stored)]
        hosts = [segment.host for segment in taken]
        limit = self._catalog.settings.high_watermark
        found: tuple[tuple[bool, int], Segment] | None = None
        for segment in self._catalog.alive(Tier.MEMORY):
            if not segment.polls or segment in taken or not segment.takes_objects(now):
                continue
            allocator = segment.allocator
            if allocator.allocated_bytes + stored.size_bytes > limit * allocator.size_bytes:
                continue
            merit = segment.host not in hosts, allocator.free_bytes
            if found is None or merit > found[0]:
                found = merit, segment
        return None if found is None else found[1]

    def _arrived(self, task: PlannedCopy, refusal: Refusal | None, now: float) -> None:
        hot = self._hot.get(task.stored.object_id)
        if hot is not None and refusal is None:
            hot.added[task.target] = None

    def _cool(self, hot: _HotObject, elapsed_s: float, now: float) -> None:
        stored = hot.stored
        if not stored.is_readable:
            del self._hot[stored.object_id]
            return
        rate = (stored.num_uses - hot.num_uses) / elapsed_s if elapsed_s > 0 else 0.0
        hot.num_uses = stored.num_uses
        is_cool = rate < COOL_SHARE * self._catalog.settings.hot_uses_per_s * (1 + len(hot.added))
        hot.num_cool = hot.num_cool + 1 if is_cool else 0
        if hot.num_cool < COOL_CHECKS or self._tasks.of(stored):
            return
        del self._hot[stored.object_id]
        for segment in hot.added:
            extent = stored.on(segment)
            others = [one for one in stored.lasting() if one is not extent and one.segment.is_alive]
            if extent is not None and extent.is_complete and others:
                self._catalog.drop_extent(stored, extent, COOLED, now)

    def check(self) -> None:
        self.devices.check()
        for object_id, hot in self._hot.items():
            assert hot.stored.object_id == object_id

    def __repr__(self) -> str:
        return f"<HotReplicas {len(self._hot)} objects>"
