# SPDX-License-Identifier: Apache-2.0
"""Masters that elect a leader, under one seed: clocks of different speeds, late answers, pauses.

* At most one of them acts, at every instant.
* A new leader has every number that was acknowledged (or declares that it begins with nothing).
* After everything has healed, one of them leads.

A master's state is the least that can be lost: numbers. A leader acknowledges a number when every possible
next leader has it. The record that is changed by compare-and-set answers late, applies a request without
answering, or is unreachable.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mooncake.machine import Wake
from mooncake.sim.faults.invariants import Invariant, Violation
from mooncake.sim.kernel import Kernel, Process, SimClock
from mooncake.store.ha.election import (
    MARGIN,
    CompareAndSet,
    CompareAndSetDone,
    Effect,
    Election,
    Event,
    InSync,
    Lead,
    LeaseRead,
    NoAnswer,
    ReadLease,
    Resign,
    Standby,
    StepDown,
)

LEASES_S = (1.0, 2.0, 4.0)
"""Masters may have different settings while settings are being changed."""
ORPHAN_S = 6.0
ROUGH_S, CALM_S = 60.0, 30.0
STEP_S = 0.02


class SimVoter:
    """A master's election, over its incarnations."""

    def __init__(self, run: ElectionRun, name: str, has_log: bool, lease_s: float) -> None:
        self.run, self.kernel, self.name, self.has_log = run, run.kernel, name, has_log
        self.lease_s = lease_s
        self.patience_s = lease_s / 4
        """Timeout of a request to the record."""
        self.log = 0
        self.taken_in = 0
        """Term of the leader from which that was copied."""
        self.num_lives = 0
        self.stopped_until = -math.inf
        self.start()

    def start(self) -> None:
        random = self.kernel.random
        self.num_lives += 1
        rate = random.uniform(1 - MARGIN / 2, 1 + MARGIN / 2)
        self.process = Process(self.kernel, self.name, SimClock(random.uniform(0, 1000), rate))
        if not self.has_log:
            self.log = 0
        self.election = Election(
            Standby(self.name if self.has_log else f"{self.name}#{self.num_lives}", self.name),
            self.lease_s,
            ORPHAN_S,
            has_log=self.has_log,
            has_state=self.has_log and self.log > 0,
            keeps_records=True,
        )
        self.followers: dict[str, int] = {}
        """Id of each standby that has reported -> what it has."""
        self.listed: dict[str, Standby] = {}
        self._number = 0
        self.post(Wake())

    @property
    def is_paused(self) -> bool:
        return self.kernel.now < self.stopped_until

    @property
    def acts(self) -> bool:
        is_there = self.process.is_alive and not self.is_paused
        return is_there and self.election.leads(self.process.now)

    def post(self, event: Event | Wake) -> None:
        for effect in self.election.handle(event, self.process.now):
            self._perform(effect)
        self.election.check()
        self._number += 1
        deadline = self.election.deadline()
        if deadline is not None:
            number, wait_s = self._number, self.process.clock.true_s(deadline - self.process.now)
            self.later(wait_s, lambda: self.post(Wake()) if number == self._number else None)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan ``action`` for this incarnation; a pause postpones it."""
        process = self.process

        def due() -> None:
            if not process.is_alive:
                return
            if self.is_paused:
                self.kernel.after(self.stopped_until - self.kernel.now, due)
            else:
                action()

        self.kernel.after(delay_s, due)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, ReadLease | CompareAndSet):
            self._ask(effect)
        elif isinstance(effect, Lead):
            self.run.counts["terms"] += 1
            self.kernel.trace_line(f"{self.name} leads, complete: {effect.is_complete}, has {self.log}")
            if not effect.is_complete:
                self.log = self.run.acknowledged = 0  # the nodes, which are not simulated here, report it
            elif self.log < self.run.acknowledged:
                what = f"{self.name} leads with {self.log} of {self.run.acknowledged}"
                raise Violation(what, Invariant.SUCCESSION)
            assert self.election.record is not None
            self.followers, self.listed = {}, {one.id: one for one in self.election.record.standbys}
        elif isinstance(effect, StepDown):
            self.kernel.trace_line(f"{self.name} steps down: {effect.reason}")

    def _ask(self, effect: ReadLease | CompareAndSet) -> None:
        """The request reaches the record after a delay, or never; likewise the answer."""
        random, rough = self.kernel.random, self.run.is_rough
        arrives_s = (
            random.uniform(0, 4)
            if rough and random.random() < self.run.late_chance
            else random.expovariate(20)
        )
        answers_s = arrives_s + random.expovariate(20)
        answer: list[Event] = []

        def happens() -> None:
            if isinstance(effect, ReadLease):
                answer.append(LeaseRead(self.run.record))
                return
            answer.append(CompareAndSetDone(self.run.record == effect.old))
            if self.run.record == effect.old:
                self.run.record = effect.new

        if not rough or random.random() < 0.97:
            self.kernel.after(arrives_s, happens)
        is_answered = answers_s < self.patience_s and not (rough and random.random() < 0.05)
        wait_s = answers_s + 1e-6 if is_answered else self.patience_s
        self.later(wait_s, lambda: self.post(answer[0] if is_answered and answer else NoAnswer("no answer")))

    # A master's work

    def acknowledge(self) -> None:
        """Take a number at random times; acknowledge the greatest that every possible next leader has."""
        self.log += self.kernel.chance(0.2)
        others = [one for one in self.election.eligible() if one != self.election.me.id]
        have = min([self.log, *(self.followers.get(one, -1) for one in others)])
        self.run.counts["acknowledged"] += max(0, have - self.run.acknowledged)
        self.run.acknowledged = max(self.run.acknowledged, have)

    def follow(self) -> None:
        """Catch up with the leader, and report to it how far this one is."""
        record = self.election.record
        leader = self.run.voters.get(record.address) if record is not None else None
        if record is None or leader is None or leader is self or not leader.election.is_leading:
            return
        if not leader.process.is_alive or leader.election.term != record.term:
            return
        taken, me, number, term = leader.log, self.election.me, self.log, record.term

        def reported() -> None:
            if leader.election.is_leading and leader.election.term == term:
                leader.followers[me.id] = max(number, leader.followers.get(me.id, 0))
                if leader.followers[me.id] >= self.run.acknowledged:
                    leader.listed[me.id] = me
                leader.post(InSync(tuple(leader.listed.values())))

        def takes() -> None:
            nonlocal number
            known = self.election.record
            if self.election.is_leading or known is None or known.term != term:
                return
            is_later = self.taken_in == term and self.log > taken
            self.log = number = self.log if is_later else taken
            self.taken_in = term
            leader.later(self.kernel.random.expovariate(10), reported)

        self.later(self.kernel.random.expovariate(10), takes)

    def strike(self) -> None:
        """A standby is no longer reachable."""
        gone = self.kernel.random.choice(list(self.followers))
        del self.followers[gone]
        self.listed.pop(gone, None)
        self.post(InSync(tuple(self.listed.values())))


class ElectionRun:
    """Prepare with a seed, then ``run()``."""

    def __init__(self, seed: int) -> None:
        self.kernel = Kernel(seed)
        self.counts: dict[str, int] = {"terms": 0, "acknowledged": 0, "kills": 0, "resignations": 0}
        self.record: bytes | None = None
        self.acknowledged = 0
        self.is_rough = True
        self.voters: dict[str, SimVoter] = {}
        self.late_chance = self.kernel.random.choice((0.1, 0.3))
        """Delay in seconds of a request to the record."""
        lease_s = self.kernel.random.choice(LEASES_S)
        for number in range(self.kernel.random.randint(2, 4)):
            name = f"master{number}"
            if self.kernel.chance(0.3):
                lease_s = self.kernel.random.choice(LEASES_S)
            self.voters[name] = SimVoter(self, name, self.kernel.chance(0.7), lease_s)

    def run(self) -> None:
        """Raises Violation, with the seed in its message."""
        try:
            for _ in range(int(ROUGH_S / STEP_S)):
                self._something()
                self._step()
            self.is_rough = False
            for voter in self.voters.values():
                if not voter.process.is_alive:
                    voter.start()
            for _ in range(int(CALM_S / STEP_S)):
                self.kernel.random.choice(list(self.voters.values())).follow()
                self._step()
            # Answers still take random times, so that a short lease may have ended a moment ago.
            for _ in range(int(CALM_S / STEP_S)):
                if any(voter.acts for voter in self.voters.values()):
                    return
                self._step()
            raise Violation("no master leads although everything has healed", Invariant.HEALTH)
        except Exception as error:
            raise Violation.of_run(error, self.kernel, num_lines=20) from error

    def _step(self) -> None:
        """Check at every instant at which something may change, and in between."""
        until = self.kernel.now + STEP_S
        while self.kernel.now < until:
            self.kernel.run_one(until)
            acting = [voter for voter in self.voters.values() if voter.acts]
            if len(acting) > 1:
                what = f"two leaders act: {[voter.name for voter in acting]}"
                raise Violation(what, Invariant.LEADER)
            for voter in acting:
                voter.acknowledge()

    def _something(self) -> None:
        random, kernel = self.kernel.random, self.kernel
        if random.random() > 0.4:
            return
        voter = random.choice(list(self.voters.values()))
        if not voter.process.is_alive:
            return
        choice = random.random()
        if choice < 0.02:
            self._kill(voter)
        elif choice < 0.03 and voter.acts:
            self.counts["resignations"] += 1
            kernel.trace_line(f"{voter.name} resigns")
            voter.post(Resign())
            process = voter.process
            kernel.after(random.uniform(0.1, 3.0), lambda: self._kill(voter) if process.is_alive else None)
        elif choice < 0.05:
            stops_s = random.uniform(0.5, 4.0)
            voter.stopped_until = kernel.now + stops_s
            kernel.after(stops_s, lambda: None)  # when it continues, it may answer before its timers fire
            kernel.trace_line(f"{voter.name} is paused until {voter.stopped_until:.3f}")
        elif choice < 0.3 and voter.election.is_leading and voter.followers:
            voter.strike()
        else:
            voter.follow()

    def _kill(self, voter: SimVoter) -> None:
        self.counts["kills"] += 1
        voter.process.crash()

        def again() -> None:
            if not voter.process.is_alive:
                voter.start()

        self.kernel.after(self.kernel.random.uniform(0.1, 6.0), again)
