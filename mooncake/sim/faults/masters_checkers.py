# SPDX-License-Identifier: Apache-2.0
"""Invariants of several masters, besides those of ``invariants.py``.

* **One acts**: at no instant two masters would answer, and no answer leaves one after another began to lead.
* **A prefix**: what a standby in sync knows after number N is what the leader knew then, and all space that
  the leader then held for a client is held by it too, for as long as the leader holds it.
* **No acknowledged loss**: a leader that claims to have everything has the state of some instant not before
  the last on which an answer was given; a process whose machine lost the end of its log is excused only where
  no other master was listed, as documented.
* **Ids grow**: no leader issues an object id that is not larger than all that were issued before.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake.sim.faults.cluster_faults import MastersFaults
from mooncake.sim.faults.invariants import Checkers, Invariant, Violation
from mooncake.store.ha.standby_replication import Followed, StandbyCursor
from mooncake.store.master.log_records import Record
from mooncake.store.master.master import Master
from mooncake.store.master.objects import ObjectState, StoredObject
from mooncake.types import Tier

if TYPE_CHECKING:
    from mooncake.sim.faults.masters_host import MasterHost
    from mooncake.sim.faults.masters_run import MastersCluster

State: TypeAlias = dict[str, Any]
"""What a master knows and its successor must know too, under readable names."""

Space: TypeAlias = dict[tuple[str, int], tuple[StoredObject, float]]
"""(segment, offset) -> its holder, and until when the space is quarantined."""

MAX_STATES = 2000


def state_of(master: Master) -> State:
    """Everything that was logged; what is never logged (leases, liveness) is left out."""
    catalog = master.catalog
    state: State = {"line": catalog.segments.line}
    for segment in catalog.segments.mounted.values():
        state[f"segment {segment.name}"] = segment.epoch, segment.address, segment.content_id
    for key, stored in catalog.objects.readable.items():
        state[f"object {key}"] = _facts(stored)
    for tenant, before in catalog.cleared.items():
        state[f"cleared {tenant}"] = before
    for tenant, account in catalog.tenants.accounts.items():
        if account.status().quota_bytes is not None:
            state[f"quota {tenant}"] = account.status().quota_bytes
    return state


def _facts(stored: StoredObject) -> tuple[object, ...]:
    """The acknowledged facts of an object: while a durable one is not durable yet, those of what it
    replaces."""
    before = stored.before
    if before is not None and before.kept is not None:
        kept = before.kept
        places = sorted((extent.segment.name, extent.offset) for extent in before.extents)
        shape = kept.size_bytes, kept.is_hard_pinned, kept.group, kept.parent
        return before.object_id, tuple(places), *shape, kept.num_replicas, kept.is_durable
    places = sorted((extent.segment.name, extent.offset) for extent in stored.complete())
    shape = stored.size_bytes, stored.is_hard_pinned, stored.group, stored.parent
    policy = stored.policy
    return stored.object_id, tuple(places), *shape, policy.num_replicas, policy.is_durable


def difference(one: State, other: State) -> str:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return "; ".join(f"{name}: {one.get(name)} and not {other.get(name)}" for name in names[:4])


class MastersCheckers(Checkers):
    """The checkers of one master, which are notified when another one leads."""

    def __init__(self, world: MastersCluster) -> None:
        super().__init__(world)
        if world.faults_of_masters != MastersFaults():
            # Faults of masters are not among those that these checkers know.
            self._faults = dataclasses.replace(self._faults, crash_master_every_s=1.0)

    def took_over(self, master: Master, is_complete: bool, before: Master | None) -> None:
        """Follow objects and space from what the new leader has."""
        self._life += 1
        self._mounted = {}
        self._stepped_at = self._cluster.kernel.now
        if is_complete:
            for key, object_id in self._readable.items():
                stored = master.objects.readable.get(key)
                if stored is None or (stored.before or stored).object_id != object_id:
                    self._went[object_id] = self._stepped_at
            self._readable = {
                key: (stored.before or stored).object_id for key, stored in master.objects.readable.items()
            }
            self._mounted = {
                one.node: one for one in master.segments.mounted.values() if one.tier is Tier.MEMORY
            }
            return
        if before is not None:
            self._find_resurrected(before)
        self._readable = {}
        self.history.index_lost()

    def forget_promises(self) -> None:
        """Records of granted space were lost with the end of a log that no other master has."""
        self._promises = []

    def _find_resurrected(self, before: Master) -> None:
        """Find removed objects that are still in the journals of nodes: the nodes bring them back."""
        for node in self._cluster.nodes.values():
            for segment in node.segments.values():
                for entry in segment.entries():
                    stored = before.objects.readable.get(entry.key)
                    if stored is None or stored.object_id != entry.object_id:
                        self._ghosts[entry.object_id] = entry.key


class ReplicationChecker:
    """What the leader of each term logged and acknowledged, and whether its standbys have it."""

    def __init__(self, world: MastersCluster) -> None:
        self._world = world
        self._leader: MasterHost | None = None
        self._states: dict[int, State] = {}
        """Snapshots of the leader's term, by number; none before the last one on which an answer was
        given."""
        self._spaces: dict[int, Space] = {}
        self._possible: list[State] = [{}]
        """With any of these states the next leader is complete."""
        self._rested: dict[tuple[str, int], float] = {}
        """Space that was quarantined when the term began -> until when. How long the predecessors' promises
        last is an estimate, and a standby's may be better."""
        self._last_id = 0
        self.has_begun = False

    # Events

    def led(self, host: MasterHost, is_complete: bool) -> None:
        state = state_of(host.master)
        last_id = host.master.objects.last_id
        if last_id < self._last_id:
            what = f"{host.name} issues ids from {last_id}, but {self._last_id} was issued"
            raise Violation(what, Invariant.IDS)
        self._last_id = last_id
        if is_complete and self.has_begun and state not in self._possible:
            shown = difference(state, self._possible[0])
            what = f"{host.name} leads without what was acknowledged: {shown}"
            raise Violation(what, Invariant.SUCCESSION)
        self.has_begun = True
        self._leader = host
        self._possible = [state] if not is_complete else [*self._possible, state]
        self._rested = {
            (segment.name, extent.offset): extent.release_at
            for segment in host.master.segments.mounted.values()
            for stored in segment.holders.values()
            for extent in stored.resting
            if extent.segment is segment
        }
        number = host.role.followers.number if host.role.followers is not None else 0
        self._states, self._spaces = {number: state}, {number: _space(host)}

    def log_end_lost(self) -> None:
        """What was acknowledged is nowhere; the documentation promises no more."""
        self.has_begun = False

    def may_begin_with(self, successor: Master) -> None:
        """Some records of the last event were logged, and others not: no answer depended on any of them."""
        self._possible.append(state_of(successor))

    def logged(self, host: MasterHost, records: list[Record]) -> None:
        self._last_id = max(self._last_id, host.master.objects.last_id)
        if host is not self._leader or host.role.followers is None:
            return
        number = host.role.followers.number
        self._states[number] = state_of(host.master)
        self._spaces[number] = _space(host)
        self._possible.append(self._states[number])
        for states in (self._states, self._spaces):
            if len(states) > MAX_STATES:
                del states[next(iter(states))]

    def acknowledged(self, host: MasterHost, number: int) -> None:
        """An answer that depends on all records up to ``number`` leaves the leader."""
        if host is not self._leader:
            leader = self._leader.name if self._leader is not None else "no master"
            what = f"{host.name} answers although {leader} has begun to lead"
            raise Violation(what, Invariant.LEADER)
        self._possible = [state for at, state in self._states.items() if at >= number]

    def applied(self, host: MasterHost, following: StandbyCursor, answer: Followed) -> None:
        leader = self._leader
        if not following.is_in_sync or leader is None or leader.role.followers is None:
            return
        if leader.election.term != following.question().term or answer.number not in self._states:
            return
        has, should = state_of(host.master), self._states[answer.number]
        if has != should:
            shown = difference(has, should)
            what = f"{host.name} differs from {leader.name} at {answer.number}: {shown}"
            raise Violation(what, Invariant.PREFIX)
        free = _not_held(host.master, leader, self._spaces[answer.number], self._rested)
        if free is not None:
            what = f"{host.name} holds no space at {free}, which {leader.name} has allocated"
            raise Violation(what, Invariant.HELD)

    def check_leaders(self) -> None:
        acting = [host for host in self._world.hosts.values() if host.acts]
        if len(acting) > 1:
            raise Violation(f"two masters act: {[host.name for host in acting]}", Invariant.LEADER)


