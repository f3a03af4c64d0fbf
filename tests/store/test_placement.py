from __future__ import annotations

from mooncake.store.messages import Mount
from mooncake.store.placement import Placement
from mooncake.store.segments import Segment, SegmentState


def segment(name: str, size_bytes: int, host: str = "h") -> Segment:
    made = Segment(Mount(name, 1, host, 0, size_bytes, b"", 0.0), "c", 0.0)
    made.is_confirmed = True
    return made


def places(placement: Placement, count: int, size_bytes: int) -> str:
    names = ""
    for _ in range(count):
        place = placement.allocate(size_bytes)
        names += place[0].name if place else "-"
    return names


def test_own_host_first_then_the_emptiest() -> None:
    segments = [segment("a", 256), segment("b", 640, "far"), segment("c", 512, "far")]
    assert places(Placement(segments, "h", [], 0.0), 8, 64) == "aaaabbbc"


def test_a_batch_spreads_over_equal_nodes() -> None:
    segments = [segment(name, 640, "far") for name in "abc"]
    assert places(Placement(segments, "h", [], 0.0), 9, 64) == "abcabcabc"


def test_a_hole_elsewhere_is_found_when_the_emptiest_is_in_pieces() -> None:
    pieces, whole = segment("a", 1024), segment("b", 512)
    for offset in [pieces.allocator.allocate(64) for _ in range(16)][::2]:
        assert offset is not None
        pieces.allocator.free(offset)
    taken = whole.allocator.allocate(64)
    assert taken is not None and pieces.allocator.free_bytes > whole.allocator.free_bytes
    placement = Placement([pieces, whole], "h", [], 0.0)
    assert places(placement, 1, 128) == "b"
    assert places(placement, 1, 64) == "a"


def test_only_segments_that_take_objects_count() -> None:
    dead, resting, avoided, good = (segment(name, 1024 * (4 - i)) for i, name in enumerate("abcd"))
    dead.set_state(SegmentState.SUSPECTED)
    resting.rests_until = 10.0
    placement = Placement([dead, resting, avoided, good], "h", ["c"], 5.0)
    assert placement.largest_bytes == 1024
    assert places(placement, 1, 64) == "d"
    assert placement.covers(good) and not placement.covers(avoided)


def test_freed_space_changes_the_order() -> None:
    a, b = segment("a", 128), segment("b", 128)
    placement = Placement([a, b], "h", [], 0.0)
    assert places(placement, 5, 64) == "abab-"
    b.allocator.free(0)
    placement.freed(b)
    assert places(placement, 2, 64) == "b-"


def test_nothing_to_place_on() -> None:
    placement = Placement([], "h", [], 0.0)
    assert placement.largest_bytes == 0 and placement.allocate(1) is None
