"""The master's part for whoever takes objects away."""

from __future__ import annotations

import re

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.catalog import Catalog
from mooncake.store.effects import Received
from mooncake.store.objects import StoredObject, scoped_all, split_scoped
from mooncake.store.records import ObjectGone
from mooncake.types import Tier

MAX_PATTERN = 1024


class Removing:
    """Answers Remove, RemoveMatching and DropReplicas."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def remove(self, message: m.Remove, _: Received, now: float) -> m.Outcomes:
        readable = self._catalog.objects.readable
        outcomes: list[bool | Refusal] = []
        for key in scoped_all(message.tenant, message.keys):
            stored = readable.get(key)
            if stored is None:
                self._catalog.remove_absent(key)
            outcomes.append(self._remove(stored, message.force, now))
        return m.Outcomes(outcomes)

    def remove_matching(self, message: m.RemoveMatching, _: Received, now: float) -> m.Removed | Failure:
        if len(message.pattern) > MAX_PATTERN:
            return Failure("invalid_argument", f"a pattern of more than {MAX_PATTERN} characters")
        try:
            pattern = re.compile(message.pattern)
        except re.error as error:
            return Failure("invalid_argument", f"{message.pattern!r} is no regular expression: {error}")
        tenant = "" if message.tenant == "default" else message.tenant
        num_removed = num_leased = 0
        for key, stored in list(self._catalog.objects.readable.items()):
            owner, name = split_scoped(key)
            if owner == tenant and pattern.search(name):
                is_removed = self._remove(stored, message.force, now) is True
                num_removed += is_removed
                num_leased += not is_removed
        if not message.pattern:
            self._catalog.clear_before(tenant, self._catalog.objects.last_id + 1)
            self._catalog.must_last = True
        return m.Removed(num_removed, num_leased)

    def _remove(self, stored: StoredObject | None, force: bool, now: float) -> bool | Refusal:
        if stored is None or not stored.is_readable:
            return False
        if stored.lease_until > now and not force:
            return _leased(stored.lease_until - now)
        self._catalog.counts.removed_objects += 1
        # What is on SSD would come back with it after a loss of power.
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
                for extent in extents:
                    self._catalog.drop_extent(stored, extent, "removed from there", now)
                outcomes.append(True)
        return m.Outcomes(outcomes)


def _leased(left_s: float) -> Refusal:
    return Refusal("leased", f"a reader may hold it for another {left_s:.3g} s")
