# SPDX-License-Identifier: Apache-2.0
"""Which replies a master may send, in which order, and which state is its own: without I/O and clocks."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.errors import Unavailable
from mooncake.store import messages as m
from mooncake.store.ha.role import MasterRole
from mooncake.store.ha.standby_replication import Followed
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import AppendRecords, Received, Reply
from mooncake.store.master.log_records import Doubt, IdsGiven, LineBegan, Record
from mooncake.store.master.master import Master
from tests.store.conftest import SETTINGS


class Paper:
    """A log in memory, which can be full."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.copy: list[Record] | None = None
        self.is_full = False

    def keep(self, records: list[Record], catalog: Catalog) -> None:
        if self.is_full:
            raise Unavailable("no space is left")
        self.records += records

    def begin_copy(self) -> None:
        self.copy = []

    def copied(self, records: list[Record], is_complete: bool) -> None:
        assert self.copy is not None
        self.copy += records
        if is_complete:
            self.records, self.copy = self.copy, None


def alone(records: list[Record] | None = None) -> tuple[MasterRole, Paper]:
    paper = Paper()
    role = MasterRole(SETTINGS, paper, lambda: 1 << 20)
    role.begin(records or [], 0.0)
    role.lead(True, None, 1, 0.0)
    return role, paper


def ask(role: MasterRole, message: Any, now: float) -> list[Any]:
    """The answer to a message."""
    sent: list[Any] = []
    for effect in role.master.handle(Received("one", "connection", message), now):
        if isinstance(effect, AppendRecords | Reply):
            sent += [reply.message for reply in role.carry_out(effect, now)]
    return sent


MOUNT = m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0)


def test_a_master_alone_writes_down_then_answers() -> None:
    role, paper = alone()
    assert isinstance(paper.records[0], LineBegan)
    assert [type(answer) for answer in ask(role, MOUNT, 1.0)] == [m.Mounted]
    assert paper.records[1:] != []


def test_no_reply_is_sent_after_a_record_could_not_be_written_down() -> None:
    """Not even for records that could be written: behind half a record they would be lost."""
    role, paper = alone()
    paper.is_full = True
    with pytest.raises(Unavailable):
        ask(role, MOUNT, 1.0)
    paper.is_full = False
    assert not role.is_leading and role.has_failed
    with pytest.raises(Unavailable):
        role.carry_out(AppendRecords([LineBegan(1)]), 2.0)
    assert LineBegan(1) not in paper.records


def test_a_copy_becomes_the_state_when_it_is_complete() -> None:
    leader, paper = alone()
    ask(leader, MOUNT, 1.0)
    follower = MasterRole(SETTINGS, Paper(), lambda: 1 << 20)
    follower.begin([], 0.0)
    before = follower.master
    follower.begin_to_follow()
    assert not follower.take(Followed(7, 1, paper.records[:1], False), 1.0)
    assert follower.master is before
    assert follower.take(Followed(7, 2, paper.records[1:], True), 1.0)
    assert list(follower.master.segments.mounted) == ["a"]


def test_a_master_that_takes_over_without_everything_begins_empty() -> None:
    leader, paper = alone()
    ask(leader, MOUNT, 1.0)
    other = MasterRole(SETTINGS, (own := Paper()), lambda: 1 << 20)
    other.begin(paper.records, 2.0)
    assert other.master.segments.mounted
    other.lead(False, None, 1, 3.0)
    assert not other.master.segments.mounted and isinstance(other.master, Master)
    assert [type(record) for record in own.records] == [LineBegan, IdsGiven]


def test_what_is_newer_than_the_records_is_not_held_for_removed() -> None:
    """Ids of a new master begin at the clock, above all earlier ones, and not at the end of the log."""
    role = MasterRole(SETTINGS, Paper(), lambda: 1 << 40)
    role.begin([IdsGiven(5000)], 0.0, Doubt.END)
    role.lead(True, None, 1, 0.0)
    catalog = role.master.catalog
    assert not catalog.is_later(5000)
    assert catalog.is_later(5001) and catalog.is_later(1 << 39), "its record may have been lost"
    assert catalog.objects.new_id() > 1 << 40
    assert catalog.segments.line == 1 << 40, "nodes tell masters apart by it and by the numbers of changes"
