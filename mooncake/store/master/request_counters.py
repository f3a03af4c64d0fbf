# SPDX-License-Identifier: Apache-2.0
"""Counts requests and their outcomes by the existing master's names.

A request with one key counts as the plain request of its name, one with several as the batch. A lookup
miss counts as a failure, as in the existing program; a missing key is no failure of ``exist_key``.
``docs/metrics.md`` lists those of that program's counters that mean something else here.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import ObjectRemoved, ObjectShown
from mooncake.store.master.objects import StoredObject, scoped_all

SIZE_BOUNDS = (4096, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
"""Bucket bounds, in bytes, of the histogram of object sizes."""


MAX_REJECTED = 2000


class RequestCounters:
    """``counts`` by ``<name>_<what>``; ``num_by_size`` per bucket, the last one for larger objects."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._soft_pinned: dict[int, StoredObject] = {}
        """By object id; some may no longer be pinned."""
        catalog.observe({ObjectShown: self._shown, ObjectRemoved: self._removed})
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.num_by_size = [0] * (len(SIZE_BOUNDS) + 1)
        self.put_bytes = 0
        self.rejected: dict[tuple[str, str], int] = {}
        """Puts by tenant and reason; bounded, because any name may come."""
        self._names: dict[type, Callable[[Any, Any], None]] = {
            m.Exists: self._exists,
            m.LookupObjects: self._lookup,
            m.PutStart: self._put_start,
            m.PutEnd: self._put_end,
            m.PutWritten: self._put_written,
            m.PutAbort: lambda _, reply: self._batch("put_revoke", *_undone(reply)),
            m.DescribeSegments: lambda request, reply: self._batch(
                "batch_query_ip", len(request.segments), reply.descriptors.count(None), is_batch=True
            ),
            m.DropReplicas: lambda _, reply: self._batch(
                "batch_replica_clear", *_undone(reply), is_batch=True
            ),
            m.Remove: lambda _, reply: self._each("remove", *_undone(reply)),
            m.RemoveMatching: lambda request, _: self._one(
                "remove_by_regex" if request.pattern else "remove_all", True
            ),
            m.Mount: self._mount,
            m.Pin: self._pin,
            m.Unmount: lambda _, reply: self._one("unmount_segment", reply.is_known),
            m.Heartbeat: lambda _, reply: self._one("ping", reply.is_known),
            m.Poll: self._poll,
            m.ListKeys: lambda *_: self._one("get_replica_list_by_regex", True),
            m.CopyObject: lambda request, reply: self._one(
                "create_move_task" if request.source else "create_copy_task", isinstance(reply, m.JobReply)
            ),
            m.AskJob: lambda _, reply: self._one("query_task", isinstance(reply, m.JobReply)),
        }

    def _shown(self, event: ObjectShown) -> None:
        if event.stored.soft_pin_until:
            self._soft_pinned[event.stored.object_id] = event.stored

    def _removed(self, event: ObjectRemoved) -> None:
        if self._soft_pinned:
            self._soft_pinned.pop(event.stored.object_id, None)

    def num_soft_pinned(self, now: float) -> int:
        still = [one for one in self._soft_pinned.values() if one.is_readable and one.soft_pin_until > now]
        self._soft_pinned = {one.object_id: one for one in still}
        return len(still)

    def add(self, request: msgspec.Struct, reply: msgspec.Struct) -> None:
        """Count a request with its reply."""
        count = self._names.get(type(request))
        if count is not None and not isinstance(reply, Failure):
            count(request, reply)

    def _one(self, name: str, is_done: bool) -> None:
        self.counts[f"{name}_requests"] += 1
        if not is_done:
            self.counts[f"{name}_failures"] += 1

    def _each(self, name: str, num_items: int, num_failed: int) -> None:
        self.counts[f"{name}_requests"] += num_items
        self.counts[f"{name}_failures"] += num_failed

    def _batch(self, name: str, num_items: int, num_failed: int, is_batch: bool = False) -> None:
        if num_items == 1 and not is_batch:
            self._one(name, not num_failed)
            return
        name, counts = name if is_batch else f"batch_{name}", self.counts
        counts[f"{name}_requests"] += 1
        counts[f"{name}_items"] += num_items
        if num_failed:
            counts[f"{name}_failed_items"] += num_failed
            counts[f"{name}_failures" if num_failed == num_items else f"{name}_partial_successes"] += 1

    def _exists(self, request: m.Exists, _: m.Flags) -> None:
        if len(request.keys) == 1:
            self.counts["exist_key_requests"] += 1
        else:
            self._batch("exist_key", len(request.keys), 0)

    def _lookup(self, request: m.LookupObjects, reply: m.LookupReply) -> None:
        if len(request.keys) == 1 and (found := reply.objects[0]) is not None:
            self.counts["hit_nums"] += 1
            self.counts["hit_bytes"] += found.size_bytes
            self.counts["get_replica_list_requests"] += 1
            return
        sizes = [one.size_bytes for one in reply.objects if one is not None]
        self.counts["hit_nums"] += len(sizes)
        self.counts["hit_bytes"] += sum(sizes)
        self._batch("get_replica_list", len(request.keys), len(request.keys) - len(sizes))

    def _put_start(self, request: m.PutStart, reply: m.PutStarted) -> None:
        self._batch("put_start", len(request.keys), len(reply.refusals))
        for refusal in reply.refusals.values():
            self._refused(request.tenant, refusal)
        wanted = request.policy.num_replicas
        for size_bytes, reserved in zip(request.sizes, reply.reserved, strict=False):
            if reserved is None:
                continue
            if len(reserved.replicas) < wanted:
                self.counts["put_start_partial_allocations"] += 1
            self.num_by_size[bisect.bisect_left(SIZE_BOUNDS, size_bytes)] += 1
            self.put_bytes += size_bytes

    def _refused(self, tenant: str, refusal: Refusal) -> None:
        self.counts["put_start_alloc_failures"] += refusal.code == "no_space"
        if refusal.code in ("quota_exceeded", "unknown_tenant"):
            which = (tenant or "default", refusal.code)
            if which in self.rejected or len(self.rejected) < MAX_REJECTED:
                self.rejected[which] = self.rejected.get(which, 0) + 1

    def _put_written(self, request: m.PutWritten, reply: m.PutsWritten) -> None:
        """Count it as a start and an end; those that are put again are counted then."""
        num_refused = num_again = 0
        for size_bytes, outcome in zip(request.sizes, reply.outcomes, strict=True):
            if outcome is True:
                self.num_by_size[bisect.bisect_left(SIZE_BOUNDS, size_bytes)] += 1
                self.put_bytes += size_bytes
            elif outcome is not False and outcome.code in m.PUT_AGAIN:
                num_again += 1
            elif outcome is not False:
                self._refused(request.tenant, outcome)
                num_refused += 1
        num_items = len(reply.outcomes) - num_again
        if num_items == 1 and not num_refused:
            self.counts["put_start_requests"] += 1
            self.counts["put_end_requests"] += 1
        elif num_items:
            self._batch("put_start", num_items, num_refused)
            if num_items > num_refused:
                self._batch("put_end", num_items - num_refused, 0)

    def _put_end(self, request: m.PutEnd, reply: m.Outcomes) -> None:
        num_refused = sum(isinstance(outcome, Refusal) for outcome in reply.outcomes)
        self._batch("put_end", len(request.keys), num_refused)

    def _pin(self, request: m.Pin, _: m.Outcomes) -> None:
        for key in scoped_all(request.tenant, request.keys):
            stored = self._catalog.objects.readable.get(key)
            if stored is not None and stored.soft_pin_until:
                self._soft_pinned[stored.object_id] = stored

    def _mount(self, _: m.Mount, reply: m.Mounted) -> None:
        self._one("mount_segment", reply.refusal is None)
        if reply.num_objects:
            self._one("remount_segment", True)

    def _poll(self, request: m.Poll, reply: m.Polled) -> None:
        self._one("fetch_tasks", reply.is_known)
        for done in request.done:
            self._one("update_task", done.refusal is None)


def _undone(reply: m.Outcomes) -> tuple[int, int]:
    """The number of outcomes, and of those for which nothing was done."""
    return len(reply.outcomes), len(reply.outcomes) - reply.outcomes.count(True)
