"""Who leads, with clocks that run at different speeds, messages that are late, and masters that stand still.

The world here is small enough to be driven by one heap: a record that is changed by compare-and-set, and
masters that acknowledge numbers once every eligible standby has them. What must hold at every instant: one of
them acts at most, and whoever leads has every number that was acknowledged.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

import pytest

from mooncake.machine import Wake
from mooncake.store.election import (
    MARGIN,
    Effect,
    Election,
    Failed,
    Heard,
    InSync,
    Lead,
    LeaderLost,
    Look,
    Mandate,
    Resign,
    Resigned,
    Seen,
    Standby,
    StepDown,
    Swap,
    Swapped,
    decode,
)
from mooncake.store.election import Event as ElectionEvent

LEASE_S, ORPHAN_S = 2.0, 6.0


class World:
    """Time, and the record."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.record: bytes | None = None
        self.acknowledged = 0
        self.num_leaders = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.masters: list[OneMaster] = []
        self.lines: list[str] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), action))

    def tell(self, line: str) -> None:
        self.lines.append(f"{self.now:.3f} {line}")

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            acting = [one for one in self.masters if one.acts]
            assert len(acting) <= 1, f"two leaders: {acting}"
            for one in acting:
                one.acknowledge()
        self.now = until

    def swap(self, old: bytes | None, new: bytes) -> bool:
        if self.record != old:
            return False
        self.record = new
        return True


class OneMaster:
    """A master's election, and of its work the least that can be lost: numbers that it has."""

    def __init__(self, world: World, name: str, *, has_log: bool) -> None:
        self.world, self.name, self.has_log = world, name, has_log
        self.rate = world.random.uniform(1 - MARGIN / 2, 1 + MARGIN / 2)
        self.log = 0
        self.taken_in = 0
        """The term whose leader it has that from."""
        self.life = 0
        self.stopped_until = 0.0
        world.masters.append(self)
        self.start()

    def start(self) -> None:
        self.life += 1
        self.is_alive = True
        if not self.has_log:
            self.log = 0
        me = Standby(f"{self.name}" if self.has_log else f"{self.name}#{self.life}", self.name)
        self.election = Election(
            me,
            LEASE_S,
            ORPHAN_S,
            has_log=self.has_log,
            has_state=self.has_log and self.log > 0,
            keeps_records=True,
        )
        self.followers: dict[str, int] = {}
        """Id of each standby that has said so -> what it has."""
        self.listed: dict[str, Standby] = {}
        self._timer = 0
        self.post(Wake())

    def kill(self) -> None:
        self.is_alive = False
        self.life += 1
        self.world.tell(f"{self.name} is killed")

    @property
    def clock(self) -> float:
        return self.world.now * self.rate + 100.0

    @property
    def acts(self) -> bool:
        return self.is_alive and self.world.now >= self.stopped_until and self.election.leads(self.clock)

    def post(self, event: ElectionEvent | Wake) -> None:
        for effect in self.election.handle(event, self.clock):
            self._perform(effect)
        self.election.check()
        self._timer += 1
        deadline = self.election.deadline()
        if deadline is not None:
            number, wait_s = self._timer, max(0.0, (deadline - self.clock) / self.rate)
            self._later(wait_s, lambda: self.post(Wake()) if number == self._timer else None)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """In this life, and not while it stands still."""
        life = self.life

        def due() -> None:
            if life != self.life:
                return
            if self.world.now < self.stopped_until:
                self.world.after(self.stopped_until - self.world.now, due)
            else:
                action()

        self.world.after(delay_s, due)

    def _perform(self, effect: Effect) -> None:
        random, world = self.world.random, self.world
        if isinstance(effect, Look | Swap):
            arrives_s = random.expovariate(20) if random.random() < 0.9 else random.uniform(0, 4)
            answers_s = arrives_s + random.expovariate(20)
            answer: list[ElectionEvent] = []

            def happens() -> None:
                if isinstance(effect, Look):
                    answer.append(Seen(world.record))
                else:
                    answer.append(Swapped(world.swap(effect.old, effect.new)))

            if random.random() < 0.97:
                world.after(arrives_s, happens)
            if answers_s < 0.5 and random.random() < 0.95:
                self._later(answers_s + 1e-6, lambda: self.post(answer[0] if answer else Failed("lost")))
            else:
                self._later(0.5, lambda: self.post(Failed("timed out")))
        elif isinstance(effect, Lead):
            world.num_leaders += 1
            world.tell(f"{self.name} leads, complete: {effect.is_complete}, has {self.log}")
            if effect.is_complete:
                assert self.log >= world.acknowledged, f"{self.name} has {self.log} of {world.acknowledged}"
            else:
                self.log = world.acknowledged = 0  # told by the nodes, which are not here
            assert self.election.record is not None
            self.followers, self.listed = {}, {one.id: one for one in self.election.record.standbys}
        elif isinstance(effect, StepDown):
            world.tell(f"{self.name} steps down: {effect.reason}")

    def acknowledge(self) -> None:
        """It has taken a number; the greatest that all who may lead next have is acknowledged."""
        self.log += self.world.random.random() < 0.2
        have = [self.log]
        for who in self.election.eligible():
            if who != self.election.me.id:
                have.append(self.followers.get(who, -1))
        if min(have) > self.world.acknowledged:
            self.world.acknowledged = min(have)

    def follow(self) -> None:
        """Catch up with whoever says that it leads; it hears how far this one is."""
        leaders = [one for one in self.world.masters if one.is_alive and one.election.is_leading]
        if not self.is_alive or self.election.is_leading or not leaders:
            return
        leader = self.world.random.choice(leaders)
        record = self.election.record
        if record is None or leader.election.me.id != record.leader or leader.election.term != record.term:
            return
        taken, me, number = leader.log, self.election.me, self.log

        def told() -> None:
            if leader.election.is_leading and leader.election.term == record.term:
                leader.followers[me.id] = max(number, leader.followers.get(me.id, 0))
                if leader.followers[me.id] >= self.world.acknowledged:
                    leader.listed[me.id] = me
                leader.post(InSync(tuple(leader.listed.values())))

        def takes() -> None:
            nonlocal number
            known = self.election.record
            if self.election.is_leading or known is None or known.term != record.term:
                return
            is_later = self.taken_in == record.term and self.log > taken
            self.log = number = self.log if is_later else taken
            self.taken_in = record.term
            leader._later(self.world.random.expovariate(10), told)

        self._later(self.world.random.expovariate(10), takes)


