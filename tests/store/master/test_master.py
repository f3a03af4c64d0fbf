# SPDX-License-Identifier: Apache-2.0
"""The master's promises, one per test. Times: lease 10 s, put 30 s, grace 5 s, ttl 5 s."""

from __future__ import annotations

import pytest

from mooncake.errors import InvalidArgument, Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.settings import MasterSettings
from tests.store.conftest import Voice


def refusal_of(started: m.PutStarted) -> Refusal:
    assert started.reserved == [None]
    return started.refusals[0]


# Whole or not at all


def test_an_object_is_visible_from_put_end_on(voice: Voice) -> None:
    voice.mount()
    place = voice.start("k").reserved[0]
    assert place is not None and place.replicas == [m.Replica("a", 7, 1 << 20)]
    assert voice.find("k") is None
    assert voice.say(m.Exists(["k"])).flags == b"\0"
    assert voice.end("k", place.object_id) is True
    assert voice.find("k") == m.Stored(place.object_id, 1000, 1000, b"crc!", place.replicas)
    assert voice.say(m.Exists(["k", "other"])).flags == b"\1\0"


def test_an_existing_key_is_left_alone(voice: Voice) -> None:
    voice.mount()
    first = voice.put("k")[0]
    again = voice.start("k", size_bytes=77)
    assert again.reserved == [None] and not again.refusals
    found = voice.find("k")
    assert found is not None and found.object_id == first.object_id


def test_two_writers_of_one_key_do_not_meet(voice: Voice) -> None:
    voice.mount()
    first = voice.start("k").reserved[0]
    assert first is not None
    assert voice.start("k").reserved == [None]
    assert voice.end("k", first.object_id) is True


def test_a_repeated_put_start_gets_the_same_space(voice: Voice) -> None:
    voice.mount()
    first = voice.start("k", "l", put_id=500)
    voice.wait(1)
    assert voice.start("k", "l", put_id=500).reserved == first.reserved
    assert voice.allocated_bytes == 2048


def test_a_key_twice_in_one_request_is_reserved_once(voice: Voice) -> None:
    voice.mount()
    reserved = voice.start("k", "k").reserved
    assert reserved[0] is not None and reserved[1] is None


def test_a_repeated_put_end_is_harmless(voice: Voice) -> None:
    voice.mount()
    place = voice.put("k")[0]
    assert voice.end("k", place.object_id) is False


@pytest.mark.parametrize("checksums", [b"", b"crc", b"crc!crc!"])
def test_put_end_brings_one_checksum_a_chunk(voice: Voice, checksums: bytes) -> None:
    voice.mount()
    place = voice.start("k").reserved[0]
    assert place is not None
    assert voice.end("k", place.object_id, checksums).code == "invalid_checksums"
    assert voice.find("k") is None


@pytest.mark.parametrize(
    ("key", "size", "code"),
    [
        ("", 1, "invalid_key"),
        ("x" * 1025, 1, "invalid_key"),
        ("a\0b", 1, "invalid_key"),
        ("k", 0, "invalid_size"),
        ("k", -1, "invalid_size"),
        ("k", 5000, "too_large"),
    ],
)
def test_bad_puts_are_refused(voice: Voice, key: str, size: int, code: str) -> None:
    voice.mount()
    message = m.PutStart(1, "h", [key], [size], [max(1, size)])
    assert voice.say(message).refusals[0].code == code


def test_malformed_batches_are_failures(voice: Voice) -> None:
    assert isinstance(voice.say(m.PutStart(1, "h", ["k"], [1, 2], [1])), Failure)
    assert isinstance(voice.say(m.PutEnd(["k"], [], [])), Failure)
    assert isinstance(voice.say(m.LookupObjects(["k"] * (m.MAX_KEYS + 1))), Failure)


# Leases


