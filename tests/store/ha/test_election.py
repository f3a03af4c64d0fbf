# SPDX-License-Identifier: Apache-2.0
"""One master's part in the election, step by step. Several of them, with clocks of different
speeds and late messages, are in ``tests/sim``: ``test_election_run.py``, ``test_masters_run.py``."""

from __future__ import annotations

from mooncake.machine import Wake
from mooncake.store.ha.election import (
    MARGIN,
    CaughtUp,
    CompareAndSet,
    CompareAndSetDone,
    Effect,
    Election,
    InSync,
    Lead,
    LeaderChanged,
    LeaderLease,
    LeaderLost,
    LeaseRead,
    NoAnswer,
    ReadLease,
    Resign,
    Resigned,
    Standby,
    StepDown,
    decode_lease,
)
from mooncake.store.ha.election import Event as ElectionEvent

LEASE_S, ORPHAN_S = 2.0, 6.0


A, B, C = Standby("a", "a:1"), Standby("b", "b:1"), Standby("c", "c:1")


class Alone:
    """An election whose record is held by the test."""

    def __init__(
        self, me: Standby, *, has_state: bool = False, keeps_records: bool = True, is_whole: bool = True
    ) -> None:
        self.election = Election(
            me,
            LEASE_S,
            ORPHAN_S,
            has_log=has_state,
            has_state=has_state,
            keeps_records=keeps_records,
            is_whole=is_whole,
        )
        self.now = 10.0
        self.record: LeaderLease | None = None
        self.done: list[Effect] = []
        self.post(Wake())

    def post(self, event: ElectionEvent | Wake) -> list[Effect]:
        """Effects except ReadLease and CompareAndSet, which are done at once."""
        first = len(self.done)
        effects = self.election.handle(event, self.now)
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, ReadLease):
                content = None if self.record is None else self.record.encode()
                effects += self.election.handle(LeaseRead(content), self.now)
            elif isinstance(effect, CompareAndSet):
                content = None if self.record is None else self.record.encode()
                if content == effect.old:
                    self.record = decode_lease(effect.new)
                effects += self.election.handle(CompareAndSetDone(content == effect.old), self.now)
            else:
                self.done.append(effect)
        self.election.check()
        return self.done[first:]

    def forget(self) -> None:
        self.record = None

    def wait(self, seconds: float) -> list[Effect]:
        first, until = len(self.done), self.now + seconds
        while (deadline := self.election.deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.post(Wake())
        self.now = until
        return self.done[first:]


def led_by(leader: Standby, *standbys: Standby, term: int = 4, beat: int = 0) -> LeaderLease:
    return LeaderLease(leader.id, leader.address, term, beat, LEASE_S, list(standbys))


def test_the_first_of_all_leads_sooner_with_a_log() -> None:
    with_log, without = Alone(A, has_state=True), Alone(B)
    assert with_log.done == [Lead(1, True)]
    assert without.done == [] and without.wait(LEASE_S / 2 - 0.01) == []
    assert without.wait(0.02) == [Lead(1, True)]


def test_where_records_may_be_lost_no_master_leads_before_a_lease_has_passed() -> None:
    one = Alone(A, has_state=True, keeps_records=False)
    assert one.wait(LEASE_S - 0.01) == []
    assert one.wait(0.02) == [Lead(1, True)]


def follower_of(leader: Standby, *standbys: Standby, me: Standby = B) -> Alone:
    one = Alone(me, keeps_records=True)
    one.record = led_by(leader, *standbys)
    assert one.wait(0.3) == [LeaderChanged(one.record)]
    return one


def test_a_listed_standby_takes_over_when_the_record_has_not_changed_for_a_lease() -> None:
    one = follower_of(A, B, C)
    for beat in range(1, 20):
        one.record = led_by(A, B, C, beat=beat)
        assert one.wait(LEASE_S / 2) == []
    assert one.wait(LEASE_S / 2 - 0.01) == []
    assert one.wait(0.3) == [Lead(5, True)]
    assert one.record is not None and one.record.standbys == [C], "who had everything has it still"
    assert one.election.eligible() == {"c": None}


def test_a_standby_that_is_not_listed_waits_longer_and_begins_empty() -> None:
    one = follower_of(A, C)
    assert one.wait(LEASE_S + ORPHAN_S - 0.3) == []
    assert one.wait(0.6) == [Lead(5, False)]
    assert one.record is not None and not one.record.standbys and not one.record.begins_empty


def test_a_leader_that_comes_back_with_its_log_leads_at_once() -> None:
    one = Alone(A, has_state=True)
    one.record = led_by(A, B)
    one.election = Election(A, LEASE_S, ORPHAN_S, has_log=True, has_state=True, keeps_records=True)
    assert one.post(Wake())[-1] == Lead(5, True)
    assert one.election.eligible() == {"b": None}


def test_a_leader_that_gets_no_answer_steps_down_before_its_lease_is_over() -> None:
    one = Alone(A, has_state=True)
    one.wait(LEASE_S)
    assert one.election.leads(one.now)
    renewed_at = one.now
    while one.election.is_leading:
        deadline = one.election.deadline()
        assert deadline is not None
        one.now = max(one.now, deadline)
        effects = one.election.handle(Wake(), one.now)
        if any(isinstance(effect, ReadLease | CompareAndSet) for effect in effects):
            effects += one.election.handle(NoAnswer("cut off"), one.now)
    assert [type(effect) for effect in effects if isinstance(effect, StepDown)] == [StepDown]
    assert one.now <= renewed_at + LEASE_S * (1 - MARGIN)
    assert one.wait(1.0) == [Lead(2, True)], "no other master has taken it"


def test_a_leader_that_was_replaced_steps_down() -> None:
    one = Alone(A, has_state=True)
    one.record = led_by(B)
    assert one.wait(LEASE_S) == [StepDown("b:1 leads in term 4"), LeaderChanged(led_by(B))]


def test_a_leader_that_resigns_names_its_successor_who_leads_at_once() -> None:
    one = Alone(A, has_state=True)
    one.post(InSync((B, C)))
    assert one.record is not None and one.record.standbys == [B, C]
    assert one.post(Resign()) == [Resigned(B)]
    assert not one.election.leads(one.now) and one.election.deadline() is None
    other = Alone(B)
    other.record = one.record
    other.post(LeaderLost())
    assert other.done == [LeaderChanged(one.record), Lead(one.record.term + 1, True)]
    assert other.record is not None and other.record.standbys == [C]


def test_a_leader_without_standbys_resigns_all_the_same() -> None:
    one = Alone(A, has_state=True)
    assert one.post(Resign()) == [Resigned(None)]
    assert Alone(B).post(Resign()) == [Resigned(None)]


def test_a_leader_without_standbys_and_log_leaves_its_place_to_any_master() -> None:
    one = Alone(A)
    assert one.wait(LEASE_S) == [Lead(1, True)]
    assert one.post(Resign()) == [Resigned(None)]
    assert one.record is not None and not one.record.leader
    other = Alone(B)
    other.record = one.record
    assert other.wait(LEASE_S) == [LeaderChanged(one.record), Lead(2, False)]


def test_a_leader_writes_its_record_again_when_the_service_lost_it() -> None:
    one = Alone(A, has_state=True)
    one.post(InSync((B,)))
    one.forget()
    assert one.wait(LEASE_S) == [] and one.election.leads(one.now)
    assert one.record is not None and one.record.standbys == [B]


def test_a_struck_standby_counts_until_that_is_in_the_record() -> None:
    one = Alone(A, has_state=True)
    one.post(InSync((B, C)))
    [swap] = one.election.handle(InSync((B,)), one.now)
    assert isinstance(swap, CompareAndSet) and one.election.eligible() == {"b": None, "c": None}
    one.election.handle(NoAnswer("it may have happened"), one.now)
    assert one.election.eligible() == {"b": None, "c": None}
    one.wait(LEASE_S / 2)
    assert one.election.eligible() == {"b": None}


def test_a_record_of_another_kind_is_left_alone() -> None:
    election = Election(A, LEASE_S, ORPHAN_S, has_log=True, has_state=True, keeps_records=True)
    assert election.handle(Wake(), 1.0) == [ReadLease()]
    assert election.handle(LeaseRead(b"something else"), 1.0) == []
    assert election.handle(Wake(), 1.0 + LEASE_S) == [ReadLease()]
    assert "can't be read" in election.story("a:1")[-1]


def test_the_lease_in_the_record_counts_where_it_is_longer() -> None:
    """The masters' lease settings are changed one after the other."""
    one = Alone(B)
    one.record = LeaderLease("a", "a:1", 4, 0, 2 * LEASE_S, [B])
    assert one.wait(2 * LEASE_S - 0.01) == [LeaderChanged(one.record)]
    assert one.wait(0.3) == [Lead(5, True)]


def came_back_after_its_machine_went_down(record: LeaderLease) -> Alone:
    one = Alone(A, has_state=True)
    one.record = record
    one.election = Election(
        A, LEASE_S, ORPHAN_S, has_log=True, has_state=True, keeps_records=True, is_whole=False
    )
    one.done = []
    one.post(Wake())
    return one


def test_a_leader_whose_machine_went_down_lets_a_listed_standby_lead() -> None:
    """The end of its log may be lost, and the standby has it."""
    one = came_back_after_its_machine_went_down(led_by(A, B))
    assert one.wait(LEASE_S + ORPHAN_S - 0.3) == [], "the standby has had its time"
    assert one.wait(0.6) == [Lead(5, False)]


def test_a_listed_standby_whose_machine_went_down_has_not_everything() -> None:
    one = came_back_after_its_machine_went_down(led_by(B, A))
    assert not [effect for effect in one.wait(LEASE_S + 1.0) if isinstance(effect, Lead)]


def test_a_standby_that_has_caught_up_has_everything() -> None:
    one = came_back_after_its_machine_went_down(led_by(B, A))
    one.post(CaughtUp())
    assert one.wait(LEASE_S + 0.3)[-1] == Lead(5, True)


def test_a_leader_whose_machine_went_down_leads_with_its_log_where_no_other_has_more() -> None:
    one = came_back_after_its_machine_went_down(led_by(A))
    assert one.done[-1] == Lead(5, True)
