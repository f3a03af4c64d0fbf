# SPDX-License-Identifier: Apache-2.0
"""Introspection for operators and dashboards, which changes nothing, and tenants' quotas."""

from __future__ import annotations

import pytest

from mooncake.store import messages as m
from mooncake.store.master.catalog import STORY_LINES
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.store.conftest import LEASE_S, SETTINGS, Voice
from tests.store.nodes import Nodes, Place


def test_the_status_adds_up(voice: Voice) -> None:
    voice.mount("a", 4096)
    voice.mount("b", 8192, host="other")
    voice.put("k", "l", size_bytes=1000)
    voice.start("unfinished")
    status = voice.say(m.GetMasterStatus())
    assert (status.num_objects, status.num_writing) == (2, 1)
    assert status.capacity_bytes == 4096 + 8192 == sum(one.size_bytes for one in status.segments)
    assert status.allocated_bytes == sum(one.allocated_bytes for one in status.segments) == 3 * 1024
    assert sum(one.num_objects for one in status.segments) == 2, "one is not written yet"
    assert [(one.segment, one.state, one.is_writable, one.tier) for one in status.segments] == [
        ("a", "alive", True, Tier.MEMORY),
        ("b", "alive", True, Tier.MEMORY),
    ]
    assert status.counts["puts"] == 2 and status.reporters == []
    voice.lose("node b")
    (_, lost) = voice.say(m.GetMasterStatus()).segments
    assert lost.state == "suspected" and not lost.is_writable
    assert voice.say(m.GetMasterStatus()).capacity_bytes == 4096


