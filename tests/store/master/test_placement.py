# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mooncake.store.master.placement import SegmentPlacement
from mooncake.store.master.segments import LOST, Segment, Segments
from mooncake.store.messages import Mount, PutPolicy


class Room:
    """Segments that have confirmed their mounts."""

    def __init__(self) -> None:
        self.segments = Segments(ttl_s=5.0, heartbeat_s=1.0)

    def add(self, name: str, size_bytes: int, host: str = "h") -> Segment:
        self.segments.mount(Mount(name, 1, host, 0, size_bytes, b"", 0.0), "c", 0.0)
        segment = self.segments.beat(name, 1, "c", 0.0)
        assert segment is not None
        return segment

    def placement(self, *avoid: str, now: float = 0.0) -> SegmentPlacement:
        return SegmentPlacement(self.segments, "h", avoid, now)


def places(placement: SegmentPlacement, count: int, size_bytes: int) -> str:
    names = ""
    for _ in range(count):
        place = placement.allocate(size_bytes)
        names += place[0].name if place else "-"
    return names


def test_own_host_first_then_the_emptiest() -> None:
    room = Room()
    for name, size_bytes, host in (("a", 256, "h"), ("b", 640, "far"), ("c", 512, "far")):
        room.add(name, size_bytes, host)
    assert places(room.placement(), 8, 64) == "aaaabbbc"


def test_a_batch_spreads_over_equal_nodes() -> None:
    room = Room()
    for name in "abc":
        room.add(name, 640, "far")
    assert places(room.placement(), 9, 64) == "abcabcabc"


def test_a_hole_elsewhere_is_found_when_the_emptiest_is_in_pieces() -> None:
    room = Room()
    pieces, whole = room.add("a", 1024), room.add("b", 512)
    for offset in [pieces.allocator.allocate(64) for _ in range(16)][::2]:
        assert offset is not None
        pieces.allocator.free(offset)
    taken = whole.allocator.allocate(64)
    assert taken is not None and pieces.allocator.free_bytes > whole.allocator.free_bytes
    placement = room.placement()
    assert places(placement, 1, 128) == "b"
    assert places(placement, 1, 64) == "a"


def test_only_segments_that_take_objects_count() -> None:
    room = Room()
    dead, resting, _, good = (room.add(name, 1024 * (4 - i)) for i, name in enumerate("abcd"))
    dead.move(LOST)
    resting.rests_until = 10.0
    placement = room.placement("c", now=5.0)
    assert placement.largest_bytes == 1024
    assert places(placement, 1, 64) == "d"
    assert placement.segments == [good]


def test_freed_space_changes_the_order() -> None:
    room = Room()
    room.add("a", 128)
    b = room.add("b", 128)
    placement = room.placement()
    assert places(placement, 5, 64) == "abab-"
    b.allocator.free(0)
    placement.freed(b)
    assert places(placement, 2, 64) == "b-"


def test_a_newcomer_counts_more_and_more_over_its_first_minute() -> None:
    """Five times as empty as the other, it does not come first until it has been there for some time."""
    room = Room()
    old = room.add("a", 64 * 1000)
    new = room.add("b", 64 * 1000)
    new.joined_at = 100.0
    assert old.allocator.allocate(64 * 800) is not None
    counts = []
    for now in (100.0, 130.0, 160.0):
        placed = places(room.placement(now=now), 100, 64)
        counts.append(placed.count("b"))
        for segment in (old, new):
            for offset in [at for at, size in segment.allocator.allocations.items() if size == 64]:
                segment.allocator.free(offset)
    assert counts == [0, 100, 100]


def test_where_no_other_has_room_a_newcomer_takes_everything() -> None:
    room = Room()
    room.add("a", 128)
    room.add("b", 640).joined_at = 100.0
    assert places(room.placement(now=100.0), 8, 64) == "aabbbbbb"


def test_further_replicas_go_to_other_hosts_first_and_nowhere_twice() -> None:
    room = Room()
    a, b, c, d = (room.add(name, 640, host) for name, host in zip("abcd", "hhxx", strict=True))
    placement = room.placement()
    taken, order = [a], []
    for segment in placement.others(taken):
        taken.append(segment)
        order.append(segment)
    assert order == [c, b, d]


def test_the_preferred_come_first_while_they_have_room() -> None:
    room = Room()
    room.add("a", 640)
    room.add("b", 128, "far")
    policy = PutPolicy(preferred_segments=["x", "b"])
    placement = SegmentPlacement(room.segments, "h", (), 0.0, policy)
    assert places(placement, 4, 64) == "bbaa"


def test_nothing_to_place_on() -> None:
    placement = Room().placement()
    assert placement.largest_bytes == 0 and placement.allocate(1) is None
