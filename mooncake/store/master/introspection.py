# SPDX-License-Identifier: Apache-2.0
"""The master's handlers for operators and dashboards: contents, their histories, and tenants' quotas."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import cast

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received
from mooncake.store.master.key_scans import KeyScans
from mooncake.store.master.log_records import QuotaSet
from mooncake.store.master.objects import StoredObject, scoped, scoped_all, scoped_key, split_scoped
from mooncake.store.master.prefix_counts import PrefixCounts
from mooncake.store.master.tenants import MAX_QUOTA_BYTES, check_tenant
from mooncake.types import ObjectKey

MAX_SEPARATOR = 8
PREFIX_COST = 4
"""Microseconds, roughly, to count one key by its prefixes."""


class Introspection:
    """Answers GetMasterStatus, ListKeys, ListPrefixes, ObjectStory and Inspect."""

    def __init__(
        self, catalog: Catalog, scans: KeyScans, reporters: Callable[[float], list[m.ReporterStatus]]
    ) -> None:
        """``reporters``: the nodes that reported wrong bytes (``verification.py``)."""
        self._catalog = catalog
        self._scans = scans
        self._reporters = reporters

    def status(self, _: m.GetMasterStatus, __: Received, now: float) -> m.MasterStatus:
        segments = [
            m.SegmentStatus(
                segment=segment.name,
                epoch=segment.epoch,
                host=segment.host,
                state=str(segment.state),
                size_bytes=segment.allocator.size_bytes,
                allocated_bytes=segment.allocator.allocated_bytes,
                largest_free_bytes=segment.allocator.largest_free_bytes,
                num_objects=segment.num_objects,
                rests_s=max(0.0, segment.rests_until - now),
                tier=segment.tier,
                node=segment.node,
                address=segment.address,
                is_draining=segment.is_draining,
                num_tasks=segment.num_tasks,
                is_writable=segment.takes_objects(now),
                disk_full=segment.disk_full,
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
            reporters=self._reporters(now),
        )

    def list_keys(self, message: m.ListKeys, event: Received, now: float) -> m.Keys | Failure | None:
        if "\0" in message.tenant or "\0" in message.prefix:
            return m.Keys([])  # such a prefix would name another tenant's keys
        start, num_parts = scoped(message.tenant, message.prefix), message.num_parts
        if not 0 <= message.part < num_parts:
            return Failure("invalid_argument", f"part {message.part} of {num_parts}: they count from 0")
        found: list[str] = []

        def visit(key: ObjectKey, now: float) -> int | None:
            if len(found) >= message.limit:
                return None
            if not key.startswith(start) or ("\0" in key) is not ("\0" in start):
                return 1
            if num_parts > 1 and zlib.crc32(key.encode()) % num_parts != message.part:
                return 1
            stored = self._catalog.objects.readable.get(key)
            if stored is not None and stored.is_visible:
                found.append(split_scoped(key)[1])
            return 1

        answer = self._scans.begin(event, visit, lambda now: m.Keys(found), now)
        return cast("m.Keys | Failure | None", answer)

    def list_prefixes(
        self, message: m.ListPrefixes, event: Received, now: float
    ) -> m.Prefixes | Failure | None:
        if not 0 < len(message.separator) <= MAX_SEPARATOR or "\0" in message.separator:
            return Failure("invalid_argument", f"a separator of 1 to {MAX_SEPARATOR} characters is allowed")
        counts = PrefixCounts(message.prefix, message.separator, message.depth, message.limit)
        if "\0" in message.tenant or "\0" in message.prefix:
            return m.Prefixes([], 0)  # such a prefix would name another tenant's keys
        start = scoped(message.tenant, message.prefix)

        def visit(key: ObjectKey, now: float) -> int:
            if not key.startswith(start) or ("\0" in key) is not ("\0" in start):
                return 1
            stored = self._catalog.objects.readable.get(key)
            if stored is not None and stored.is_visible:
                counts.add(split_scoped(key)[1], stored.size_bytes)
            return PREFIX_COST

        def end(now: float) -> m.Prefixes:
            return m.Prefixes([(name, *row) for name, row in counts.rows.items()], counts.num_folded)

        answer = self._scans.begin(event, visit, end, now)
        return cast("m.Prefixes | Failure | None", answer)

    def story(self, message: m.ObjectStory, _: Received, now: float) -> m.StoryLines:
        """Each line with its age: the master's clock counts from the start of its host."""
        lines = self._catalog.story(scoped_key(message.tenant, message.key))
        parts = [line.split(" ", 1) for line in lines]
        ages = [max(0.0, now - float(at)) for at, _ in parts]  # the instant was rounded, perhaps up
        return m.StoryLines([f"{age:.3f} s ago: {what}" for age, (_, what) in zip(ages, parts, strict=True)])

    def inspect(self, message: m.Inspect, _: Received, now: float) -> m.Inspected:
        objects = self._catalog.objects
        found = (
            objects.readable.get(key) or objects.writing.get(key)
            for key in scoped_all(message.tenant, message.keys)
        )
        return m.Inspected([None if stored is None else _status(stored, now) for stored in found])


class QuotaRequests:
    """Answers SetQuota and AskQuotas."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def set_quota(self, message: m.SetQuota, _: Received, now: float) -> m.Quotas | m.RefusedReply:
        tenant = "" if message.tenant == "default" else message.tenant
        refusal = check_tenant(tenant)
        if refusal is not None:
            return m.RefusedReply(refusal)
        if message.size_bytes is not None and not 0 <= message.size_bytes <= MAX_QUOTA_BYTES:
            allowed = f"allowed: 0 to {MAX_QUOTA_BYTES}"
            return m.RefusedReply(
                Refusal("invalid_size", f"a quota of {message.size_bytes} bytes; {allowed}")
            )
        readable = self._catalog.objects.readable.values()
        self._catalog.tenants.set_quota(tenant, message.size_bytes, readable)
        self._catalog.records.append(QuotaSet(tenant, message.size_bytes))
        return self._quotas()

    def ask(self, _: m.AskQuotas, __: Received, now: float) -> m.Quotas:
        return self._quotas()

    def _quotas(self) -> m.Quotas:
        return m.Quotas([account.status() for account in self._catalog.tenants.accounts.values()])


def _status(stored: StoredObject, now: float) -> m.ObjectStatus:
    replicas = [
        m.ReplicaDetail(
            segment=extent.segment.name,
            host=extent.segment.host,
            tier=extent.segment.tier,
            address=extent.segment.address + extent.offset,
            is_complete=extent.is_complete,
            is_alive=extent.segment.is_alive,
        )
        for extent in stored.extents
    ]
    return m.ObjectStatus(
        object_id=stored.object_id,
        size_bytes=stored.size_bytes,
        chunk_bytes=stored.chunk_bytes,
        num_uses=stored.num_uses,
        leased_s=max(0.0, stored.leased_until - now),
        pinned_s=None if stored.is_hard_pinned else max(0.0, stored.soft_pin_until - now),
        group=split_scoped(stored.group)[1],
        parent=split_scoped(stored.parent)[1],
        data_type=stored.data_type,
        is_writing=not stored.is_readable,
        replicas=replicas,
    )
