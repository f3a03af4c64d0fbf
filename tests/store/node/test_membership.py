# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import pytest

from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.store import messages as m
from mooncake.store.node.membership import (
    ANSWER_S,
    MAX_BACKOFF_S,
    Connect,
    ConnectionClosed,
    ConnectionOpened,
    Disconnect,
    DropObjects,
    Effect,
    Event,
    Leave,
    Left,
    LogEvent,
    Membership,
    MembershipPhase,
    ReplyReceived,
    Send,
)
from mooncake.store.node.task_agent import MAX_REPORT_ENTRIES
from mooncake.types import Tier

MOUNT = m.Mount("a", 7, "h", 4096, 1 << 20, b"descriptor", 0.0)
BEAT = m.Heartbeat("a", 7)


class Member:
    """A membership with its own clock; checked at every step."""

    def __init__(self) -> None:
        self.core = Membership("a", 7, "h", 4096, 1 << 20, b"descriptor", Random(0))
        self.now = 100.0

    def post(self, event: Event | Wake) -> list[Effect]:
        effects = self.core.handle(event, self.now)
        self.core.check()
        return effects

    def wake(self) -> list[Effect]:
        """Advance the clock to the deadline and wake the membership."""
        deadline = self.core.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.post(Wake())

    def mount(self, rest_s: float = 35.0, num_objects: int = 0) -> None:
        assert self.wake() == [Connect()]
        assert isinstance(self.post(ConnectionOpened())[0], Send)
        self.post(ReplyReceived(m.Mounted(None, num_objects, 1.0, rest_s)))
        assert self.core.phase is MembershipPhase.MOUNTED


@pytest.fixture
def member() -> Member:
    return Member()


def test_connects_mounts_and_confirms_at_once(member: Member) -> None:
    assert member.wake() == [Connect()]
    assert member.post(ConnectionOpened()) == [Send(MOUNT)]
    effects = member.post(ReplyReceived(m.Mounted(None, 3, 1.0, 35.0)))
    assert effects == [LogEvent("mounted", {"segment": "a", "num_objects": 3})]
    before = member.now
    assert member.wake() == [Send(BEAT)] and member.now == before


def test_a_heartbeat_a_second(member: Member) -> None:
    member.mount()
    for _ in range(3):
        assert member.wake() == [Send(BEAT)]
        before = member.now
        assert member.post(ReplyReceived(m.Beat(True))) == []
        assert member.core.deadline() == before + 1.0


def test_a_master_that_forgot_is_mounted_again_with_the_rest_it_needs(member: Member) -> None:
    member.mount(rest_s=35.0)
    member.wake()
    effects = member.post(ReplyReceived(m.Beat(False)))
    assert isinstance(effects[1], Send) and isinstance(effects[1].message, m.Mount)
    assert effects[1].message.rest_s == 35.0


def test_the_longest_rest_that_any_master_required_is_kept(member: Member) -> None:
    member.mount(rest_s=35.0)
    member.post(ConnectionClosed("reset"))
    member.mount(rest_s=5.0)
    assert member.core.rest_s == 35.0


def test_a_lost_connection_is_tried_again_with_growing_pauses(member: Member) -> None:
    member.mount()
    effects = member.post(ConnectionClosed("reset"))
    assert isinstance(effects[0], LogEvent) and effects[0].event == "master_lost"
    pauses = []
    for _ in range(10):
        before = member.now
        assert member.wake() == [Connect()]
        pauses.append(member.now - before)
        member.post(ConnectionClosed("refused"))
    assert pauses[0] < 0.2 and pauses[1] > pauses[0] and pauses[-1] > 1.0
    assert max(pauses) <= 1.25 * MAX_BACKOFF_S
    member.mount()
    assert member.post(ConnectionClosed("reset")) and member.core.deadline() < member.now + 0.2  # type: ignore[operator]


