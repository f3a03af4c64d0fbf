# SPDX-License-Identifier: Apache-2.0
"""The master's handlers for objects that exist: their locations, leases and pins, and their removal."""

from __future__ import annotations

from typing import cast

import msgspec

from mooncake.errors import Refusal
from mooncake.rpc.wire import MAX_BODY_BYTES, Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import ColdHit
from mooncake.store.master.effects import Received
from mooncake.store.master.key_scans import KeyScans, compiled
from mooncake.store.master.log_records import ObjectGone
from mooncake.store.master.objects import StoredObject, replica_of, scoped_all, split_scoped
from mooncake.store.master.tenants import check_tenant
from mooncake.types import ObjectKey, Tier

REMOVAL_COST = 30
"""Cost of a removal in microseconds, roughly (``key_scans.py``)."""


class LookupRequests:
    """Answers LookupObjects, Exists, Renew and Pin."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def lookup(self, message: m.LookupObjects, _: Received, now: float) -> m.LookupReply | Failure:
        readable = self._catalog.objects.readable
        lease_until = now + self._catalog.settings.lease_s
        found: list[m.Stored | None] = []
        num_hits = 0
        keys = scoped_all(message.tenant, message.keys)
        # With the first of them begins a period of hot_replicas.py, and with a read from SSD a promotion.
        self._catalog.keeps_deadline = bool(self._catalog.recent)
        self._catalog.recent.append(keys)
        for key in keys:
            stored = readable.get(key)
            if stored is None:
                found.append(None)
                continue
            if not stored.is_plain:
                found.append(self._found(stored, lease_until, now))
                num_hits += found[-1] is not None
            elif stored.extents[0].segment.is_alive:
                if stored.lease_until < lease_until:  # a predecessor may have promised a longer one
                    stored.lease_until = lease_until
                stored.num_uses += 1
                num_hits += 1
                found.append(stored.stored)
            else:
                found.append(None)
        self._catalog.counts.lookups += len(found)
        self._catalog.counts.lookup_hits += num_hits
        if num_hits * self._catalog.objects.most_checksum_bytes > MAX_BODY_BYTES:
            # Encoded first and refused afterwards, a few keys named often enough would take all memory.
            num_bytes = sum(len(one.checksums) for one in found if one is not None)
            if num_bytes > MAX_BODY_BYTES:
                reason = f"the reply would have {num_bytes} bytes of checksums; look up fewer keys at a time"
                return Failure("invalid_argument", reason)
        return m.LookupReply(self._catalog.settings.lease_s, found)

    def _found(self, stored: StoredObject, lease_until: float, now: float) -> m.Stored | None:
        """The object with its replicas on live nodes; None without one."""
        assert stored.stored is not None
        extents = stored.complete()
        alive = [extent.segment.is_alive for extent in extents]
        if True not in alive:
            return None
        stored.lease(lease_until)
        stored.num_uses += 1
        found = stored.stored
        if not all(alive):
            replicas = [r for r, is_alive in zip(found.replicas, alive, strict=True) if is_alive]
            found = msgspec.structs.replace(found, replicas=replicas)
        if found.replicas[0].tier is Tier.SSD:
            self._catalog.counts.cold_hits += 1
            self._catalog.counts.cold_hit_bytes += found.size_bytes
            self._catalog.keeps_deadline = False
            self._catalog.emit(ColdHit(stored, now))
        return found

    def exists(self, message: m.Exists, _: Received, now: float) -> m.Flags:
        readable = self._catalog.objects.readable
        self._catalog.keeps_deadline = True
        lease_until = now + self._catalog.settings.lease_s
        flags = bytearray(len(message.keys))
        for index, key in enumerate(scoped_all(message.tenant, message.keys)):
            stored = readable.get(key)
            if stored is not None and (stored.extents[0].segment.is_alive or stored.is_visible):
                stored.lease(lease_until)
                flags[index] = 1
        return m.Flags(self._catalog.settings.lease_s, bytes(flags))

    def renew(self, message: m.Renew, _: Received, now: float) -> m.Flags | Failure:
        if len(message.replicas) not in (0, len(message.keys)):
            return Failure("invalid_argument", "renew: replicas, but not one for each key")
        lease_until = now + self._catalog.settings.lease_s
        keys = scoped_all(message.tenant, message.keys)
        flags = bytearray(len(keys))
        for index, (key, object_id) in enumerate(zip(keys, message.object_ids, strict=False)):
            stored = self._catalog.objects.readable.get(key)
            if stored is None or stored.object_id != object_id or not stored.is_visible:
                continue
            if not message.replicas or _keeps(stored, message.replicas[index]):
                self._catalog.renew(stored, lease_until)
                flags[index] = 1
        return m.Flags(self._catalog.settings.lease_s, bytes(flags))

    def pin(self, message: m.Pin, _: Received, now: float) -> m.Outcomes | Failure:
        ttl_s = message.ttl_s
        if ttl_s is not None and not ttl_s >= 0:
            return Failure("invalid_argument", f"pin: ttl_s {ttl_s}; at least 0")
        soft_until = now + min(ttl_s, self._catalog.settings.max_pin_s) if ttl_s else 0.0
        readable = self._catalog.objects.readable
        found = [readable.get(key) for key in scoped_all(message.tenant, message.keys)]
        there = [stored for stored in found if stored is not None]
        self._catalog.pin_all(there, is_hard=ttl_s is None, soft_until=soft_until, now=now)
        return m.Outcomes([stored is not None for stored in found])


def _keeps(stored: StoredObject, replica: m.Replica) -> bool:
    """Whether that replica is still the object's, or rests for its readers."""
    held = (*stored.complete(), *stored.resting)
    return any(extent.segment.is_mounted and replica_of(extent) == replica for extent in held)