def _space(host: MasterHost) -> Space:
    """The allocated space of all segments."""
    return {
        (segment.name, offset): (stored, _rests_until(stored, segment.name, offset))
        for segment in host.master.segments.mounted.values()
        for offset, stored in segment.holders.items()
    }


def _rests_until(stored: StoredObject, name: str, offset: int) -> float:
    """The end of the quarantine, or of the time in which a writer may write; infinite for a readable replica.
    A leader that was paused has not come to release what is over."""
    if stored.state is ObjectState.WRITING:
        until = [one.held_until for one in stored.extents if (one.segment.name, one.offset) == (name, offset)]
        return next(iter(until), math.inf)
    return next(
        (one.release_at for one in stored.resting if (one.segment.name, one.offset) == (name, offset)),
        math.inf,
    )


def _not_held(
    master: Master, leader: MasterHost, then: Space, rested: dict[tuple[str, int], float]
) -> str | None:
    """Return a place that the leader held then, for longer than until now, and holds still; this master does
    not.

    Space that was quarantined when the term began covers promises of predecessors, whose length is an
    estimate.
    """
    now = leader.process.now
    for (name, offset), (stored, until) in then.items():
        segment = leader.master.segments.mounted.get(name)
        own = master.segments.mounted.get(name)
        if segment is None or own is None or segment.holders.get(offset) is not stored:
            continue
        if offset in own.allocator.allocations or until <= now or until == rested.get((name, offset)):
            continue
        if _rests_until(stored, name, offset) <= now:
            continue
        if not any(start <= offset < start + taken for start, taken in own.allocator.allocations.items()):
            return f"{offset} of {name} ({stored})"
    return None
