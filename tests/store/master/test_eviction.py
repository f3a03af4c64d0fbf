# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.store.master.eviction import Eviction, Policy
from mooncake.store.master.objects import Extent, Group, Objects, StoredObject
from mooncake.store.master.segments import Segment
from mooncake.store.messages import Mount
from mooncake.types import Tier


def segment(name: str, tier: Tier = Tier.MEMORY) -> Segment:
    return Segment(Mount(name, 1, "h", 0, 1 << 20, b"", 0.0, tier), None, 0.0)


class Table:
    """Readable objects on two segments of memory and one of SSD."""

    def __init__(self, policy: Policy = "lru") -> None:
        self.objects = Objects(0)
        self.eviction = Eviction(policy)
        self.a, self.b, self.disk = segment("a"), segment("b"), segment("d", Tier.SSD)
        self._offset = 0

    def put(
        self,
        key: str,
        now: float,
        where: Segment | None = None,
        *,
        parent: str = "",
        group: str = "",
        pinned_until: float = 0.0,
        on_disk: bool = False,
        is_hard: bool = False,
    ) -> StoredObject:
        self._offset += 64
        places = [where or self.a, *([self.disk] if on_disk else [])]
        stored = self.objects.begin(key, 1, 10, 10, [Extent(one, self._offset) for one in places], now + 30)
        stored.parent, stored.group = parent, group
        stored.soft_pin_until, stored.is_hard_pinned = pinned_until, is_hard
        self.objects.finish(stored, b"crc!", now)
        self.eviction.add(stored, now)
        return stored

    def drop(self, stored: StoredObject, extent: Extent, now: float) -> None:
        stored.extents.remove(extent)
        self.eviction.left(stored, extent)
        if stored.complete():
            stored.refresh()
            self.eviction.changed(stored, now)
        else:
            stored.extents = [extent]
            self.objects.unlink(stored)
            self.eviction.unlinked(stored)
        parent = self.objects.readable.get(self.eviction.parent_of(stored))
        if parent is not None:
            self.eviction.changed(parent, now)

    def remove(self, stored: StoredObject) -> None:
        for extent in list(stored.extents):
            self.drop(stored, extent, 0.0)

    def regroup(self, group: Group, now: float) -> None:
        for member in group.members.values():
            self.eviction.changed(member, now)

    def evict(
        self, now: float, count: int = 1000, *places: Segment, spare: StoredObject | None = None
    ) -> str:
        """Keys of the victims, in order; in lower case where the object stays readable."""
        evicted = ""
        for victim, extent in self.eviction.victims(places or (self.a, self.b), now, spare):
            self.drop(victim, extent, now)
            evicted += victim.key if victim.is_readable else victim.key.upper()
            if len(evicted) == count:
                break
        self.check()
        return evicted

    def check(self) -> None:
        self.eviction.check(self.objects.readable)


def test_the_least_recently_leased_leaves_first() -> None:
    table = Table()
    a, b, c = (table.put(key, now) for key, now in (("a", 0.0), ("b", 1.0), ("c", 2.0)))
    a.lease_until = 5.0
    assert table.evict(10.0, 2) == "BC"
    b = table.put("b", 11.0)
    assert table.evict(20.0) == "AB"
    assert c.lease_until == 2.0 and b.lease_until == 11.0


def test_a_lease_protects_until_its_end() -> None:
    table = Table()
    for key, lease_until in (("a", 10.0), ("b", 20.0)):
        table.put(key, 0.0).lease_until = lease_until
    assert table.evict(9.0) == ""
    assert table.evict(10.0) == "A"
    assert table.evict(20.0) == "B"


def test_the_order_covers_all_given_segments_and_no_other() -> None:
    table = Table()
    for number, key in enumerate("abcdef"):
        table.put(key, float(number), (table.a, table.b, table.disk)[number % 3])
    assert table.evict(10.0, 3) == "ABD"
    assert table.evict(10.0, 5, table.disk) == "CF"
    assert table.evict(10.0) == "E"


def test_a_spared_or_held_object_stays_a_candidate() -> None:
    table = Table()
    a, b, _ = (table.put(key, 0.0) for key in "abc")
    b.extents[0].held_until = 5.0
    assert table.evict(1.0, spare=a) == "C"
    assert table.evict(1.0) == "A"
    assert table.evict(5.0) == "B"


def test_a_replica_that_has_a_copy_on_disk_leaves_before_an_object_that_has_none() -> None:
    table = Table()
    table.put("a", 0.0)
    table.put("b", 1.0, on_disk=True)
    c = table.put("c", 2.0, on_disk=True)
    assert table.eviction.coldest(table.a, 5) == [table.objects.readable["a"]]
    table.drop(c, c.complete(Tier.SSD)[0], 2.0)
    assert [one.key for one in table.eviction.coldest(table.a, 5)] == ["a", "c"]
    assert [one.key for one in table.eviction.coldest(table.a, 1)] == ["a"]
    assert table.evict(3.0) == "bAC"
    assert table.evict(3.0, 9, table.disk) == "B"


def test_only_what_stays_readable_leaves_when_that_is_wanted() -> None:
    table = Table()
    table.put("a", 0.0)
    table.put("b", 1.0, on_disk=True)
    victims = table.eviction.victims([table.a], 2.0, whole=False)
    assert [stored.key for stored, _ in victims] == ["b"]