def test_keys_are_listed_by_prefix_and_tenant_and_grant_no_lease(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("kv/1", "kv/2", "x")
    voice.put("kv/9", tenant="red")
    assert voice.say(m.ListKeys("kv/", 10)).keys == ["kv/1", "kv/2"]
    assert voice.say(m.ListKeys("kv/", 1)).keys == ["kv/1"]
    assert voice.say(m.ListKeys("", 0)).keys == voice.say(m.ListKeys("", -5)).keys == []
    assert voice.say(m.ListKeys("", 10, "red")).keys == ["kv/9"]
    assert voice.say(m.ListKeys("", 10, "re")).keys == [], "a tenant's name is whole"
    assert voice.remove("kv/1") is True, "it is not leased"
    voice.lose("node a")
    assert voice.say(m.ListKeys("", 10)).keys == [], "what can't be read is not there"


def test_the_parts_of_a_listing_have_every_key_once_whatever_is_removed_meanwhile(voice: Voice) -> None:
    voice.mount(size_bytes=1 << 20)
    keys = [f"kv/{number}" for number in range(100)]
    voice.put(*keys, "other", size_bytes=1)
    parts = [voice.say(m.ListKeys("kv/", 1000, "", 4, part)).keys for part in range(4)]
    assert sorted(key for part in parts for key in part) == sorted(keys)
    assert all(10 < len(part) < 50 for part in parts), "they are of about the same size"
    assert voice.remove(parts[0][0]) is True
    assert voice.say(m.ListKeys("kv/", 1000, "", 4, 3)).keys == parts[3]
    for num_parts, part in ((4, 4), (4, -1), (0, 0)):
        assert voice.say(m.ListKeys("", 10, "", num_parts, part)).code == "invalid_argument"


def test_an_inspection_is_complete_and_counts_as_no_use(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("p", tenant="red")
    voice.put("k", tenant="red", group="g", parents=["p"], policy=m.PutPolicy(is_hard_pinned=True))
    voice.start("w")
    for _ in range(2):
        found, writing, none = (
            voice.say(m.Inspect(["k"], "red")).objects + voice.say(m.Inspect(["w", "n"])).objects
        )
        assert (found.group, found.parent, found.pinned_s, found.num_uses) == ("g", "p", None, 0)
        assert (found.leased_s, found.is_writing, found.size_bytes) == (0.0, False, 1000)
        assert writing.is_writing and not writing.replicas[0].is_complete and none is None
    voice.find("k", "red")
    again = voice.inspect("k", "red")
    assert again is not None and (again.num_uses, again.leased_s) == (1, LEASE_S)


def test_a_story_is_that_of_its_key_and_tenant(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.put("k", tenant="red")
    voice.remove("k")
    mine = voice.say(m.ObjectStory("k")).lines
    whats = ["put started as #1 on a", "readable as #1", "#1 unlinked: removed"]
    assert mine == [f"0.000 s ago: {what}" for what in whats]
    voice.now += 2.5
    assert voice.say(m.ObjectStory("k")).lines == [f"2.500 s ago: {what}" for what in whats]
    assert len(voice.say(m.ObjectStory("k", "red")).lines) == 2
    assert voice.say(m.ObjectStory("red\0k")).lines == voice.say(m.ObjectStory("none")).lines == []


def test_the_age_of_a_line_is_never_negative(voice: Voice) -> None:
    voice.now = 1.0000006
    voice.master.catalog.add_story(voice.now, "k", "now")
    assert voice.say(m.ObjectStory("k")).lines == ["0.000 s ago: now"]


def test_a_copy_under_way_and_space_at_rest_are_no_objects() -> None:
    nodes = Nodes(SETTINGS)
    Place(nodes, "a")
    b = Place(nodes, "b")
    nodes.put("k", "l", host="a")

    def counts() -> list[int]:
        return [one.num_objects for one in nodes.say(m.GetMasterStatus()).segments]

    nodes.say(m.CopyObject("k", ["b"]))
    (task,) = b.poll()
    assert counts() == [2, 0]
    b.work(task)
    assert counts() == [2, 1]
    nodes.find("k")
    nodes.say(m.Remove(["k"], True))
    assert counts() == [1, 0] and nodes.master.segments.mounted["b"].holders


def test_stories_are_bounded_and_the_oldest_lines_go(voice: Voice) -> None:
    catalog = voice.master.catalog
    for number in range(STORY_LINES + 50):
        catalog.add_story(float(number), f"k{number % 3}", "line {}", number)
    lines = [line for key in ("k0", "k1", "k2") for line in catalog.story(key)]
    assert len(lines) == STORY_LINES and catalog.story("k0")[0].endswith("line 51")


# Quotas


def quotas(voice: Voice) -> dict[str, tuple[int | None, int, int]]:
    reply = voice.say(m.AskQuotas())
    return {one.tenant: (one.quota_bytes, one.used_bytes, one.num_objects) for one in reply.quotas}


def test_a_tenants_keys_are_its_own(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("k")
    red = voice.put("k", tenant="red")[0]
    found = voice.find("k", "red")
    assert found is not None and found.object_id == red.object_id
    assert voice.find("red\0k") is None and voice.find("k", "blue") is None
    assert voice.say(m.ListKeys("", 10)).keys == ["k"]
    assert voice.say(m.ListKeys("k", 10, "red")).keys == ["k"]
    assert voice.say(m.ListKeys("", 10, "default")).keys == ["k"]
    assert voice.say(m.ObjectStory("k", "red")).lines[-1].endswith(f"readable as #{red.object_id}")
    assert voice.say(m.Remove(["k"], True, "red")).outcomes == [True]
    assert voice.find("k") is not None


def test_memory_is_counted_for_each_replica(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")
    voice.put("k", tenant="red", policy=m.PutPolicy(num_replicas=2))
    voice.start("l", tenant="red")
    voice.put("m")
    assert quotas(voice) == {"red": (None, 3072, 1), "default": (None, 1024, 1)}
    voice.remove("m")
    voice.say(m.Remove(["k"], False, "red"))
    assert quotas(voice) == {"red": (None, 1024, 0)}
    voice.keep_alive(30, "a", "b")
    assert quotas(voice) == {"red": (None, 1024, 0)}, "its writer may still be writing"
    voice.keep_alive(5, "a", "b")
    assert quotas(voice) == {}


def test_a_tenant_over_its_quota_evicts_only_its_own(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.say(m.SetQuota("red", 2500))
    voice.put("x")
    voice.put("a", "b", tenant="red")
    voice.say(m.LookupObjects(["a"], "red"))
    voice.put("c", tenant="red")
    assert [voice.inspect(key, "red") is not None for key in "abc"] == [True, False, True]
    assert voice.there("x") == "x" and quotas(voice)["red"] == (2560, 2048, 2)


def test_a_quota_that_is_set_later_counts_what_is_there(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("a", "b", "c", tenant="red")
    voice.say(m.SetQuota("red", 1500))
    voice.put("d", tenant="red")
    assert quotas(voice)["red"] == (1536, 1024, 1)
    voice.say(m.SetQuota("red", None))
    voice.put("e", "f", tenant="red")
    assert quotas(voice)["red"] == (None, 3072, 3)


@pytest.mark.parametrize("size_bytes", [-1, 1 << 63, 1 << 64])
def test_a_quota_that_no_record_can_carry_is_refused(voice: Voice, size_bytes: int) -> None:
    voice.say(m.SetQuota("red", (1 << 63) - 1))
    refused = voice.say(m.SetQuota("red", size_bytes))
    assert isinstance(refused, m.RefusedReply) and refused.refusal.code == "invalid_size"
    assert "0 to 9223372036854775807" in refused.refusal.reason
    assert quotas(voice) == {"red": ((1 << 63) - 1, 0, 0)}


def test_what_does_not_fit_is_refused_with_figures(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.say(m.SetQuota("red", 2500))
    voice.put("a", "b", tenant="red", policy=m.PutPolicy(is_hard_pinned=True))
    for size_bytes, counted in ((513, 576), (3000, 3008)):
        refusal = voice.start("c", size_bytes=size_bytes, tenant="red").refusals[0]
        assert refusal.code == "quota_exceeded"
        takes = f"the object takes {counted} bytes of tenant 'red'"
        assert refusal.reason == f"{takes}, and 2048 of 2560 bytes are used"
    voice.put("d", size_bytes=512, tenant="red")
    assert voice.there("ab") == "", "those are keys of the default tenant"


def test_further_replicas_are_left_out_where_the_quota_ends(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")
    voice.say(m.SetQuota("", 1500))
    place = voice.put("k", policy=m.PutPolicy(num_replicas=2))[0]
    assert len(place.replicas) == 1


def test_only_known_tenants_where_that_is_wanted() -> None:
    voice = Voice(MasterSettings(strict_tenants=True))
    voice.mount()
    assert voice.start("k", tenant="red").refusals[0].code == "unknown_tenant"
    voice.say(m.SetQuota("red", 5000))
    voice.put("k", tenant="red")
    voice.put("k")


def test_a_refused_tenant_leaves_no_account() -> None:
    voice = Voice(MasterSettings(strict_tenants=True))
    voice.mount()
    before = quotas(voice)
    assert voice.start("k", tenant="red").refusals[0].code == "unknown_tenant"
    written = m.PutWritten(1, "h", ["k"], [10], [b"crc!"], [(1, 0)], tenant="blue")
    assert voice.say(written).outcomes[0].code == "unknown_tenant"
    assert quotas(voice) == before and not voice.master.catalog.tenants.accounts.keys() & {"red", "blue"}
    voice.say(m.SetQuota("red", 5000))
    voice.put("k", tenant="red")
    voice.say(m.SetQuota("red", None))
    assert voice.start("l", tenant="red").refusals[0].code == "unknown_tenant"
    assert quotas(voice)["red"] == (None, 1024, 1), "an account with objects stays"


@pytest.mark.parametrize("tenant", ["a\0b", "x" * 1025])
def test_invalid_tenants_are_refused(voice: Voice, tenant: str) -> None:
    voice.mount()
    assert voice.start("k", tenant=tenant).refusals[0].code == "unknown_tenant"
    assert voice.say(m.SetQuota(tenant, 1)).refusal.code == "unknown_tenant"
    assert voice.say(m.SetQuota("red", -1)).refusal.code == "invalid_size"


def test_a_successor_knows_the_quotas(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.say(m.SetQuota("red", 2500))
    voice.say(m.SetQuota("blue", 1))
    voice.say(m.SetQuota("blue", None))
    voice.put("a", tenant="red")
    for records in (voice.records, voice.master.snapshot()):
        other = Voice(voice.master.settings)
        other.master.restore(records, 0.0)
        other.master.check()
        assert quotas(other) == {"red": (2560, 1024, 1)}
