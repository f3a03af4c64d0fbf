# SPDX-License-Identifier: Apache-2.0
"""Copies of the most used objects in device memory, on the hosts whose memory has them.

A device segment takes no puts. An object in memory that is looked up ``device_uses_per_s`` times per second
or more for ``device_hot_s`` (``hot_replicas.py`` measures the rate, once a second) gets a copy in a
device segment of the same host. The copy is an *extra* replica (``Extent.is_extra``): the object never
depends on it, so its removal moves no bytes, and what leaves memory takes it along. A replica that a
user or an operator requested is none, and is left alone.

Extra replicas leave for three reasons. The object has been cool for ``device_cool_s``. Another object wants
the space, is looked up ``BEATS_BY`` times as often, and this one is the least recently used. Or all are in
use: then the one with the lowest rate of those examined last leaves, a few per lease, because its space
can be used again only when its readers' leases have ended. Between the rate that admits an object and
the one at which it is cool lies a factor, so that an object at the threshold is not copied repeatedly.

Extra replicas are examined in rounds, a bounded number of them at a time. A round begins with what the
segment holds, so that a new master continues with the replicas of its predecessor.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math

from mooncake.errors import Refusal
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import COOLED, DISPLACED, ReplicaRemoved
from mooncake.store.master.objects import Extent, StoredObject
from mooncake.store.master.segments import Segment
from mooncake.store.master.tasks import PlannedCopy, Tasks
from mooncake.types import Tier

COOL_SHARE = 0.25
"""Share of ``device_uses_per_s`` below which an object is cool."""
BEATS_BY = 2.0
"""How many times as often another object must be looked up to take the place of a replica."""
MAX_COPIES = 64
"""Copies planned at one examination, which is once a second."""
MAX_VICTIMS = 64
"""Replicas that leave a segment for one copy, and replicas in use that leave it within one lease."""
MAX_EXAMINED = 1024
"""Replicas of one segment that are examined at a time."""
REPORT_INTERVAL_S = 60.0
"""Interval of the log event about a segment on which something has changed."""


@dataclasses.dataclass(slots=True)
class _Sample:
    """An extra replica's use, as of its last examination."""

    num_uses: int
    at: float
    cool_since: float
    """When it was first found cool; infinity: it is not."""
    rate: float = math.inf


@dataclasses.dataclass(slots=True)
class _DeviceUse:
    """What is known of one device segment."""

    samples: dict[int, _Sample] = dataclasses.field(default_factory=dict)
    """By object id."""
    round: list[StoredObject] = dataclasses.field(default_factory=list)
    """Objects that this round has yet to examine."""
    coldest: list[tuple[float, int, StoredObject]] = dataclasses.field(default_factory=list)
    """(rate, object id, object) of those examined last, the coldest at the end."""
    colder_rates: list[float] = dataclasses.field(default_factory=list)
    """The rates of those examined last, the coldest first."""
    colder_bytes: list[int] = dataclasses.field(default_factory=lambda: [0])
    """The size of the first, the first two and so on of these, with 0 before."""
    popped_bytes: int = 0
    """The part of that which is no longer in ``coldest``."""
    displaces_at: float = 0.0
    """No replica in use is displaced before."""
    num_displaced: int = 0
    leaving: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """(when, bytes) of space that replicas in use, which were displaced, will release."""
    awaited_bytes: int = 0
    """Bytes of the objects that found no room at this examination, each hotter than the next."""
    refused_bytes: float = math.inf
    """Smallest size for which this examination has found too few replicas to leave."""
    num_copied: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    reported_at: float = 0.0


