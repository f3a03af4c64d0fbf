# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from mooncake.errors import Refusal
from mooncake.store.master.segments import MAX_WAITING_CHANGES, ChangeLog, Segment, Segments, SegmentState
from mooncake.store.messages import Mount, SegmentEntry
from mooncake.types import Tier


def mount(
    segments: Segments, now: float, epoch: int = 1, connection: str = "c", rest_s: float = 0.0
) -> Segment:
    message = Mount("a", epoch, "h", 0, 4096, b"", rest_s)
    outcome = segments.mount(message, connection, now)
    assert not isinstance(outcome, Refusal)
    return outcome[0]


def test_a_segment_without_heartbeats_is_suspected_then_given_up() -> None:
    segments = Segments(ttl_s=5.0, heartbeat_s=1.0)
    segment = mount(segments, 10.0)
    assert segments.deadline() == 13.0
    assert segments.expire(12.9) == ([], [])
    assert segments.expire(13.0) == ([segment], [])
    assert segment.state is SegmentState.SUSPECTED and segments.deadline() == 18.0
    assert segments.expire(18.0) == ([], [segment])
    assert not segment.is_mounted and segments.deadline() is None


def test_a_heartbeat_counts_only_over_the_connection_of_the_mount() -> None:
    segments = Segments(5.0, 1.0)
    segment = mount(segments, 0.0)
    assert segments.beat("a", 1, "other", 1.0) is None
    assert segments.beat("a", 2, "c", 1.0) is None
    assert segments.beat("a", 1, "c", 1.0) is segment
    assert segments.expire(3.9) == ([], [])
    assert segments.deadline() == 4.0
    assert segments.expire(4.0) == ([segment], [])


def test_losing_an_old_connection_does_not_hurt_a_segment_that_moved_on() -> None:
    segments = Segments(5.0, 1.0)
    segment = mount(segments, 0.0, connection="old")
    assert mount(segments, 1.0, connection="new") is segment
    assert segments.connection_lost("old", 2.0) == []
    assert segments.connection_lost("new", 2.0) == [segment]
    assert segments.connection_lost("new", 2.5) == [], "it is suspected already"


def test_space_is_given_out_after_the_first_heartbeat_and_the_rest() -> None:
    segments = Segments(5.0, 1.0)
    segment = mount(segments, 0.0, rest_s=2.0)
    assert not segment.takes_objects(2.0)
    segments.beat("a", 1, "c", 1.0)
    assert not segment.takes_objects(1.9) and segment.takes_objects(2.0)
    segments.connection_lost("c", 3.0)
    assert not segment.takes_objects(3.0)
    assert mount(segments, 4.0, rest_s=99.0) is segment
    assert segment.takes_objects(4.0), "this master remembers its promises"


def test_a_restarted_process_replaces_its_suspected_segment() -> None:
    segments = Segments(5.0, 1.0)
    first = mount(segments, 0.0, epoch=1)
    refusal = segments.mount(Mount("a", 2, "h", 0, 4096, b"", 0.0), "d", 1.0)
    assert isinstance(refusal, Refusal) and refusal.code == "name_taken"
    segments.connection_lost("c", 2.0)
    outcome = segments.mount(Mount("a", 2, "h", 0, 4096, b"", 0.0), "d", 3.0)
    assert not isinstance(outcome, Refusal)
    assert outcome[1] is first and not first.is_mounted
    assert segments.find("a", 1) is None and segments.find("a", 2) is outcome[0]
    segments.check()


def ssd(epoch: int, content_id: int = 99, **more: Any) -> Mount:
    return Mount("a/ssd", epoch, "h", 0, 1 << 20, b"", 0.0, Tier.SSD, content_id, "a", **more)