def test_a_missing_reply_is_a_loss(member: Member) -> None:
    member.mount()
    assert member.wake() == [Send(BEAT)]
    before = member.now
    effects = member.wake()
    assert member.now == before + ANSWER_S
    assert effects[0] == Disconnect() and member.core.phase is MembershipPhase.WAITING


def test_a_connection_that_does_not_open_is_given_up(member: Member) -> None:
    member.wake()
    assert member.wake()[0] == Disconnect()
    assert member.post(ConnectionOpened()) == [], "too late"


def test_a_refused_mount_is_tried_again(member: Member) -> None:
    member.wake()
    member.post(ConnectionOpened())
    effects = member.post(ReplyReceived(m.Mounted(Refusal("name_taken", "another process"), 0, 1.0, 0.0)))
    assert effects[0] == Disconnect()
    assert isinstance(effects[1], LogEvent) and "name_taken" in effects[1].fields["reason"]
    assert member.wake() == [Connect()]


def test_a_requested_report_is_sent_before_the_first_heartbeat() -> None:
    member = Member()
    held = [m.SegmentEntry(f"k{i}", i, 10, 10, b"crc!", 4096 * i) for i in range(MAX_REPORT_ENTRIES + 1)]
    about = {"tier": Tier.SSD, "content_id": 5, "node": "n"}
    member.core = Membership(
        "a",
        7,
        "h",
        4096,
        1 << 20,
        b"descriptor",
        Random(0),
        held=lambda: held,
        **about,  # type: ignore[arg-type]
    )
    member.wake()
    where = ("a", 7, "h", 4096, 1 << 20, b"descriptor")
    mount = m.Mount(*where, 0.0, Tier.SSD, 5, "n", largest_id=MAX_REPORT_ENTRIES)
    assert member.post(ConnectionOpened()) == [Send(mount)]
    effects = member.post(ReplyReceived(m.Mounted(None, 0, 1.0, 35.0, wants_report=True)))
    assert effects[1] == Send(m.ReportContents("a", 7, held[:-1], is_last=False))
    assert member.post(ReplyReceived(m.Reported([3, 4]))) == [
        DropObjects([3, 4]),
        Send(m.ReportContents("a", 7, held[-1:], is_last=True)),
    ]
    assert member.core.phase is MembershipPhase.REPORTING
    assert member.post(ReplyReceived(m.Reported([]))) == []
    assert member.wake() == [Send(BEAT)]


def test_a_report_that_is_not_answered_is_a_loss(member: Member) -> None:
    member.wake()
    member.post(ConnectionOpened())
    member.post(ReplyReceived(m.Mounted(None, 0, 1.0, 35.0, wants_report=True)))
    assert member.wake()[0] == Disconnect() and member.core.phase is MembershipPhase.WAITING
    assert member.wake() == [Connect()]


def test_leaving_unmounts_the_segment(member: Member) -> None:
    member.mount()
    assert member.post(Leave()) == [Send(m.Unmount("a", 7))]
    assert member.post(ReplyReceived(m.Beat(True))) == [Disconnect(), Left()]
    assert member.core.deadline() is None and member.post(ConnectionOpened()) == []


def test_a_segment_that_survives_the_process_is_not_unmounted() -> None:
    member = Member()
    member.core = Membership("a", 7, "h", 4096, 1 << 20, b"", Random(0), tier=Tier.SSD, content_id=5)
    member.mount()
    assert member.post(Leave()) == [Disconnect(), Left()]


@pytest.mark.parametrize("end", [ConnectionClosed("reset"), Wake()])
def test_leaving_waits_for_a_limited_time(member: Member, end: Event | Wake) -> None:
    member.mount()
    member.post(Leave())
    member.now += ANSWER_S
    assert member.post(end) == [Disconnect(), Left()]


def test_leaving_without_a_master_is_immediate(member: Member) -> None:
    assert member.post(Leave()) == [Disconnect(), Left()]


def test_the_story_has_the_phases(member: Member) -> None:
    member.mount()
    assert [line.split()[1] for line in member.core.story("a")] == ["connecting", "mounting", "mounted"]
    assert member.core.story("b") == []
