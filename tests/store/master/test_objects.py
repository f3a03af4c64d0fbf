# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mooncake.errors import Refusal
from mooncake.store.master.objects import (
    Extent,
    Objects,
    ObjectState,
    StoredObject,
    check_put,
    scoped,
    scoped_all,
    split_scoped,
)
from mooncake.store.master.segments import Segment
from mooncake.store.messages import Mount
from mooncake.types import Tier


def segment(name: str, tier: Tier = Tier.MEMORY) -> Segment:
    return Segment(Mount(name, 1, "h", 0, 1 << 20, b"", 0.0, tier), None, 0.0)


class Table(Objects):
    def put(self, key: str, *extents: Extent, group: str = "") -> StoredObject:
        stored = self.begin(key, 9, 10, 10, list(extents) or [Extent(segment("a"), 0)], write_until=30.0)
        stored.group = group
        self.finish(stored, b"crc!", 0.0)
        return stored


def test_the_life_of_an_object() -> None:
    objects = Objects(0)
    stored = objects.begin("k", 9, 250, 100, [Extent(segment("a"), 64)], write_until=30.0)
    assert stored.state is ObjectState.WRITING and stored.num_chunks == 3
    assert objects.writing == {"k": stored} and not objects.readable
    assert objects.find_writing("k", stored.object_id, b"abcdefghijkl", 29.9) is stored
    objects.finish(stored, b"abcdefghijkl", 29.9)
    assert objects.find_writing("k", stored.object_id, b"abcdefghijkl", 29.9) is None, "it came twice"
    assert objects.readable == {"k": stored} and not objects.writing
    assert stored.stored is not None and stored.stored.checksums == b"abcdefghijkl"
    objects.unlink(stored)
    assert not objects.readable


def test_finishing_too_late_or_something_else_is_refused() -> None:
    objects = Objects(0)
    stored = objects.begin("k", 9, 10, 10, [], write_until=30.0)
    for key, object_id, now in (("k", stored.object_id, 30.0), ("k", 99, 0.0), ("l", 1, 0.0)):
        outcome = objects.find_writing(key, object_id, b"crc!", now)
        assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_ids_are_never_used_again() -> None:
    objects = Objects(0)
    first = objects.begin("k", 1, 1, 1, [], 1.0)
    objects.unlink(first)
    assert objects.begin("k", 1, 1, 1, [], 1.0).object_id > first.object_id


def test_complete_replicas_stand_first_and_the_fastest_tier_in_front() -> None:
    disk, memory, other = segment("d", Tier.SSD), segment("a"), segment("b")
    stored = Table(0).put("k", Extent(memory, 0))
    seen = [stored.is_plain]
    stored.extents = [Extent(other, 0), Extent(disk, 0, is_complete=True), *stored.extents]
    stored.refresh()
    assert [extent.segment.name for extent in stored.extents] == ["a", "d", "b"]
    assert [replica.segment for replica in stored.replicas()] == ["a", "d"]
    seen.append(stored.is_plain)
    assert [extent.segment for extent in stored.complete(Tier.SSD)] == [disk]
    del stored.extents[1]
    stored.refresh()
    assert [*seen, stored.is_plain] == [True, False, True], "what is being written does not count"


def test_one_lease_protects_the_group() -> None:
    table = Table(0)
    one, other, alone = table.put("a", group="g"), table.put("b", group="g"), table.put("c")
    group = table.groups["g"]
    assert one.joint is group and other.joint is group and not one.is_plain and alone.is_plain
    group.lease_until = 5.0
    assert one.leased_until == other.leased_until == 5.0 and alone.leased_until == 0.0
    group.pin(other, is_hard=True, soft_until=0.0)
    assert [stored.may_be_evicted for stored in (one, other, alone)] == [False, False, True]
    table.unlink(other)
    assert group.members == {"a": one} and group.num_hard_pinned == 0
    table.unlink(one)
    assert not table.groups