class DeviceTier:
    """Decides which objects have an extra replica. ``HotReplicas`` calls it at each examination."""

    def __init__(self, catalog: Catalog, tasks: Tasks) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._devices: dict[Segment, _DeviceUse] = {}
        self._planned: dict[tuple[int, Segment], PlannedCopy] = {}
        """Copies by object id and target."""
        self._hot: list[tuple[float, StoredObject]] = []
        """(rate, object) of this examination."""
        self._hot_since: dict[int, float] = {}
        """Since when every examination has found an object hot, by its id."""
        catalog.observe({ReplicaRemoved: self._replica_removed})

    @property
    def is_used(self) -> bool:
        """Whether there is a device segment for it to fill."""
        return bool(self._catalog.segments.num_devices and self._catalog.settings.device_uses_per_s)

    @property
    def holds_copies(self) -> bool:
        """Whether replicas are there that may have to leave."""
        return bool(self._devices)

    def found(self, stored: StoredObject, rate: float) -> None:
        """An examination has measured this rate."""
        if rate >= self._catalog.settings.device_uses_per_s:
            self._hot.append((rate, stored))

    def examine(self, now: float) -> None:
        """End an examination: remove what is cool, and copy what was found hot, the hottest first."""
        hot, self._hot = self._hot, []
        if not self.is_used:
            self._devices.clear()
            self._hot_since.clear()
            return
        for segment in self._catalog.alive(Tier.DEVICE):
            self._devices.setdefault(segment, _DeviceUse(reported_at=now))
        for segment, device in list(self._devices.items()):
            device.awaited_bytes, device.refused_bytes = 0, math.inf
            if segment.is_mounted:
                self._examine(segment, device, now)
            else:
                del self._devices[segment]
        since = {stored.object_id: self._hot_since.get(stored.object_id, now) for _, stored in hot}
        self._hot_since, hot_s = since, self._catalog.settings.device_hot_s
        hot.sort(key=lambda one: -one[0])
        num_left = MAX_COPIES
        for rate, stored in hot:
            if since[stored.object_id] + hot_s <= now and stored.is_readable and num_left > 0:
                num_left -= self._heat(stored, rate, now)
        for segment, device in list(self._devices.items()):
            self._report(segment, device, now)

    # In

    def _heat(self, stored: StoredObject, rate: float, now: float) -> int:
        """Copy the object on each host whose memory has it; returns how many copies were planned."""
        hosts = dict.fromkeys(e.segment.host for e in stored.complete(Tier.MEMORY) if e.segment.is_alive)
        num_planned = 0
        for host in hosts:
            segment = self._device_on(host, stored, now)
            if segment is None:
                continue
            if not self._make_room(segment, stored, rate, now):
                self._catalog.counts.device_copies_no_room += 1
                self._devices[segment].num_refused += 1
                continue
            about = stored.object_id, segment.name, rate, self._catalog.settings.device_uses_per_s
            why = "#{} is copied to device memory {}, because it is looked up {:.3g} times per second ({:g})"
            self._catalog.add_story(now, stored.key, why, *about)
            task = self._tasks.plan(stored, segment, "device", now, self._arrived)
            self._planned[stored.object_id, segment] = task
            num_planned += 1
        return num_planned

    def _device_on(self, host: str, stored: StoredObject, now: float) -> Segment | None:
        """The emptiest device segment of that host; None if none may take it, or one has it already."""
        found: Segment | None = None
        for segment in self._catalog.segments.on(host):
            if segment.tier is not Tier.DEVICE:
                continue
            if stored.on(segment) is not None or self._tasks.find(stored, segment) is not None:
                return None
            is_open = segment.polls and segment.takes_objects(now) and segment in self._devices
            is_busy = segment.num_tasks >= self._catalog.settings.tasks_per_segment
            is_large_enough = stored.size_bytes <= segment.allocator.size_bytes
            if (
                is_open
                and not is_busy
                and is_large_enough
                and (found is None or _free(segment) > _free(found))
            ):
                found = segment
        return found

    def _arrived(self, task: PlannedCopy, refusal: Refusal | None, now: float) -> None:
        del self._planned[task.stored.object_id, task.target]
        counts = self._catalog.counts
        if refusal is not None:
            counts.device_copies_failed += 1
            return
        counts.device_copied_objects += 1
        counts.device_copied_bytes += task.stored.size_bytes
        if task.target in self._devices:
            self._devices[task.target].num_copied += 1

    def _make_room(self, segment: Segment, stored: StoredObject, rate: float, now: float) -> bool:
        """Whether it fits, if necessary after the replicas of colder objects have left."""
        if self._fits(segment, stored):
            return True
        device = self._devices[segment]
        victims = self._victims(segment, device, stored, rate, now)
        for victim, extent in victims:
            self._drop(segment, victim, extent, DISPLACED, now)
            if self._fits(segment, stored):
                return True
        if not victims:
            self._displace(segment, device, stored, rate, now)
        device.awaited_bytes += stored.size_bytes
        return self._fits(segment, stored)

    def _victims(
        self, segment: Segment, device: _DeviceUse, stored: StoredObject, rate: float, now: float
    ) -> list[tuple[StoredObject, Extent]]:
        """Replicas of colder objects that no reader uses, the first to leave first, as many as may leave now.

        Empty if all of them together would not make room: then none has to leave for nothing.
        """
        if stored.size_bytes >= device.refused_bytes:
            return []
        missing_bytes = self._missing_bytes(segment, stored)
        found: list[tuple[StoredObject, Extent]] = []
        found_bytes = 0
        victims = self._catalog.eviction.victims([segment], now, stored, whole=False)
        with contextlib.closing(victims):
            for victim, extent in victims:
                if not extent.is_extra:
                    continue
                sample = device.samples.get(victim.object_id)
                is_colder = sample is None or BEATS_BY * sample.rate <= rate or math.isinf(sample.rate)
                if not is_colder or (len(found) >= MAX_VICTIMS and found_bytes >= missing_bytes):
                    break
                found.append((victim, extent))
                found_bytes += victim.size_bytes
        if found_bytes < missing_bytes or not found:
            device.refused_bytes = stored.size_bytes  # as for those after it, which are less hot
            return []
        return found[:MAX_VICTIMS]

    def _displace(
        self, segment: Segment, device: _DeviceUse, stored: StoredObject, rate: float, now: float
    ) -> None:
        """Remove a replica that is in use, but less; there is room when its readers' leases have ended.

        None is removed while there will be room by those that were removed before, nor where all that are
        colder would not make room.
        """
        device.leaving = [one for one in device.leaving if one[0] > now]
        leaving_bytes = sum(size_bytes for _, size_bytes in device.leaving)
        missing_bytes = self._missing_bytes(segment, stored) + device.awaited_bytes
        if leaving_bytes and leaving_bytes >= missing_bytes:
            return
        colder_bytes = device.colder_bytes[bisect.bisect_right(device.colder_rates, rate / BEATS_BY)]
        if colder_bytes - device.popped_bytes + leaving_bytes < missing_bytes:
            return
        if device.displaces_at <= now:
            device.displaces_at = now + self._catalog.settings.lease_s
            device.num_displaced = 0
        while device.coldest and device.num_displaced < MAX_VICTIMS:
            coldest_rate, _, victim = device.coldest[-1]
            if BEATS_BY * coldest_rate > rate:
                return
            device.coldest.pop()
            device.popped_bytes += victim.size_bytes
            extent = _extra_on(victim, segment)
            if extent is not None:
                device.num_displaced += 1
                self._drop(segment, victim, extent, DISPLACED, now)
                if extent.is_resting and extent.release_at > now:
                    device.leaving.append((extent.release_at, victim.size_bytes))
                return

    def _fits(self, segment: Segment, stored: StoredObject) -> bool:
        """Whether it has room beside the copies that are planned and have no space yet."""
        return self._missing_bytes(segment, stored) <= 0 and segment.allocator.has_hole(stored.size_bytes)

    def _missing_bytes(self, segment: Segment, stored: StoredObject) -> int:
        """Bytes that have to become free for it; 0 or less: there are enough, though perhaps apart."""
        planned = (task for (_, target), task in self._planned.items() if target is segment)
        planned_bytes = sum(task.stored.size_bytes for task in planned if task.extent is None)
        return planned_bytes + stored.size_bytes - segment.allocator.free_bytes

    # Out

    def _examine(self, segment: Segment, device: _DeviceUse, now: float) -> None:
        """Measure some of its extra replicas, and remove those that have been cool for long."""
        if not device.round:
            device.round = list(segment.holders.values())
        cool_rate = COOL_SHARE * self._catalog.settings.device_uses_per_s
        measured: list[tuple[float, int, StoredObject]] = []
        for stored in device.round[-MAX_EXAMINED:]:
            extent = _extra_on(stored, segment)
            if extent is None:
                continue
            sample = device.samples.get(stored.object_id)
            if sample is None:
                device.samples[stored.object_id] = _Sample(stored.num_uses, now, math.inf)
                continue
            if now > sample.at:
                sample.rate = (stored.num_uses - sample.num_uses) / (now - sample.at)
                sample.num_uses, sample.at = stored.num_uses, now
            sample.cool_since = min(sample.cool_since, now) if sample.rate < cool_rate else math.inf
            if sample.cool_since + self._catalog.settings.device_cool_s <= now:
                self._drop(segment, stored, extent, COOLED, now)
            else:
                measured.append((sample.rate, stored.object_id, stored))
        del device.round[-MAX_EXAMINED:]
        device.coldest = sorted(measured, key=lambda one: -one[0])
        device.colder_rates = [rate for rate, _, _ in reversed(device.coldest)]
        sizes = (stored.size_bytes for _, _, stored in reversed(device.coldest))
        device.colder_bytes = list(itertools.accumulate(sizes, initial=0))
        device.popped_bytes = 0

    def _drop(self, segment: Segment, stored: StoredObject, extent: Extent, why: str, now: float) -> None:
        counts = self._catalog.counts
        counts.device_dropped_replicas += 1
        counts.device_dropped_bytes += stored.size_bytes
        self._devices[segment].num_dropped += 1
        self._catalog.drop_extent(stored, extent, why, now)

    def _replica_removed(self, event: ReplicaRemoved) -> None:
        device = self._devices.get(event.extent.segment)
        if device is not None:
            device.samples.pop(event.stored.object_id, None)

    def _report(self, segment: Segment, device: _DeviceUse, now: float) -> None:
        if device.reported_at + REPORT_INTERVAL_S > now:
            return
        device.reported_at = now
        if device.num_copied or device.num_dropped or device.num_refused:
            self._catalog.note(
                "device_copies",
                segment,
                num_copied=device.num_copied,
                num_dropped=device.num_dropped,
                num_refused=device.num_refused,
                allocated_bytes=segment.allocator.allocated_bytes,
            )
            device.num_copied = device.num_dropped = device.num_refused = 0

    def check(self) -> None:
        for (object_id, target), task in self._planned.items():
            assert task.stored.object_id == object_id and task.target is target, task
            assert task in self._tasks.of(task.stored), task
        for segment, device in self._devices.items():
            if segment.is_mounted:
                held = {stored.object_id for stored in segment.holders.values()}
                assert device.samples.keys() <= held, segment

    def __repr__(self) -> str:
        return f"<DeviceTier {len(self._devices)} segments, {len(self._planned)} copies planned>"


def _free(segment: Segment) -> int:
    return segment.allocator.free_bytes


def _extra_on(stored: StoredObject, segment: Segment) -> Extent | None:
    """Its complete extra replica there, if the object is readable without it."""
    extent = stored.on(segment) if stored.is_readable else None
    if extent is None or not extent.is_complete or not extent.is_extra:
        return None
    others = any(one.segment.is_alive and not one.is_extra for one in stored.complete())
    return extent if others else None
