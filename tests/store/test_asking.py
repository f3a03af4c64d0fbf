"""What people and dashboards are told: of this tenant's objects, as they are at this instant."""

from __future__ import annotations

import pytest

from mooncake.store import messages as m
from mooncake.types import Tier
from tests.store.conftest import LEASE_S, SETTINGS, Voice
from tests.store.nodes import Nodes, with_ssd


@pytest.fixture
def voice() -> Voice:
    voice = Voice(SETTINGS)
    voice.mount("a")
    return voice


def test_the_status_counts_what_there_is(voice: Voice) -> None:
    voice.put("k")
    voice.start("l")
    voice.mount("b", host="other", rest_s=9.0)
    status = voice.say(m.Status())
    assert (status.num_objects, status.num_writing) == (1, 1)
    assert status.capacity_bytes == 2 * 4096 and status.allocated_bytes >= 2000
    a, b = status.segments
    assert (a.segment, a.host, a.num_objects, a.is_writable) == ("a", "h", 2, True)
    assert (b.host, b.rests_s, b.is_writable, b.is_draining) == ("other", 9.0, False, False)
    assert a.allocated_bytes + a.largest_free_bytes <= a.size_bytes


def test_keys_are_listed_by_prefix_of_one_tenant_and_not_without_end(voice: Voice) -> None:
    voice.put("kv/1", "kv/2")
    voice.put("other")
    voice.put("kv/3", tenant="red")
    assert {*voice.say(m.ListKeys("kv/", 10)).keys} == {"kv/1", "kv/2"}
    assert voice.say(m.ListKeys("kv/", 10, "red")).keys == ["kv/3"]
    assert len(voice.say(m.ListKeys("", 2)).keys) == 2
    assert voice.say(m.ListKeys("", -1)).keys == []


def test_an_object_is_described_with_its_replicas_and_leases_it_does_not_extend() -> None:
    nodes = Nodes(SETTINGS)
    memory, ssd = with_ssd(nodes)
    nodes.put("k", policy=m.PutPolicy(is_durable=False))
    nodes.say(m.Lookup(["k"]))
    nodes.wait(2.0)
    memory.beat()
    ssd.beat()
    [found, absent] = nodes.say(m.Inspect(["k", "nothing"])).objects
    assert absent is None and found is not None
    assert found.leased_s == pytest.approx(LEASE_S - 2.0) and found.num_uses == 1
    assert not found.is_writing and found.replicas[0].tier is Tier.MEMORY and found.replicas[0].is_alive
    [again] = nodes.say(m.Inspect(["k"])).objects
    assert again == found, "to look at it is no use"


def test_what_is_being_written_is_shown_as_that(voice: Voice) -> None:
    voice.start("k")
    [found] = voice.say(m.Inspect(["k"])).objects
    assert found is not None and found.is_writing and not found.replicas[0].is_complete
    [elsewhere] = voice.say(m.Inspect(["k"], "red")).objects
    assert elsewhere is None


def test_a_hard_pin_has_no_end(voice: Voice) -> None:
    voice.put("k")
    voice.say(m.Pin(["k"], None))
    [found] = voice.say(m.Inspect(["k"])).objects
    assert found is not None and found.pinned_s is None


def test_a_story_is_told_to_its_tenant(voice: Voice) -> None:
    voice.put("k", tenant="red")
    assert voice.say(m.Story("k", "red")).lines
    assert not voice.say(m.Story("k")).lines