class RemoveRequests:
    """Answers Remove, RemoveMatching and DropReplicas."""

    def __init__(self, catalog: Catalog, scans: KeyScans) -> None:
        self._catalog = catalog
        self._scans = scans

    def remove(self, message: m.Remove, _: Received, now: float) -> m.Outcomes:
        readable = self._catalog.objects.readable
        outcomes: list[bool | Refusal] = []
        for key in scoped_all(message.tenant, message.keys):
            stored = readable.get(key)
            if stored is None and key:  # no object can have another one (``scoped_all``)
                self._catalog.remove_absent(key)
            outcomes.append(self._remove(stored, message.force, now))
        return m.Outcomes(outcomes)

    def remove_matching(
        self, message: m.RemoveMatching, event: Received, now: float
    ) -> m.Removed | Failure | None:
        """Remove all matching objects that exist now; later puts stay, under the same keys too."""
        refusal = check_tenant(message.tenant)
        if refusal is not None:
            return Failure("invalid_argument", refusal.reason)
        pattern = compiled(message.pattern)
        if isinstance(pattern, Failure):
            return pattern
        tenant = "" if message.tenant == "default" else message.tenant
        before = self._catalog.objects.last_id + 1
        removed = m.Removed(0, 0)

        def visit(key: ObjectKey, now: float) -> int:
            nonlocal removed
            owner, name = split_scoped(key)
            if owner != tenant:
                return 1
            cost = pattern.cost(name)
            stored = self._catalog.objects.readable.get(key)
            if stored is None or stored.object_id >= before or not pattern.is_found_in(name):
                return cost
            is_removed = self._remove(stored, message.force, now) is True
            removed = m.Removed(removed.num_removed + is_removed, removed.num_leased + (not is_removed))
            return cost + REMOVAL_COST

        def end(now: float) -> m.Removed:
            self._catalog.must_last |= not message.pattern
            return removed

        answer = cast("m.Removed | Failure | None", self._scans.begin(event, visit, end, now))
        if not message.pattern and not isinstance(answer, Failure):
            # At once, because objects that a node brings back during the scan are not among its keys.
            self._catalog.clear_before(tenant, before)
        return answer

    def _remove(self, stored: StoredObject | None, force: bool, now: float) -> bool | Refusal:
        if stored is None or not stored.is_readable:
            return False
        if stored.lease_until > now and not force:
            return _leased(stored.lease_until - now)
        self._catalog.counts.removed_objects += 1
        # A replica on SSD would come back after a loss of power.
        self._catalog.must_last |= stored.before is not None or bool(stored.complete(Tier.SSD))
        if stored.before is not None:
            gone = ObjectGone(stored.key, stored.before.object_id, stored.object_id + 1)
            self._catalog.records.append(gone)
            self._catalog.let_go(stored.before, now)
            stored.before = None
        self._catalog.unlink(stored, "removed by force" if force else "removed", now)
        return True

    def drop_replicas(self, message: m.DropReplicas, _: Received, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        for key in scoped_all(message.tenant, message.keys):
            stored = self._catalog.objects.readable.get(key)
            extents = [] if stored is None else stored.complete()
            if message.segment:
                extents = [extent for extent in extents if extent.segment.name == message.segment]
            else:
                extents = [extent for extent in extents if extent.segment.tier is Tier.MEMORY]
            if stored is None or not extents:
                outcomes.append(False)
            elif stored.lease_until > now:
                outcomes.append(_leased(stored.lease_until - now))
            else:
                # A replica on SSD would come back after a loss of power.
                self._catalog.must_last |= any(extent.segment.tier is Tier.SSD for extent in extents)
                for extent in extents:
                    self._catalog.drop_extent(stored, extent, "removed from there", now)
                self._catalog.drop_extras(stored, "removed from where it lasts", now)
                outcomes.append(True)
        return m.Outcomes(outcomes)


def _leased(left_s: float) -> Refusal:
    return Refusal("leased", f"a reader may hold it for another {left_s:.3g} s")
