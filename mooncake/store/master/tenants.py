# SPDX-License-Identifier: Apache-2.0
"""Accounts of tenants: how many bytes of memory each uses, and its quota.

An account counts the memory of its tenant's objects, written or being written, once for each
replica, and that of removed ones until it is released (``catalog.py``). It counts what is allocated, so
that many objects of one byte do not occupy 64 times their quota. SSD is not counted: a demoted object has
left the quota. An object's scoped key names its tenant (``objects.py``). ``placement.py``
decides what follows from a full account.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES
from mooncake.store.master.eviction import MAX_SPARED
from mooncake.store.master.log_records import QuotaSet, Record
from mooncake.store.master.objects import Extent, ObjectState, StoredObject, is_name, scoped, split_scoped
from mooncake.store.master.segments import Segment
from mooncake.types import Tier

MAX_QUOTA_BYTES = (1 << 63) - 1
"""The largest quota, which fits the records and messages that carry it."""


def aligned(size_bytes: int) -> int:
    """Bytes that an object of this size takes in memory."""
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def check_tenant(tenant: str) -> Refusal | None:
    """Why there can't be such a tenant, or None."""
    if not is_name(tenant):
        return Refusal("unknown_tenant", f"a tenant's name has at most {m.MAX_KEY_BYTES} bytes and no NUL")
    return None


