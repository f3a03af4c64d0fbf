# SPDX-License-Identifier: Apache-2.0
"""Accounts of tenants: what is counted, which objects are victims, which accounts are removed."""

from __future__ import annotations

from random import Random

import pytest

from mooncake.store.master.log_records import QuotaSet
from mooncake.store.master.objects import Extent, Objects, StoredObject, scoped
from mooncake.store.master.segments import Segment
from mooncake.store.master.tenants import Account, Tenants, check_tenant
from mooncake.store.messages import Mount
from mooncake.types import Tier


class Book:
    """Accounts, and objects that are charged to them."""

    def __init__(self) -> None:
        self.tenants, self.objects = Tenants(), Objects(0)
        mounts = [Mount(name, 1, "h", 0, 1 << 20, b"", 0.0, tier) for name, tier in SEGMENTS]
        self.segments = {mount.segment: Segment(mount, None, 0.0) for mount in mounts}
        self.may_leave = True
        self._offset = 0

    def put(self, key: str, tenant: str = "red", size_bytes: int = 10, where: str = "m") -> StoredObject:
        self._offset += 64
        extent = Extent(self.segments[where], self._offset)
        stored = self.objects.begin(scoped(tenant, key), 1, size_bytes, size_bytes, [extent], 30.0)
        self.tenants.charge(stored, extent)
        self.objects.finish(stored, b"crc!", 0.0)
        self.tenants.shown(stored)
        self.check()
        return stored

    def remove(self, stored: StoredObject) -> None:
        self.objects.unlink(stored)
        self.tenants.hidden(stored)
        extents, stored.extents = stored.extents, []
        for extent in extents:
            self.tenants.discharge(stored, extent)
        self.check()

    def restore(self, stored: StoredObject) -> StoredObject:
        """Enter the object that was removed again, under its id."""
        again = StoredObject(stored.key, stored.object_id, 1, 10, 10, [Extent(self.segments["m"], 0)], 0.0)
        self.objects.writing[again.key] = again
        self.tenants.charge(again, again.extents[0])
        self.objects.finish(again, b"crc!", 0.0)
        self.tenants.shown(again)
        return again

    def victims(self, tenant: str = "red", now: float = 100.0) -> list[str]:
        found = list(self.tenants.accounts[tenant].victims(now, lambda stored, extent: self.may_leave))
        return [stored.key.split("\0")[-1] for stored, _ in found]

    def limit(self, size_bytes: int | None, tenant: str = "red") -> None:
        self.tenants.set_quota(tenant, size_bytes, self.objects.readable.values())

    def check(self) -> None:
        self.tenants.check([*self.objects.readable.values(), *self.objects.writing.values()])


NAMES = ("pinned", "soft", "cold", "blocked")
SEGMENTS = [("m", Tier.MEMORY), ("s", Tier.SSD)]


@pytest.fixture
def book() -> Book:
    return Book()


def test_only_memory_counts_with_what_is_allocated(book: Book) -> None:
    book.put("a", size_bytes=1)
    book.put("b", size_bytes=30, where="s")
    account = book.tenants.accounts["red"]
    assert (account.used_bytes, account.num_objects) == (64, 2)
    assert account.status().tenant == "red" and account.has_room(1 << 40)


def test_a_tenant_without_objects_and_quota_has_no_account(book: Book) -> None:
    stored = book.put("a")
    book.remove(stored)
    assert book.tenants.accounts == {}
    book.limit(5)
    assert list(book.tenants.accounts) == ["red"]
    book.limit(None)
    assert book.tenants.accounts == {}


def test_a_quota_is_room_for_what_is_there_and_what_comes(book: Book) -> None:
    book.put("a", size_bytes=100)
    book.limit(200)
    account = book.tenants.accounts["red"]
    assert account.has_room(128) and not account.has_room(129), "of 256 bytes: space is a multiple of 64"
    assert book.tenants.records() == [QuotaSet("red", 256)]
    book.limit(1)
    assert account.has_room(0) is False and account.could_have_room(64) and not account.could_have_room(65)


def test_victims_are_its_own_the_least_recently_used_first(book: Book) -> None:
    old, new, other = book.put("old"), book.put("new"), book.put("other", tenant="blue")
    old.lease_until, new.lease_until = 50.0, 40.0
    book.limit(15)
    later = book.put("later")
    later.lease_until = 45.0
    assert book.victims() == ["new", "later", "old"]
    assert book.victims() == ["new", "later", "old"], "an unused victim stays"
    assert book.victims(now=44.0) == ["new"], "the others are leased"
    book.remove(new)
    assert book.victims() == ["later", "old"] and other.is_readable


def test_pinned_and_held_objects_and_those_on_ssd_are_no_victims(book: Book) -> None:
    book.limit(15)
    for name in ("pinned", "soft", "held", "cold", "plain"):
        book.put(name, where="s" if name == "cold" else "m")
    readable = book.objects.readable
    readable["red\0pinned"].is_hard_pinned = True
    readable["red\0soft"].soft_pin_until = 200.0
    readable["red\0held"].extents[0].held_until = 200.0
    assert book.victims() == ["plain"]
    assert sorted(book.victims(now=300.0)) == ["held", "plain", "soft"]