def test_softly_pinned_objects_leave_last_in_the_order_of_their_pins_ends() -> None:
    table = Table()
    table.put("a", 0.0, pinned_until=50.0)
    table.put("b", 1.0, pinned_until=40.0)
    table.put("c", 2.0)
    table.put("d", 3.0, pinned_until=8.0)
    assert table.evict(10.0) == "CDBA"


def test_a_pin_that_ended_or_was_taken_away_protects_no_longer() -> None:
    table = Table()
    a = table.put("a", 0.0, pinned_until=50.0)
    b = table.put("b", 1.0, is_hard=True)
    table.put("c", 2.0)
    a.soft_pin_until = 0.0
    table.eviction.changed(a, 3.0)
    assert table.evict(3.0) == "AC"
    b.is_hard_pinned = False
    table.eviction.changed(b, 4.0)
    assert table.evict(4.0) == "B"


def test_a_leased_or_pinned_member_protects_its_group() -> None:
    table = Table()
    one, _ = table.put("a", 0.0, group="g"), table.put("b", 0.0, group="g")
    table.put("c", 1.0)
    assert one.joint is not None
    one.joint.lease_until = 10.0
    assert table.evict(5.0) == "C"
    group = one.joint
    group.pin(one, is_hard=True, soft_until=0.0)
    table.regroup(group, 5.0)
    assert table.evict(20.0) == ""
    table.remove(one)
    table.regroup(group, 20.0)
    assert table.evict(20.0) == "B"


def test_the_least_often_used_leaves_first() -> None:
    table = Table("lfu")
    for number, key in enumerate("abcd"):
        table.put(key, 0.0).num_uses = (5, 1, 3, 2)[number]
    table.objects.readable["b"].lease_until = 9.0
    assert table.evict(1.0, 2) == "DC"
    assert table.evict(9.0) == "BA"


def test_old_popularity_ages() -> None:
    """Objects used three times before the newer ones are evicted before those in use now."""
    table = Table("lfu")
    table.put("a", 0.0).num_uses = 3
    for round_number in range(4):
        table.put("n", float(round_number)).num_uses = 2
        table.put("o", float(round_number)).num_uses = 2
        assert table.evict(float(round_number), 1) in "NOA"
        for key in "no":
            if key in table.objects.readable:
                table.remove(table.objects.readable[key])
        if "a" not in table.objects.readable:
            return
    raise AssertionError("a stays forever")


def test_an_ancestor_never_leaves_before_its_descendants() -> None:
    table = Table("chain")
    table.put("a", 0.0)
    table.put("b", 1.0, table.b, parent="a")
    table.put("c", 2.0, parent="b")
    table.put("x", 9.0, parent="a")
    assert table.evict(10.0, 2) == "CB"
    assert table.evict(10.0, 1) == "X"
    table.put("b", 11.0, parent="a").lease_until = 30.0
    assert table.evict(12.0) == ""
    assert table.evict(30.0) == "BA"


def test_a_descendant_on_disk_keeps_its_ancestor_readable_but_not_in_memory() -> None:
    table = Table("chain")
    table.put("a", 0.0, on_disk=True)
    table.put("b", 1.0, on_disk=True, parent="a")
    assert table.evict(2.0) == "ba"
    assert table.evict(2.0, 9, table.disk) == "BA"


def test_children_that_have_left_memory_are_not_passed_over_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A common beginning has thousands of continuations, and is tried after each of them has left memory."""
    num_looked_at, complete = 0, StoredObject.complete

    def counted(stored: StoredObject, tier: Tier | None = None) -> list[Extent]:
        nonlocal num_looked_at
        num_looked_at += 1
        return complete(stored, tier)

    monkeypatch.setattr(StoredObject, "complete", counted)
    table = Table("chain")
    table.put("a", 0.0, on_disk=True)
    for number in range(1000):
        table.put(f"k{number}", 1.0 + number, on_disk=True, parent="a")
    evicted: list[str] = []
    for victim, extent in table.eviction.victims((table.a,), 5000.0, None):
        table.drop(victim, extent, 5000.0)
        evicted.append(victim.key)
    assert evicted == [*(f"k{number}" for number in range(1000)), "a"]
    assert num_looked_at < 20_000
    table.check()


def test_removed_objects_do_not_pile_up() -> None:
    table = Table()
    for number in range(5000):
        table.remove(table.put(f"k{number}", 0.0))
    table.put("last", 0.0)
    assert len(table.eviction) < 2100
    assert table.evict(1.0) == "LAST"


@given(st.integers(0, 2**32))
def test_order_is_exactly_by_lease_end(seed: int) -> None:
    random, table = Random(seed), Table()
    stored = [table.put(chr(97 + number), 0.0, random.choice((table.a, table.b))) for number in range(26)]
    for now in range(1, 60):
        random.choice(stored).lease_until = float(now)
        if random.random() < 0.2:
            alive = sorted((s for s in stored if s.is_readable), key=lambda s: (s.lease_until, s.object_id))
            expected = [s.key.upper() for s in alive if s.lease_until <= now][:2]
            assert table.evict(float(now), 2) == "".join(expected)