def test_an_ssd_comes_back_with_its_content_under_another_epoch() -> None:
    segments = Segments(5.0, 1.0)
    outcome = segments.mount(ssd(1), "c", 0.0)
    assert not isinstance(outcome, Refusal)
    segment = outcome[0]
    assert segment.wants_report and segment.tier is Tier.SSD and segment.node == "a"
    segments.beat("a/ssd", 1, "c", 0.5)
    assert not segment.takes_objects(50.0), "its content is unknown"
    segment.wants_report = False
    assert segment.takes_objects(50.0)
    refusal = segments.mount(ssd(2), "d", 1.0)
    assert isinstance(refusal, Refusal), "the first process still serves it"
    segments.connection_lost("c", 2.0)
    assert segments.mount(ssd(2), "d", 3.0) == (segment, None)
    assert segment.epoch == 2 and segment.is_alive and not segment.wants_report
    assert not segment.takes_objects(3.0), "no heartbeat yet"
    segments.check()


def test_another_content_of_an_ssd_is_another_segment() -> None:
    segments = Segments(5.0, 1.0)
    outcome = segments.mount(ssd(1), "c", 0.0)
    assert not isinstance(outcome, Refusal)
    segments.connection_lost("c", 1.0)
    other = segments.mount(ssd(2, content_id=100), "d", 2.0)
    assert not isinstance(other, Refusal)
    assert other[1] is outcome[0] and other[0] is not outcome[0] and other[0].wants_report


def test_a_content_that_comes_under_another_name_leaves_the_old_one() -> None:
    segments = Segments(5.0, 1.0)
    outcome = segments.mount(ssd(1), "c", 0.0)
    assert not isinstance(outcome, Refusal)
    segments.connection_lost("c", 1.0)
    renamed = Mount("b/ssd", 2, "h", 0, 1 << 20, b"", 0.0, Tier.SSD, 99, "b")
    other = segments.mount(renamed, "d", 2.0)
    assert not isinstance(other, Refusal) and other[1] is outcome[0]
    assert list(segments.mounted) == ["b/ssd"] and list(segments.of("b")) == [other[0]]
    assert list(segments.of("a")) == []
    segments.check()


def test_memory_of_an_earlier_master_is_reported_while_it_rests() -> None:
    segments = Segments(5.0, 1.0)
    segment = mount(segments, 0.0, rest_s=2.0)
    assert segment.wants_report
    segments.beat("a", 1, "c", 1.0)
    assert segment.takes_objects(2.0)
    assert not mount(Segments(5.0, 1.0), 0.0).wants_report


def test_changes_wait_until_they_are_noted() -> None:
    changes = ChangeLog(1)
    assert changes.noted(0) and changes.take(9) == []
    for object_id in (7, 8, 9):
        changes.add(object_id)
    assert (changes.first, changes.last) == (1, 3)
    assert changes.take(2) == [7, 8] and changes.take(9) == [7, 8, 9]
    assert changes.noted(2) and changes.take(9) == [9]
    assert changes.noted(2) and changes.take(9) == [9], "the same request again"
    assert changes.noted(3) and len(changes) == 0


def test_removals_differ_from_additions() -> None:
    changes = ChangeLog(1)
    changes.add(SegmentEntry("k", 5, 10, 10, b"crc!", 0))
    found = [changes.has_gone]
    changes.add(5)
    changes.add(SegmentEntry("k", 6, 10, 10, b"crc!", 0))
    found.append(changes.has_gone)
    for seen in (1, 2):
        changes.noted(seen)
        found.append(changes.has_gone)
    assert found == [False, True, True, False] and len(changes) == 1


def test_a_node_that_lags_too_far_finds_numbers_missing() -> None:
    changes = ChangeLog(1)
    for object_id in range(MAX_WAITING_CHANGES + 2):
        changes.add(object_id)
    assert not changes.noted(0) and changes.first == 3
    assert changes.noted(2)


def test_changes_without_a_polling_node_are_missed() -> None:
    changes = ChangeLog(1)
    changes.skip()
    assert not changes.noted(0)
    changes.add(5)
    changes.skip()
    changes.add(6)
    assert not changes.noted(2) and changes.take(9) == [6]
    assert changes.noted(changes.last)


def test_a_number_of_another_master_never_appears_up_to_date() -> None:
    for first, seen in ((1000, 0), (1000, 17), (1, 17), (1, 1)):
        changes = ChangeLog(first)
        assert not changes.noted(seen), (first, seen)
        assert changes.first > seen + 1, "that is how the node knows"
        assert changes.noted(changes.last)