def test_what_can_not_leave_is_not_looked_at_again_until_it_changes(book: Book) -> None:
    """A tenant with many such objects and a full quota would make each of its puts slow."""
    book.limit(64)
    pinned, soft, cold, blocked = (book.put(name, where="s" if name == "cold" else "m") for name in NAMES)
    pinned.is_hard_pinned, soft.soft_pin_until = True, 200.0
    account = book.tenants.accounts["red"]
    account.changed(pinned)
    book.may_leave = False
    assert book.victims() == [] and account._heap == [] and len(account._aside) == 4
    book.check()
    book.may_leave = True
    assert book.victims() == []
    account.changed(blocked)
    assert book.victims() == ["blocked"]
    soft.soft_pin_until, pinned.is_hard_pinned = 0.0, False
    cold.extents[0].segment = book.segments["m"]
    book.tenants.charge(cold, cold.extents[0])
    for stored in (pinned, soft, cold):
        account.changed(stored)
    assert book.victims() == ["pinned", "soft", "cold", "blocked"]
    soft.soft_pin_until = 200.0
    assert book.victims() == ["pinned", "cold", "blocked"]
    assert book.victims(now=200.0) == ["pinned", "soft", "cold", "blocked"]
    book.remove(pinned)
    assert book.victims(now=200.0) == ["soft", "cold", "blocked"]


def test_pins_that_are_set_and_removed_do_not_pile_up(book: Book) -> None:
    book.limit(64)
    stored = book.put("a")
    account = book.tenants.accounts["red"]
    for _ in range(3000):
        stored.soft_pin_until = 200.0
        assert book.victims() == []
        stored.soft_pin_until = 0.0
        account.changed(stored)
    assert len(account._pin_ends) < 1100 and book.victims() == ["a"]


def test_a_pin_that_became_shorter_ends_in_time_beside_many_others(book: Book) -> None:
    book.limit(64)
    first = book.put("a")
    account = book.tenants.accounts["red"]
    for until in (200.0, 100.0):
        first.soft_pin_until = until
        account.changed(first)
        assert book.victims(now=1.0) == []
    other = book.put("b")
    other.soft_pin_until = 500.0
    for _ in range(3000):
        account.changed(other)
        assert book.victims(now=1.0) == []
    assert book.victims(now=150.0) == ["a"]


def test_an_object_that_is_back_has_the_id_of_its_earlier_self(book: Book) -> None:
    """A durable object that was set aside; two entries of one id and one lease are no error."""
    book.limit(1 << 20)
    stored = book.put("k")
    book.remove(stored)
    book.restore(stored)
    assert book.victims() == ["k"]
    book.check()


def test_the_end_of_a_pin_of_its_earlier_self_does_not_concern_an_object_that_is_back(book: Book) -> None:
    book.limit(1 << 20)
    stored = book.put("k")
    stored.soft_pin_until = 50.0
    assert book.victims(now=1.0) == []
    book.remove(stored)
    again = book.restore(stored)
    again.is_hard_pinned = True
    account = book.tenants.accounts["red"]
    account.changed(again)
    assert book.victims(now=2.0) == book.victims(now=100.0) == []
    book.check()
    again.is_hard_pinned = False
    account.changed(again)
    assert book.victims() == ["k"]


def test_what_went_does_not_stay_among_the_candidates(book: Book) -> None:
    book.limit(1 << 20)
    for number in range(5000):
        book.remove(book.put(f"k{number}"))
    account = book.tenants.accounts["red"]
    assert account._heap is not None and len(account._heap) < 1100


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_keeps_the_accounts(seed: int) -> None:
    random, book = Random(seed), Book()
    there: list[StoredObject] = []
    for number in range(200):
        tenant = random.choice(("", "red", "blue"))
        if there and random.random() < 0.4:
            book.remove(there.pop(random.randrange(len(there))))
        elif random.random() < 0.1:
            book.limit(random.choice((None, 100, 1000)), tenant)
        else:
            there.append(book.put(f"k{number}", tenant, random.randrange(1, 50), random.choice("ms")))
            there[-1].lease_until = random.random() * 50
        for name, account in book.tenants.accounts.items():
            if account.quota_bytes is not None:
                mine = [one for one in there if one.account is account and one.complete(Tier.MEMORY)]
                wanted = sorted(mine, key=lambda one: (one.leased_until, one.object_id))
                assert book.victims(name) == [one.key.split("\0")[-1] for one in wanted], seed


@pytest.mark.parametrize(
    ("tenant", "is_one"), [("", True), ("red", True), ("a\0b", False), ("x" * 1025, False)]
)
def test_names_of_tenants(tenant: str, is_one: bool) -> None:
    assert (check_tenant(tenant) is None) is is_one
    assert Account("").name == "default"


def test_an_object_that_was_lost_and_comes_back_is_entered_beside_its_former_self() -> None:
    """It has its former id, and nothing else by which the two entries could be ordered."""
    tenants = Tenants()
    tenants.set_quota("red", 1000, [])
    account = tenants.account_of(scoped("red", "k"))
    for _ in range(2):
        stored = StoredObject(scoped("red", "k"), 7, 0, 100, 100, [], 0.0)
        stored.account = account
        tenants.shown(stored)
    assert account.num_objects == 2
    assert list(account.victims(1.0, lambda stored, extent: True)) == []