def live(world: World, num_masters: int, until: float, *, kill: float, stop: float) -> None:
    """Masters that are killed, stand still, and follow, until ``until``."""
    random = world.random
    for number in range(num_masters):
        OneMaster(world, f"m{number}", has_log=random.random() < 0.7)

    def something() -> None:
        one = random.choice(world.masters)
        if one.is_alive and random.random() < kill:
            one.kill()
            world.after(random.uniform(0.1, 6.0), one.start)
        elif one.acts and random.random() < stop / 2:
            world.tell(f"{one.name} resigns")
            one.post(Resign())
            life = one.life
            world.after(random.uniform(0.1, 3.0), lambda: one.kill() if one.life == life else None)
            world.after(random.uniform(3.1, 6.0), lambda: one.start() if not one.is_alive else None)
        elif one.is_alive and random.random() < stop:
            one.stopped_until = world.now + random.uniform(0.5, 4.0)
            world.tell(f"{one.name} stands still until {one.stopped_until:.3f}")
        elif one.is_alive and one.election.is_leading and one.followers and random.random() < 0.3:
            gone = random.choice(list(one.followers))
            del one.followers[gone]
            one.listed.pop(gone, None)
            one.post(InSync(tuple(one.listed.values())))
        elif one.is_alive:
            one.follow()
        world.after(random.expovariate(20), something)

    something()
    world.run(until)


@pytest.mark.parametrize("seed", range(60))
def test_no_two_lead_and_nothing_acknowledged_is_lost(seed: int) -> None:
    world = World(seed)
    try:
        live(world, world.random.choice([2, 3, 4]), 60.0, kill=0.02, stop=0.02)
    except AssertionError:
        print("\n".join(world.lines))
        raise
    assert world.num_leaders >= 1, f"seed {seed}"


def test_the_worlds_find_takeovers_and_acknowledgements() -> None:
    num_leaders = acknowledged = 0
    for seed in range(20):
        world = World(seed)
        live(world, 3, 60.0, kill=0.02, stop=0.02)
        num_leaders += world.num_leaders
        acknowledged += world.acknowledged
    assert num_leaders > 60 and acknowledged > 1000, (num_leaders, acknowledged)


# One master, one step after the other


A, B, C = Standby("a", "a:1"), Standby("b", "b:1"), Standby("c", "c:1")