class Account:
    """The account of one tenant."""

    __slots__ = (
        "_aside",
        "_heap",
        "_order",
        "_pin_ends",
        "_pinned",
        "_pinned_bytes",
        "num_objects",
        "quota_bytes",
        "resting_bytes",
        "tenant",
        "used_bytes",
    )

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        """Name of the tenant; "" is the default one."""
        self.quota_bytes: int | None = None
        """None: no limit."""
        self.used_bytes = 0
        self.resting_bytes = 0
        """Those of them that wait for their release."""
        self.num_objects = 0
        """Number of readable objects."""
        self._heap: list[tuple[float, int, int, StoredObject]] | None = None
        """(lease end, object id, tie-breaker, object): its objects by age, while there is a quota. An object
        that was set aside and restored has the id of one that is still in the heap (``Catalog.show``)."""
        self._aside: dict[int, StoredObject] = {}
        """Those that can't leave until they change (``changed``), by id. They are not in the heap, so that no
        search visits them."""
        self._pin_ends: list[tuple[float, int, int, StoredObject]] = []
        """(end of its soft pin, ...): those of them that can leave when time has passed."""
        self._pinned: dict[int, int] = {}
        """Bytes in memory of those that are pinned hard, by id."""
        self._pinned_bytes = 0
        self._order = itertools.count()

    @property
    def name(self) -> str:
        return self.tenant or "default"

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes may be allocated."""
        return self.quota_bytes is None or self.used_bytes + size_bytes <= self.quota_bytes

    def could_have_room(self, size_bytes: int) -> bool:
        """Whether so many bytes could be allocated if each object that is not pinned hard left."""
        kept_bytes = self._pinned_bytes + self.resting_bytes
        return self.quota_bytes is None or kept_bytes + size_bytes <= self.quota_bytes

    def status(self) -> m.QuotaStatus:
        return m.QuotaStatus(self.name, self.quota_bytes, self.used_bytes, self.num_objects)

    def limit(self, quota_bytes: int | None, readable: Iterable[StoredObject]) -> None:
        """Set the quota, rounded up to what can be allocated."""
        self.quota_bytes, self._heap = None, None
        self._aside, self._pin_ends, self._pinned, self._pinned_bytes = {}, [], {}, 0
        if quota_bytes is not None:
            self.quota_bytes = min(aligned(quota_bytes), MAX_QUOTA_BYTES)
            mine = [stored for stored in readable if stored.account is self]
            self._heap = [self._entry(stored, 0.0) for stored in mine]
            heapq.heapify(self._heap)
            for stored in mine:
                self._count_pinned(stored)

    def shown(self, stored: StoredObject) -> None:
        self.num_objects += 1
        if self._heap is not None:
            if len(self._heap) > 1024 + 2 * self.num_objects:
                self._heap[:] = [entry for entry in self._heap if entry[3].is_readable]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, self._entry(stored, 0.0))
            self._count_pinned(stored)

    def hidden(self, stored: StoredObject) -> None:
        self.num_objects -= 1
        if self._aside:
            self._take_from_aside(stored)
        if self._pinned:
            self._pinned_bytes -= self._pinned.pop(stored.object_id, 0)

    def changed(self, stored: StoredObject) -> None:
        """Its replicas, its pins or those of its group have changed, or a descendant has left."""
        if self._heap is not None:
            self._count_pinned(stored)
            if self._take_from_aside(stored):
                heapq.heappush(self._heap, self._entry(stored, 0.0))

    def _take_from_aside(self, stored: StoredObject) -> bool:
        """Whether this very object, not another one of its id, was set aside."""
        is_aside = self._aside.get(stored.object_id) is stored
        if is_aside:
            del self._aside[stored.object_id]
        return is_aside

    def _count_pinned(self, stored: StoredObject) -> None:
        """Count its bytes again, if it is pinned hard now or was."""
        self._pinned_bytes -= self._pinned.pop(stored.object_id, 0)
        if not stored.may_be_evicted:
            held_bytes = aligned(stored.size_bytes) * len(stored.complete(Tier.MEMORY))
            self._pinned[stored.object_id] = held_bytes
            self._pinned_bytes += held_bytes

    def _entry(self, stored: StoredObject, rank: float) -> tuple[float, int, int, StoredObject]:
        return rank, stored.object_id, next(self._order), stored

    def victims(
        self, now: float, may_leave: Callable[[StoredObject, Extent], bool]
    ) -> Generator[tuple[StoredObject, Extent], None, None]:
        """Its own objects with a replica in memory, the least recently used first; never pinned ones.

        Args:
            may_leave: whether this replica may leave, as long as nothing that ``changed`` reports happens.
        """
        if self._heap is None:
            return
        heap, spared, num_held = self._heap, list[tuple[float, int, int, StoredObject]](), 0
        while self._pin_ends and self._pin_ends[0][0] <= now:
            stored = heapq.heappop(self._pin_ends)[3]
            if self._aside.get(stored.object_id) is stored:
                self.changed(stored)
        try:
            while heap and num_held < MAX_SPARED:
                rank, _, _, stored = heap[0]
                if not stored.is_readable:
                    heapq.heappop(heap)
                elif stored.leased_until > rank:
                    heapq.heapreplace(heap, self._entry(stored, stored.leased_until))
                elif rank > now:
                    return
                else:
                    entry = heapq.heappop(heap)
                    extents = stored.complete(Tier.MEMORY)
                    if not extents or not stored.may_be_evicted or not may_leave(stored, extents[0]):
                        self._aside[stored.object_id] = stored
                    elif stored.pinned_until > now:
                        self._set_aside_until_unpinned(stored)
                    else:
                        spared.append(entry)
                        if any(extent.held_until > now for extent in extents):
                            num_held += 1
                        else:
                            yield stored, extents[0]
        finally:
            for entry in spared:
                if entry[3].is_readable:
                    heapq.heappush(heap, entry)

    def _set_aside_until_unpinned(self, stored: StoredObject) -> None:
        self._aside[stored.object_id] = stored
        if len(self._pin_ends) > 1024 + 2 * self.num_objects:
            latest_first = sorted(self._pin_ends, reverse=True)
            earliest = {one[1]: one for one in latest_first if self._aside.get(one[1]) is one[3]}
            self._pin_ends = sorted(earliest.values())  # a sorted list is a heap
        heapq.heappush(self._pin_ends, self._entry(stored, stored.pinned_until))

    def check(self, readable: Iterable[StoredObject]) -> None:
        """Assert that each of these objects, its own, is a candidate or set aside."""
        mine = list(readable)
        if self._heap is not None:
            known = {id(entry[3]) for entry in self._heap} | {id(one) for one in self._aside.values()}
            assert all(id(stored) in known for stored in mine), self.tenant
            assert all(stored.is_readable for stored in self._aside.values()), self.tenant
            pinned = {one.object_id: one for one in mine if not one.may_be_evicted}
            assert self._pinned.keys() == pinned.keys(), self.tenant
            for number, one in pinned.items():
                assert self._pinned[number] == aligned(one.size_bytes) * len(one.complete(Tier.MEMORY)), one
        assert self._pinned_bytes == sum(self._pinned.values()), self.tenant


class Tenants:
    """Accounts by tenant."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}

    def account_of(self, key: str) -> Account:
        """The account of a scoped key's tenant."""
        tenant = split_scoped(key)[0] if "\0" in key else ""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account(tenant)
        return account

    def charge(self, stored: StoredObject, extent: Extent) -> None:
        if stored.account is None:
            stored.account = self.account_of(stored.key)
        if extent.segment.tier is Tier.MEMORY:
            extent.is_charged = True
            stored.account.used_bytes += aligned(stored.size_bytes)

    def charge_row(self, account: Account, segment: Segment, size_bytes: int, num_objects: int) -> None:
        """``charge`` for so many objects on ``segment``, each of ``size_bytes``. They name their ``account``,
        and their extents that they are charged."""
        if segment.tier is Tier.MEMORY:
            account.used_bytes += aligned(size_bytes) * num_objects

    def rests(self, stored: StoredObject, extent: Extent) -> None:
        """Its removed replica stays in the account until ``discharge``."""
        extent.is_resting = True
        if extent.is_charged:
            stored.account.resting_bytes += aligned(stored.size_bytes)

    def discharge(self, stored: StoredObject, extent: Extent) -> None:
        """Take the extent out of its tenant's account, if it is there."""
        if extent.is_charged:
            extent.is_charged = False
            stored.account.used_bytes -= aligned(stored.size_bytes)
            if extent.is_resting:
                stored.account.resting_bytes -= aligned(stored.size_bytes)
            self.tidy(stored.account)

    def shown(self, stored: StoredObject) -> None:
        stored.account.shown(stored)

    def hidden(self, stored: StoredObject) -> None:
        stored.account.hidden(stored)
        self.tidy(stored.account)

    def tidy(self, account: Account) -> None:
        """Remove an account without objects and quota."""
        has_nothing = not account.used_bytes and not account.num_objects
        if has_nothing and account.quota_bytes is None and self.accounts.get(account.tenant) is account:
            del self.accounts[account.tenant]

    def set_quota(self, tenant: str, size_bytes: int | None, readable: Iterable[StoredObject]) -> None:
        account = self.account_of(scoped(tenant, ""))
        account.limit(size_bytes, readable)
        self.tidy(account)

    def records(self) -> list[Record]:
        return [
            QuotaSet(account.tenant, account.quota_bytes)
            for account in self.accounts.values()
            if account.quota_bytes is not None
        ]

    def check(self, objects: list[StoredObject]) -> None:
        used: dict[str, int] = {}
        resting: dict[str, int] = {}
        num_objects: dict[str, int] = {}
        for stored in objects:
            extents = [extent for extent in (*stored.extents, *stored.resting) if extent.is_charged]
            memory = [extent for extent in stored.extents if extent.segment.tier is Tier.MEMORY]
            assert [extent for extent in extents if not extent.is_resting] == memory, stored
            if not extents and stored.state is ObjectState.UNLINKED:
                continue
            assert self.accounts[split_scoped(stored.key)[0]] is stored.account, stored
            tenant = stored.account.tenant
            size_bytes = aligned(stored.size_bytes)
            used[tenant] = used.get(tenant, 0) + size_bytes * len(extents)
            num_resting = sum(extent.is_resting for extent in extents)
            resting[tenant] = resting.get(tenant, 0) + size_bytes * num_resting
            num_objects[tenant] = num_objects.get(tenant, 0) + stored.is_readable
        for tenant, account in self.accounts.items():
            assert account.used_bytes == used.get(tenant, 0), (tenant, account.used_bytes, used)
            assert account.resting_bytes == resting.get(tenant, 0), (tenant, account.resting_bytes, resting)
            assert account.num_objects == num_objects.get(tenant, 0), tenant
            account.check(one for one in objects if one.is_readable and one.account is account)
