# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from mooncake.errors import Refusal
from mooncake.store.master.segments import Segment, Segments, SegmentState
from mooncake.store.messages import Mount
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
