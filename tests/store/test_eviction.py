from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mooncake.store.eviction import Eviction
from mooncake.store.objects import Objects, StoredObject


class Table:
    """Readable objects without extents: eviction looks at leases only."""

    def __init__(self) -> None:
        self.objects = Objects(0)
        self.eviction = Eviction()

    def put(self, key: str, now: float) -> StoredObject:
        stored = self.objects.begin(key, 1, 10, 10, [], now + 30)
        assert self.objects.finish(key, stored.object_id, b"crc!", now) is True
        self.eviction.add(stored)
        return stored

    def unlink(self, stored: StoredObject) -> None:
        self.objects.unlink(stored)
        self.eviction.unlinked(stored)

    def evict(self, now: float, count: int = 1000, spare: str = "") -> list[str]:
        evicted = []
        for victim in self.eviction.victims(now, lambda stored: stored.key not in spare):
            evicted.append(victim.key)
            self.unlink(victim)
            if len(evicted) == count:
                break
        self.eviction.check(self.objects.readable)
        return evicted


def test_the_least_recently_leased_leaves_first() -> None:
    table = Table()
    a, b, c = (table.put(key, now) for key, now in (("a", 0.0), ("b", 1.0), ("c", 2.0)))
    a.lease_until = 5.0
    assert table.evict(10.0, 2) == ["b", "c"]
    b = table.put("b", 11.0)
    assert table.evict(20.0) == ["a", "b"]
    assert c.lease_until == 2.0 and b.lease_until == 11.0


def test_a_lease_protects_until_its_end() -> None:
    table = Table()
    for key, lease_until in (("a", 10.0), ("b", 20.0)):
        table.put(key, 0.0).lease_until = lease_until
    assert table.evict(9.0) == []
    assert table.evict(10.0) == ["a"]
    assert table.evict(20.0) == ["b"]


def test_spared_objects_stay_candidates() -> None:
    table = Table()
    for key in "abc":
        table.put(key, 0.0)
    assert table.evict(1.0, spare="ab") == ["c"]
    assert table.evict(1.0) == ["a", "b"]


def test_removed_objects_do_not_pile_up() -> None:
    table = Table()
    for number in range(5000):
        table.unlink(table.put(f"k{number}", 0.0))
    table.put("last", 0.0)
    assert len(table.eviction) < 2100
    assert table.evict(1.0) == ["last"]


@given(st.integers(0, 2**32))
def test_order_is_exactly_by_lease_end(seed: int) -> None:
    random, table = Random(seed), Table()
    stored = [table.put(f"k{number}", 0.0) for number in range(30)]
    for now in range(1, 60):
        random.choice(stored).lease_until = float(now)
        if random.random() < 0.2:
            alive = sorted((s for s in stored if s.is_readable), key=lambda s: (s.lease_until, s.object_id))
            expected = [s.key for s in alive if s.lease_until <= now][:2]
            assert table.evict(float(now), 2) == expected