def test_the_member_without_a_copy_is_found_once_for_its_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for each member, and a visit of all of them each time would take seconds."""
    table, memory, disk = Table(0), segment("a"), segment("d", Tier.SSD)
    members = [
        table.put(f"k{number}", Extent(memory, number), Extent(disk, number), group="g")
        for number in range(20)
    ]
    visited, stays_without = list[str](), StoredObject.stays_without

    def counted(stored: StoredObject, tier: Tier) -> bool:
        visited.append(stored.key)
        return stays_without(stored, tier)

    monkeypatch.setattr(StoredObject, "stays_without", counted)
    assert members[0].all_have_slower(members[0].extents[0]) and len(visited) == 20
    for number in 19, 3:
        copy = members[number].extents.pop()
        visited.clear()
        assert not any(member.all_have_slower(member.extents[0]) for member in members)
        assert len(visited) == number + 1 + 19
        members[number].extents.append(copy)
        assert members[0].all_have_slower(members[0].extents[0])
    members[5].extents.pop()
    assert not members[0].all_have_slower(members[0].extents[0])
    table.unlink(members[5])
    assert members[0].all_have_slower(members[0].extents[0])


@pytest.mark.parametrize(
    ("tenant", "key", "expected"), [("", "k", "k"), ("default", "k", "k"), ("red", "k", "red\0k")]
)
def test_a_tenants_keys_are_its_own(tenant: str, key: str, expected: str) -> None:
    assert scoped(tenant, key) == expected
    assert scoped_all(tenant, [key]) == [expected]
    assert split_scoped(expected) == ("" if tenant == "default" else tenant, key)


def test_no_client_names_another_tenants_key() -> None:
    assert scoped_all("", ["a", "red\0k"]) == ["a", ""]
    assert scoped("", "red\0k") == scoped("default", "red\0k") == ""
    assert split_scoped(scoped("blue", "red\0k")) == ("blue", "red\0k")


TOO_LONG = ["x" * 1025, "ö" * 513, "x" * (1 << 20)]


@pytest.mark.parametrize("tenant", ["", "default", "red"])
@pytest.mark.parametrize("key", ["", "a\0b", *TOO_LONG])
def test_a_key_that_no_object_can_have_becomes_none(tenant: str, key: str) -> None:
    (first, last) = scoped_all(tenant, ["a", "z"])
    assert scoped_all(tenant, ["a", key, "z"]) == [first, "", last] and first.endswith("a")
    assert scoped_all(tenant, [key]) == [""]


@pytest.mark.parametrize("key", ["x" * 1024, "ö" * 512, "x" * 300])
def test_the_longest_keys_stay_as_they_are(key: str) -> None:
    assert scoped_all("", [key, "k"]) == [key, "k"]
    assert scoped_all("red", [key]) == [f"red\0{key}"]


@pytest.mark.parametrize("tenant", ["red\0", *TOO_LONG])
def test_a_tenant_that_there_can_not_be_has_no_keys(tenant: str) -> None:
    assert scoped_all(tenant, ["a", "b"]) == ["", ""]


@pytest.mark.parametrize("key", ["k", "x" * 1024, "ключ", "kv/0123/abcd"])
def test_good_keys(key: str) -> None:
    assert check_put(key, 1, 1) is None


@pytest.mark.parametrize("key", ["", "x" * 1025, "ö" * 513, "a\0"])
def test_bad_keys(key: str) -> None:
    refusal = check_put(key, 1, 1)
    assert refusal is not None and refusal.code == "invalid_key"


def test_too_many_chunks() -> None:
    assert check_put("k", 1 << 32, 4096) is None
    refusal = check_put("k", (1 << 32) + 1, 4096)
    assert refusal is not None and refusal.code == "invalid_size"


@pytest.mark.parametrize("chunk_bytes", [1, 4095])
def test_chunks_may_be_small_or_many(chunk_bytes: int) -> None:
    """Otherwise an object's checksums could take more memory of the master than the object has bytes."""
    assert check_put("k", 4096 * chunk_bytes, chunk_bytes) is None
    refusal = check_put("k", 4096 * chunk_bytes + 1, chunk_bytes)
    assert refusal is not None and refusal.code == "invalid_size"
    assert "over 4096 chunks have at least 4096 bytes each" in refusal.reason
