"""The master's part for readers: where objects are, and leases on them."""

from __future__ import annotations

import msgspec

from mooncake.store import messages as m
from mooncake.store.catalog import Catalog
from mooncake.store.effects import Received
from mooncake.store.objects import StoredObject


class Reading:
    """Answers Lookup, Exists and Renew."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def lookup(self, message: m.Lookup, _: Received, now: float) -> m.Found:
        readable = self._catalog.objects.readable
        lease_until = now + self._catalog.settings.lease_s
        found: list[m.Stored | None] = []
        num_hits = 0
        for key in message.keys:
            stored = readable.get(key)
            if stored is None or not (stored.extents[0].segment.is_alive or stored.is_visible):
                found.append(None)
                continue
            stored.lease_until = lease_until
            num_hits += 1
            found.append(stored.stored if len(stored.extents) == 1 else _visible_part(stored))
        self._catalog.counts.lookups += len(found)
        self._catalog.counts.lookup_hits += num_hits
        return m.Found(self._catalog.settings.lease_s, found)

    def exists(self, message: m.Exists, _: Received, now: float) -> m.Flags:
        readable = self._catalog.objects.readable
        lease_until = now + self._catalog.settings.lease_s
        flags = bytearray(len(message.keys))
        for index, key in enumerate(message.keys):
            stored = readable.get(key)
            if stored is not None and (stored.extents[0].segment.is_alive or stored.is_visible):
                stored.lease_until = lease_until
                flags[index] = 1
        return m.Flags(self._catalog.settings.lease_s, bytes(flags))

    def renew(self, message: m.Renew, _: Received, now: float) -> m.Flags:
        lease_until = now + self._catalog.settings.lease_s
        flags = bytearray(len(message.keys))
        for index, (key, object_id) in enumerate(zip(message.keys, message.object_ids, strict=False)):
            stored = self._catalog.objects.readable.get(key)
            if stored is not None and stored.object_id == object_id and stored.is_visible:
                stored.lease_until = lease_until
                flags[index] = 1
        return m.Flags(self._catalog.settings.lease_s, bytes(flags))


def _visible_part(stored: StoredObject) -> m.Stored | None:
    assert stored.stored is not None
    replicas = [
        replica
        for replica, extent in zip(stored.stored.replicas, stored.extents, strict=True)
        if extent.segment.is_alive
    ]
    return msgspec.structs.replace(stored.stored, replicas=replicas)
