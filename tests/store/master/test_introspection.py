"""Introspection for operators and dashboards: no request changes anything."""

from __future__ import annotations

from mooncake.store import messages as m
from mooncake.store.master.catalog import STORY_LINES
from mooncake.types import Tier
from tests.store.conftest import LEASE_S, Voice


def test_the_status_adds_up(voice: Voice) -> None:
    voice.mount("a", 4096)
    voice.mount("b", 8192, host="other")
    voice.put("k", "l", size_bytes=1000)
    voice.start("unfinished")
    status = voice.say(m.GetMasterStatus())
    assert (status.num_objects, status.num_writing) == (2, 1)
    assert status.capacity_bytes == 4096 + 8192 == sum(one.size_bytes for one in status.segments)
    assert status.allocated_bytes == sum(one.allocated_bytes for one in status.segments) == 3 * 1024
    assert sum(one.num_objects for one in status.segments) == 3
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


def test_an_inspection_says_all_and_counts_as_no_use(voice: Voice) -> None:
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
    assert [line.split(" ", 1)[1] for line in mine] == [
        "put started as #1 on a",
        "readable as #1",
        "#1 unlinked: removed",
    ]
    assert len(voice.say(m.ObjectStory("k", "red")).lines) == 2
    assert voice.say(m.ObjectStory("red\0k")).lines == voice.say(m.ObjectStory("none")).lines == []


def test_stories_are_bounded_and_the_oldest_lines_go(voice: Voice) -> None:
    catalog = voice.master.catalog
    for number in range(STORY_LINES + 50):
        catalog.add_story(float(number), f"k{number % 3}", "line {}", number)
    lines = [line for key in ("k0", "k1", "k2") for line in catalog.story(key)]
    assert len(lines) == STORY_LINES and catalog.story("k0")[0].endswith("line 51")
