"""Room for what is put: as much as asked for, no more than the tenant's, never everything for nothing."""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.settings import MasterSettings
from tests.store.conftest import LEASE_S, SETTINGS, Voice


def refusal(voice: Voice, size_bytes: int, **more: object) -> Refusal:
    started = voice.start("new", size_bytes=size_bytes, **more)  # type: ignore[arg-type]
    assert isinstance(started, m.PutStarted) and started.reserved == [None]
    return started.refusals[0]


def readable(voice: Voice) -> set[str]:
    return {*voice.master.catalog.objects.readable}


def test_why_there_is_no_room_is_said_in_words() -> None:
    voice = Voice(SETTINGS)
    assert "no segment is mounted" in refusal(voice, 1000).reason
    voice.mount("a", size_bytes=4096)
    found = refusal(voice, 5000)
    assert (found.code, found.reason) == ("too_large", "5000 bytes; the largest segment has 4096")
    voice.put("x", "y", "z", "w")
    voice.say(m.Lookup(["x", "y", "z", "w"]))
    assert refusal(voice, 1000).code == "no_space", "all of it is leased"
    voice.keep_alive(LEASE_S + 1, "a")
    voice.put("new")
    assert len(readable(voice)) == 4


def test_promises_of_an_earlier_master_are_waited_for() -> None:
    voice = Voice(SETTINGS)
    voice.mount("a", rest_s=30.0)
    found = refusal(voice, 1000)
    assert found.code == "no_space" and "an earlier master" in found.reason and "30 s" in found.reason
    voice.keep_alive(31, "a")
    voice.put("new")


def test_a_tenant_makes_room_of_its_own() -> None:
    voice = Voice(SETTINGS)
    voice.mount("a", size_bytes=65536)
    voice.say(m.SetQuota("red", 3000))
    voice.put("mine")
    voice.put("a", "b", "c", tenant="red")
    voice.put("d", tenant="red")
    kept = readable(voice)
    assert "mine" in kept and sum(key.startswith("red") for key in kept) == 3
    found = refusal(voice, 3001, tenant="red")
    assert found.code == "quota_exceeded" and "3000 of 3000 bytes are used" in found.reason


def test_a_put_that_finds_no_hole_does_not_empty_the_cache() -> None:
    """Small objects lie between leased ones, so that nothing large can ever fit."""
    voice = Voice(MasterSettings(high_watermark=1.0, eviction_ratio=0.01, lease_s=LEASE_S))
    voice.mount("a", size_bytes=1 << 20)
    keys = [f"k{number:03}" for number in range(256)]
    for first in range(0, 256, 64):
        voice.put(*keys[first : first + 64], size_bytes=4096)
    assert len(readable(voice)) == 256
    voice.say(m.Lookup(keys[::8]))
    found = refusal(voice, 8 * 4096)
    assert found.code == "no_space"
    num_evicted = 256 - len(readable(voice))
    assert 0 < num_evicted <= 8 * 8 + 1, "eight times what was asked for, and not all that is there"


def test_the_watermark_is_kept_from_below() -> None:
    voice = Voice(MasterSettings(high_watermark=0.5, eviction_ratio=0.1, lease_s=0.0))
    voice.mount("a", size_bytes=100_000)
    for number in range(200):
        voice.put(f"k{number}")
        voice.keep_alive(1, "a")
        catalog = voice.master.catalog
        assert catalog.allocated_bytes <= 0.5 * catalog.capacity_bytes + 2 * 4096
    assert readable(voice)