class Alone:
    """An election whose record the test holds."""

    def __init__(self, me: Standby, *, has_state: bool = False, keeps_records: bool = True) -> None:
        self.election = Election(
            me, LEASE_S, ORPHAN_S, has_log=has_state, has_state=has_state, keeps_records=keeps_records
        )
        self.now = 10.0
        self.record: Mandate | None = None
        self.done: list[Effect] = []
        self.post(Wake())

    def post(self, event: ElectionEvent | Wake) -> list[Effect]:
        """Effects but for Look and Swap, which happen at once."""
        first = len(self.done)
        effects = self.election.handle(event, self.now)
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Look):
                content = None if self.record is None else self.record.encode()
                effects += self.election.handle(Seen(content), self.now)
            elif isinstance(effect, Swap):
                content = None if self.record is None else self.record.encode()
                if content == effect.old:
                    self.record = decode(effect.new)
                effects += self.election.handle(Swapped(content == effect.old), self.now)
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


def led_by(leader: Standby, *standbys: Standby, term: int = 4, beat: int = 0) -> Mandate:
    return Mandate(leader.id, leader.address, term, beat, LEASE_S, list(standbys))


def test_the_first_of_all_leads_sooner_with_a_log() -> None:
    with_log, without = Alone(A, has_state=True), Alone(B)
    assert with_log.done == [Lead(1, True)]
    assert without.done == [] and without.wait(LEASE_S / 2 - 0.01) == []
    assert without.wait(0.02) == [Lead(1, True)]


def test_where_records_may_be_lost_nobody_is_first_before_a_lease_has_passed() -> None:
    one = Alone(A, has_state=True, keeps_records=False)
    assert one.wait(LEASE_S - 0.01) == []
    assert one.wait(0.02) == [Lead(1, True)]


def follower_of(leader: Standby, *standbys: Standby, me: Standby = B) -> Alone:
    one = Alone(me, keeps_records=True)
    one.record = led_by(leader, *standbys)
    assert one.wait(0.3) == [Heard(one.record)]
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


def test_one_that_is_not_listed_waits_longer_and_begins_with_nothing() -> None:
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
        if any(isinstance(effect, Look | Swap) for effect in effects):
            effects += one.election.handle(Failed("cut off"), one.now)
    assert [type(effect) for effect in effects if isinstance(effect, StepDown)] == [StepDown]
    assert one.now <= renewed_at + LEASE_S * (1 - MARGIN)
    assert one.wait(1.0) == [Lead(2, True)], "nobody else has taken it"


def test_a_leader_that_was_replaced_steps_down() -> None:
    one = Alone(A, has_state=True)
    one.record = led_by(B)
    assert one.wait(LEASE_S) == [StepDown("b:1 leads in term 4"), Heard(led_by(B))]


def test_a_leader_that_resigns_names_its_successor_who_leads_at_once() -> None:
    one = Alone(A, has_state=True)
    one.post(InSync((B, C)))
    assert one.record is not None and one.record.standbys == [B, C]
    assert one.post(Resign()) == [Resigned(B)]
    assert not one.election.leads(one.now) and one.election.deadline() is None
    other = Alone(B)
    other.record = one.record
    other.post(LeaderLost())
    assert other.done == [Heard(one.record), Lead(one.record.term + 1, True)]
    assert other.record is not None and other.record.standbys == [C]


def test_a_leader_without_standbys_resigns_all_the_same() -> None:
    one = Alone(A, has_state=True)
    assert one.post(Resign()) == [Resigned(None)]
    assert Alone(B).post(Resign()) == [Resigned(None)]


def test_a_leader_without_standbys_and_log_leaves_its_place_to_anybody() -> None:
    one = Alone(A)
    assert one.wait(LEASE_S) == [Lead(1, True)]
    assert one.post(Resign()) == [Resigned(None)]
    assert one.record is not None and not one.record.leader
    other = Alone(B)
    other.record = one.record
    assert other.wait(LEASE_S) == [Heard(one.record), Lead(2, False)]


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
    assert isinstance(swap, Swap) and one.election.eligible() == {"b": None, "c": None}
    one.election.handle(Failed("it may have happened"), one.now)
    assert one.election.eligible() == {"b": None, "c": None}
    one.wait(LEASE_S / 2)
    assert one.election.eligible() == {"b": None}


def test_a_record_of_another_kind_is_left_alone() -> None:
    election = Election(A, LEASE_S, ORPHAN_S, has_log=True, has_state=True, keeps_records=True)
    assert election.handle(Wake(), 1.0) == [Look()]
    assert election.handle(Seen(b"something else"), 1.0) == []
    assert election.handle(Wake(), 1.0 + LEASE_S) == [Look()]
    assert "can't be read" in election.story("a:1")[-1]
