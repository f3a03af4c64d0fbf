# SPDX-License-Identifier: Apache-2.0
"""Who leads: decided by statements that are late, lost or contradict each other."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from mooncake.conductor.leadership import ConductorLeadership, StandingReceived
from mooncake.conductor.messages import MAX_TERM, Replicate, Standing
from mooncake.machine import Wake

LEASE_S = 1.0


def follower(own_id: int = 1, now: float = 0.0) -> ConductorLeadership:
    return ConductorLeadership(own_id, LEASE_S, now, is_alone=False)


def state(to: ConductorLeadership, other: Standing, now: float) -> bool:
    """Deliver a statement; whether the leader changed."""
    changes = to.handle(StandingReceived(other), now)
    to.check()
    return bool(changes)


def wake(one: ConductorLeadership, now: float) -> bool:
    """Whether it leads in place of another one now."""
    changes = one.handle(Wake(), now)
    one.check()
    return bool(changes) and changes[0].is_takeover


def test_a_conductor_without_others_leads_at_once() -> None:
    alone = ConductorLeadership(7, LEASE_S, 0.0, is_alone=True)
    alone.check()
    assert alone.standing == Standing(7, 1, True)
    assert alone.deadline() is None


def test_the_first_one_leads_after_a_lease() -> None:
    one = follower()
    assert one.deadline() == 1.0 and not one.handle(Wake(), 0.9)
    [change] = one.handle(Wake(), 1.0)
    assert (change.is_own, change.is_takeover, change.term) == (True, False, 1)
    assert one.deadline() is None and "leads with term 1" in one.story("")[0]


def test_of_two_that_start_together_the_higher_id_leads() -> None:
    low, high = follower(1), follower(2)
    state(low, high.standing, 0.5), state(high, low.standing, 0.5)
    assert not low.handle(Wake(), 1.0) and low.deadline() == 2.0
    assert high.handle(Wake(), 1.0)
    assert state(low, high.standing, 1.1)
    assert (low.leader, low.standing) == (2, Standing(1, 1))


def test_one_that_defers_leads_when_the_other_is_gone() -> None:
    low = follower(1)
    state(low, Standing(2), 0.5)
    assert not low.handle(Wake(), 1.0)
    assert low.handle(Wake(), 2.0)[0].is_own


def test_a_follower_leads_a_lease_after_the_last_statement() -> None:
    one = follower()
    assert state(one, Standing(9, 3, True), 0.5)
    assert not state(one, Standing(9, 3, True), 1.4)
    assert not wake(one, 1.5) and wake(one, 2.4)
    assert one.standing == Standing(1, 4, True)


def test_a_follower_that_was_stopped_reads_before_it_leads() -> None:
    """What the leader stated meanwhile lies unread in its sockets."""
    one = follower()
    state(one, Standing(9, 3, True), 0.5)
    assert not wake(one, 4.0) and one.deadline() == 4.5
    assert not state(one, Standing(9, 3, True), 4.1)
    assert not wake(one, 4.5) and one.deadline() == 5.1


def test_a_follower_that_was_stopped_leads_when_nothing_was_unread() -> None:
    one = follower()
    state(one, Standing(9, 3, True), 0.5)
    assert not wake(one, 4.0)
    assert wake(one, 9.0), "it waits once, however late it wakes again"
    assert one.standing == Standing(1, 4, True)


def test_a_restarted_leader_follows() -> None:
    """It has another id and no term: the follower has what its predecessor knew."""
    one = follower(1)
    state(one, Standing(9, 3, True), 0.5)
    assert not state(one, Standing(99, 0, False), 0.9)
    assert wake(one, 1.5)
    restarted = follower(99, 0.9)
    assert state(restarted, one.standing, 1.6)
    assert restarted.leader == 1 and not restarted.standing.is_leader


def test_of_two_leaders_the_higher_term_stays() -> None:
    old, new = ConductorLeadership(9, LEASE_S, 0.0, is_alone=True), follower(1)
    state(new, old.standing, 0.0)
    assert wake(new, 1.0)
    assert not state(new, old.standing, 1.1), "a statement of an earlier term"
    assert state(old, new.standing, 1.2)
    assert (old.standing, old.leader) == (Standing(9, 2), 1)


def test_of_two_leaders_of_one_term_the_higher_id_stays() -> None:
    low, high = (ConductorLeadership(n, LEASE_S, 0.0, is_alone=True) for n in (1, 2))
    assert not state(high, low.standing, 0.1)
    assert state(low, high.standing, 0.1)


def test_its_own_statement_changes_nothing() -> None:
    alone = ConductorLeadership(7, LEASE_S, 0.0, is_alone=True)
    assert not state(alone, Standing(7, 5, True), 0.1)
    assert alone.standing.term == 1


def test_a_term_stays_a_number_that_a_message_can_hold() -> None:
    one, other = follower(1), follower(2)
    assert state(one, Standing(9, MAX_TERM, True), 0.5) and wake(one, 1.5)
    assert one.standing == Standing(1, MAX_TERM, True)
    assert state(other, one.standing, 1.6) and wake(other, 2.6), "the terms are equal: the higher id leads"
    assert state(one, other.standing, 2.7) and one.leader == 2


@pytest.mark.parametrize("term", [-1, MAX_TERM + 1, (1 << 64) - 1])
def test_a_term_that_could_not_grow_is_not_received(term: int) -> None:
    message = msgspec.msgpack.encode(Replicate(Standing(5, term, True), 1, []))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(message, type=Replicate)


@pytest.mark.parametrize("seed", range(20))
def test_conductors_agree_when_the_network_is_whole(seed: int) -> None:
    """Three conductors, statements lost at random, then none lost: one leader, known to all."""
    random = Random(seed)
    all_of_them = [follower(number, random.random()) for number in range(1, 4)]
    for step in range(400):
        now = 1.0 + step / 4
        for sender in all_of_them:
            for receiver in all_of_them:
                if step > 200 or random.random() < 0.4:
                    state(receiver, sender.standing, now)
        for one in all_of_them:
            deadline = one.deadline()
            if deadline is not None and deadline <= now:
                one.handle(Wake(), now)
                one.check()
    assert len({one.leader for one in all_of_them}) == 1, f"seed {seed}"
    assert sum(one.standing.is_leader for one in all_of_them) == 1, f"seed {seed}"
    assert len({one.standing.term for one in all_of_them}) == 1, f"seed {seed}"