def test_a_lookup_protects_from_removal_until_its_lease_ends(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.find("k")
    voice.keep_alive(9)
    assert voice.remove("k") == Refusal("leased", "a reader may hold it for another 1 s")
    voice.keep_alive(1)
    assert voice.remove("k") is True
    assert voice.allocated_bytes == 0
    assert voice.remove("k") is False


def test_a_forced_removal_hides_at_once_and_frees_when_the_lease_ends(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.find("k")
    assert voice.remove("k", force=True) is True
    assert voice.find("k") is None
    voice.keep_alive(9)
    assert voice.allocated_bytes == 1024
    voice.keep_alive(1)
    assert voice.allocated_bytes == 0


def test_renewing_extends_the_lease_of_that_version_only(voice: Voice) -> None:
    voice.mount()
    place = voice.put("k")[0]
    voice.find("k")
    voice.keep_alive(8)
    assert voice.say(m.Renew(["k", "k"], [place.object_id, place.object_id + 1])).flags == b"\1\0"
    voice.keep_alive(8)
    assert isinstance(voice.remove("k"), Refusal)


def test_space_under_a_lease_is_not_given_out(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    voice.put("a", "b", "c", "d")
    for key in "abcd":
        voice.find(key)
    assert refusal_of(voice.start("e")).code == "no_space"
    voice.keep_alive(10)
    assert voice.start("e").reserved[0] is not None


def test_a_refusal_for_lack_of_space_names_pins_as_a_reason(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    voice.put("a", "b", "c", "d")
    assert voice.say(m.Pin(list("abcd"), None)).outcomes == [True] * 4
    refusal = refusal_of(voice.start("e"))
    assert refusal.code == "no_space" and "pinned" in refusal.reason
    assert voice.say(m.Pin(["a"], 0.0)).outcomes == [True]
    assert voice.start("e").reserved[0] is not None


def test_listing_grants_no_lease(voice: Voice) -> None:
    voice.mount()
    voice.put("kv/1", "kv/2", "other")
    assert voice.say(m.ListKeys("kv/", 10)).keys == ["kv/1", "kv/2"]
    assert voice.say(m.ListKeys("", 1)).keys == ["kv/1"]
    assert voice.remove("kv/1") is True


# Eviction


def test_a_put_without_room_evicts_the_least_recently_used(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    voice.put("a", "b", "c", "d")
    voice.keep_alive(1)
    voice.find("a")
    voice.keep_alive(12)
    voice.put("e")
    assert [key for key in "abcde" if voice.find(key)] == ["a", "c", "d", "e"]
    assert voice.master.story("b")[-1].endswith("unlinked: evicted: no space for a put")


def test_objects_being_written_are_never_evicted(voice: Voice) -> None:
    voice.mount(size_bytes=4096)
    voice.start("a", "b", "c", "d")
    assert refusal_of(voice.start("e")).code == "no_space"


def test_a_large_put_evicts_neighbours_until_there_is_a_hole(voice: Voice) -> None:
    voice.mount(size_bytes=8192)
    voice.put(*"abcdefgh")
    assert voice.put("large", size_bytes=3000)
    assert voice.master.counts.evicted_objects == 3


def test_a_hopeless_put_does_not_flush_the_cache(voice: Voice) -> None:
    """Every second kilobyte is leased, so there will be no hole of two, however much is evicted."""
    voice.mount(size_bytes=64 << 10)
    keys = [f"k{i}" for i in range(64)]
    voice.put(*keys)
    for key in keys[::2]:
        voice.find(key)
    assert refusal_of(voice.start("large", size_bytes=2000)).code == "no_space"
    assert voice.master.counts.evicted_objects <= 17


def test_beyond_the_watermark_a_put_evicts_ahead_of_need() -> None:
    voice = Voice(MasterSettings(high_watermark=0.75, eviction_ratio=0.25))
    voice.mount(size_bytes=8192)
    voice.put(*"abcdef")
    assert voice.allocated_bytes == 6144
    voice.put("g")
    assert voice.allocated_bytes == 4096
    assert [key for key in "abcdefg" if voice.find(key)] == ["d", "e", "f", "g"]


# Writers that don't come back


def test_a_late_writer_is_refused_and_its_space_waits_for_the_grace(voice: Voice) -> None:
    voice.mount()
    place = voice.start("k").reserved[0]
    assert place is not None
    voice.keep_alive(29)
    assert voice.allocated_bytes == 1024
    voice.keep_alive(1)
    assert voice.end("k", place.object_id).code == "expired"
    voice.keep_alive(4)
    assert voice.allocated_bytes == 1024, "a write posted in time may still land"
    voice.keep_alive(1)
    assert voice.allocated_bytes == 0
    assert voice.master.counts.expired_puts == 1


def test_the_key_of_a_dead_writer_is_free_after_its_deadline(voice: Voice) -> None:
    voice.mount()
    dead = voice.start("k").reserved[0]
    voice.keep_alive(30)
    place = voice.start("k").reserved[0]
    assert dead is not None and place is not None and place.replicas != dead.replicas
    assert voice.end("k", dead.object_id).code == "expired"
    assert voice.end("k", place.object_id) is True


def test_an_aborted_put_frees_the_key_now_and_the_space_later(voice: Voice) -> None:
    voice.mount()
    place = voice.start("k").reserved[0]
    assert place is not None
    assert voice.say(m.PutAbort(["k", "k"], [place.object_id, 99])).outcomes == [True, False]
    assert voice.start("k").reserved[0] is not None
    assert voice.allocated_bytes == 2048
    assert voice.end("k", place.object_id).code == "expired"
    voice.keep_alive(35)
    assert voice.allocated_bytes == 0


# Nodes that are lost, and that come back


def test_a_broken_connection_hides_at_once_and_the_same_epoch_brings_all_back(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.lose("node a")
    assert voice.find("k") is None
    assert voice.say(m.Exists(["k"])).flags == b"\0"
    assert refusal_of(voice.start("new")).code == "no_space"
    voice.wait(4)
    assert voice.mount(rest_s=35.0).num_objects == 1
    assert voice.find("k") is not None
    assert voice.start("new").reserved[0] is not None, "promises are remembered: no rest is needed"


def test_a_node_that_stays_away_is_forgotten_with_its_objects(voice: Voice) -> None:
    voice.mount()
    voice.put("k", "l")
    voice.start("m")
    voice.lose("node a")
    voice.wait(5)
    assert voice.master.counts.lost_objects == 2
    assert not voice.say(m.Heartbeat("a", 7), "node a").is_known
    assert voice.mount(rest_s=35.0).num_objects == 0
    assert voice.find("k") is None


def test_a_silent_node_is_suspected_and_a_heartbeat_brings_it_back(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.wait(3)
    assert voice.find("k") is None
    assert [note.event for note in voice.notes] == ["segment_mounted", "segment_suspected"]
    assert voice.say(m.Heartbeat("a", 7), "node a").is_known
    assert voice.find("k") is not None


def test_memory_of_an_earlier_master_rests_until_its_promises_are_over(voice: Voice) -> None:
    assert voice.mount(rest_s=20.0).rest_s == 35.0
    refusal = refusal_of(voice.start("k"))
    assert refusal == Refusal(
        "no_space", "promises of an earlier master may still be in use; space is allocated again in 20 s"
    )
    voice.keep_alive(20)
    assert voice.start("k").reserved[0] is not None


def test_no_space_is_given_out_before_the_node_confirmed_the_mount(voice: Voice) -> None:
    voice.say(m.Mount("a", 7, "h", 0, 4096, b"", 0.0), "node a")
    assert refusal_of(voice.start("k")).code == "no_space"
    voice.say(m.Heartbeat("a", 7), "node a")
    assert voice.start("k").reserved[0] is not None


def test_a_new_epoch_is_new_memory(voice: Voice) -> None:
    voice.mount(epoch=7)
    voice.put("k")
    voice.lose("node a")
    assert voice.mount(epoch=8).num_objects == 0
    assert voice.find("k") is None
    assert voice.start("k").reserved[0] is not None
    assert voice.say(m.DescribeSegments([("a", 7), ("a", 8)])).descriptors == [None, b"how to reach a"]


def test_a_name_in_use_is_refused(voice: Voice) -> None:
    voice.mount(epoch=7)
    refusal = voice.mount(epoch=8).refusal
    assert refusal is not None and refusal.code == "name_taken"
    assert voice.say(m.Heartbeat("a", 7), "node a").is_known


@pytest.mark.parametrize(
    "mount",
    [
        m.Mount("", 1, "h", 0, 4096, b"", 0.0),
        m.Mount("a", 1, "h", 0, 63, b"", 0.0),
        m.Mount("a", 1, "h", 0, 4096, b"", -1.0),
    ],
)
def test_bad_mounts_are_refused(voice: Voice, mount: m.Mount) -> None:
    assert voice.say(mount).refusal.code.startswith("invalid")


def test_a_put_over_a_hidden_object_replaces_it(voice: Voice) -> None:
    voice.mount("a")
    voice.put("k")
    voice.mount("b")
    voice.lose("node a")
    assert voice.put("k")[0].replicas[0].segment == "b"
    voice.mount("a")
    found = voice.find("k")
    assert found is not None and found.replicas[0].segment == "b"


def test_a_put_over_a_hidden_reservation_goes_elsewhere(voice: Voice) -> None:
    voice.mount("a")
    place = voice.start("k", put_id=5).reserved[0]
    voice.mount("b")
    voice.lose("node a")
    again = voice.start("k", put_id=5).reserved[0]
    assert place is not None and again is not None
    assert again.replicas[0].segment == "b"
    assert voice.end("k", place.object_id).code == "expired"
    assert voice.end("k", again.object_id) is True


def test_unmounting_takes_the_objects_along(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.find("k")
    assert voice.say(m.Unmount("a", 7), "node a").is_known
    assert voice.find("k") is None
    assert voice.master.capacity_bytes == 0
    assert not voice.say(m.Unmount("a", 7), "node a").is_known


# Where objects go


def test_the_writers_host_comes_first_then_the_emptiest(voice: Voice) -> None:
    voice.mount("a", host="left", size_bytes=4096)
    voice.mount("b", host="right", size_bytes=65536)
    voice.mount("c", host="right", size_bytes=32768)
    places = voice.put(*[f"k{i}" for i in range(6)], host="left")
    assert [place.replicas[0].segment for place in places] == ["a", "a", "a", "a", "b", "b"]


def test_segments_to_avoid_are_avoided(voice: Voice) -> None:
    voice.mount("a")
    message = m.PutStart(1, "h", ["k"], [1], [1], avoid=["a"])
    assert voice.say(message).refusals[0].code == "no_space"


def test_nothing_is_mounted(voice: Voice) -> None:
    assert refusal_of(voice.start("k")).reason.endswith("is a node running?")


# Corruption, and stories


def test_a_corrupt_object_is_dropped_once(voice: Voice) -> None:
    voice.mount()
    place = voice.put("k")[0]
    assert voice.say(m.Corrupt(["k"], [place.object_id])).outcomes == [True] and voice.look() == 1
    assert voice.find("k") is None
    voice.put("k")
    assert voice.say(m.Corrupt(["k"], [place.object_id])).outcomes == [False]
    assert voice.find("k") is not None


def test_a_story_has_events_and_reasons(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.wait(1)
    voice.remove("k")
    assert voice.say(m.ObjectStory("k")).lines == [
        "1.000 s ago: put started as #1 on a",
        "1.000 s ago: readable as #1",
        "0.000 s ago: #1 unlinked: removed",
    ]
    assert voice.master.story("unknown") == []


def test_the_status_adds_up(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b")
    voice.put("k")
    voice.start("l")
    voice.lose("node b")
    status = voice.say(m.GetMasterStatus())
    assert isinstance(status, m.MasterStatus)
    assert (status.num_objects, status.num_writing, status.capacity_bytes) == (1, 1, 4096)
    assert [(s.segment, s.state) for s in status.segments] == [("a", "alive"), ("b", "suspected")]
    assert status.counts["puts"] == 1


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(InvalidArgument, match="eviction_ratio"):
        MasterSettings(high_watermark=0.1, eviction_ratio=0.2)


# A successor that reads what was written down


def successor(voice: Voice) -> Voice:
    other = Voice(voice.master.settings)
    other.now = voice.now
    other.master.restore(voice.records, other.now)
    other.master.check()
    return other


def test_a_successor_has_every_object_once_its_node_is_back(voice: Voice) -> None:
    voice.mount()
    voice.put("k", "l", "m", "n")
    voice.remove("l")
    voice.put("o")
    voice.remove("n")
    voice.start("unfinished")
    other = successor(voice)
    assert not any(stored.is_visible for stored in other.master.objects.readable.values()), "not yet"
    assert other.mount(rest_s=35.0).num_objects == 3
    for key in "kmo":
        assert other.find(key) == voice.find(key)
    assert other.find("l") is None and other.find("unfinished") is None
    assert other.records == [], "nothing new happened"


def test_space_that_served_another_line_of_masters_rests_as_a_whole(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    other = successor(voice)
    other.mount(rest_s=35.0)
    assert "space is allocated again in 35 s" in refusal_of(other.start("new")).reason
    other.keep_alive(35)
    place = other.start("new").reserved[0]
    assert place is not None and place.replicas[0].address == (1 << 20) + 1024


def offsets_of(started: m.PutStarted) -> list[int]:
    return [place.replicas[0].address - (1 << 20) for place in started.reserved if place is not None]


def test_a_successor_knows_what_was_promised_and_lets_only_that_rest(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    assert offsets_of(voice.start("unfinished")) == [1024]
    voice.put("gone")
    voice.find("gone")
    voice.remove("gone", force=True)
    other = successor(voice)
    other.mount(rest_s=35.0, line=voice.master.segments.line)
    assert offsets_of(other.start("new")) == [3072], "what no writer and no reader was promised"
    assert refusal_of(other.start("more")).code == "no_space"
    other.keep_alive(35)
    assert sorted(offsets_of(other.start("later", "and later"))) == [1024, 2048]


def test_space_that_was_given_out_again_does_not_rest(voice: Voice) -> None:
    voice.mount()
    for _ in range(3):
        voice.put("k")
        voice.remove("k")
    voice.put("k", "l", "m", "n", size_bytes=512)
    other = successor(voice)
    assert other.mount(line=voice.master.segments.line).num_objects == 4
    assert sum(other.master.segments.mounted["a"].allocator.allocations.values()) == 2048
    assert offsets_of(other.start("new", size_bytes=2048)) == [2048]


def test_a_lease_on_what_is_gone_is_in_the_snapshot_too(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    voice.find("k")
    voice.remove("k", force=True)
    other = Voice(voice.master.settings)
    other.master.restore(voice.master.snapshot(), 0.0)
    other.mount(line=voice.master.segments.line)
    assert offsets_of(other.start("new")) == [1024]


def test_a_successor_of_a_successor_knows_it_too(voice: Voice) -> None:
    voice.mount()
    voice.start("unfinished")
    other = Voice(voice.master.settings)
    other.master.restore(voice.master.snapshot(), 0.0)
    third = Voice(voice.master.settings)
    third.master.restore(other.master.snapshot(), 0.0)
    third.mount(rest_s=35.0, line=voice.master.segments.line)
    assert offsets_of(third.start("new")) == [1024]


def test_restored_objects_are_taken_to_be_leased(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    other = successor(voice)
    other.mount(rest_s=35.0)
    assert other.remove("k").code == "leased"
    other.keep_alive(10)
    assert other.remove("k") is True


def test_a_node_that_started_anew_meanwhile_has_nothing(voice: Voice) -> None:
    voice.mount(epoch=7)
    voice.put("k")
    other = successor(voice)
    assert other.mount(epoch=8).num_objects == 0
    assert other.find("k") is None
    assert other.start("k").reserved[0] is not None


def test_a_node_that_stays_away_is_given_up_by_the_successor(voice: Voice) -> None:
    voice.mount()
    voice.put("k")
    other = successor(voice)
    other.wait(5)
    assert other.master.counts.lost_objects == 1 and not other.master.segments.mounted


def test_what_was_lost_with_its_node_stays_lost(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b")
    voice.put("k")
    voice.put("l")
    voice.say(m.Unmount("a", 7), "node a")
    other = successor(voice)
    assert [one.name for one in other.master.segments.mounted.values()] == ["b"]
    assert other.mount("b").num_objects == 1


def test_a_snapshot_gives_the_same_state_in_fewer_records(voice: Voice) -> None:
    voice.mount()
    for _ in range(5):
        voice.put("k")
        voice.remove("k")
    voice.put("k", "l")
    assert len(voice.records) == 19, "the space of both is one record"
    snapshot = voice.master.snapshot()
    assert len(snapshot) == 5
    again = Voice(voice.master.settings)
    again.master.restore(snapshot, 0.0)
    assert again.master.snapshot() == snapshot
    again.master.check()
