# SPDX-License-Identifier: Apache-2.0
"""What clients were promised about keys, and whether the store keeps to it.

A key is known only while it is not being changed: a change (put, replace, remove) that overlaps another, has
no clear answer or was sent twice leaves it unknown until a clear one. Then:

* **No phantom**: after an acknowledged removal the key is not read until a put of it begins.
* **No stale value**: after an acknowledged put of a key that was absent, or an acknowledged replacement,
  no other value is read.
* **No acknowledged loss**: what was put is there at the end, if it is on SSD (durable) or a node that has had
  it in memory is still alive, and the master has not evicted it. So a replica is lost with its node, and no
  other. A disk that lies deceives the master, too: what it evicted from memory because of a copy on SSD is no
  longer promised after a power loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mooncake.errors import Refusal
from mooncake.sim.faults.invariants import Invariant
from mooncake.store.master.catalog_events import ReplicaCompleted, ReplicaRemoved
from mooncake.types import Tier

if TYPE_CHECKING:
    from mooncake.sim.faults.clients import SimClient
    from mooncake.sim.faults.store_cluster import StoreCluster

LATE_S = 15.0
"""How long a request whose answer was lost may stay in the network before it takes effect."""


SLOW_S = 45.0
"""The same where the master may be paused, or so busy that it handles the request late."""


@dataclasses.dataclass(eq=False)
class KnownKey:
    """What is known of one key."""

    num_open: int = 0
    """Number of changes that are under way."""
    generation: int = 0
    """Number of changes that began."""
    unclear_until: float = 0.0
    has_vanished: bool = False
    """Whether the master has dropped it since the last change began."""
    is_absent: bool = True
    is_present: bool = False
    value: bytes | None = None
    """The value that must be read; None: not known."""
    is_durable: bool = False
    nodes: dict[str, None] = dataclasses.field(default_factory=dict)
    """Nodes that have it in memory, or had until it was evicted there because it is on SSD."""
    spared: dict[str, None] = dataclasses.field(default_factory=dict)
    """Those of them that evicted it."""

    def forget(self) -> None:
        self.is_absent = self.is_present = self.is_durable = False
        self.value = None
        self.nodes, self.spared = {}, {}

    def doubt_ssds(self) -> None:
        self.is_durable = False
        for name in self.spared:
            self.nodes.pop(name, None)


@dataclasses.dataclass(eq=False)
class KeyChange:
    """A change that began."""

    client: SimClient
    was_alone: dict[str, bool]
    was_absent: dict[str, bool]
    generations: dict[str, int]
    num_repeated: int


@dataclasses.dataclass(eq=False)
class KeyRead:
    """A read that began: what was known at that time, by key."""

    generations: dict[str, int]
    absent: dict[str, None]
    values: dict[str, bytes]


class HistoryChecker:
    def __init__(self, cluster: StoreCluster) -> None:
        self._cluster = cluster
        self._keys: dict[str, KnownKey] = {}
        self._open: dict[KeyChange, None] = {}
        self._doubts_ssds = False
        """What is believed to be on an SSD may not be: a disk lied, and has lost its power."""

    def of(self, key: str) -> KnownKey:
        return self._keys.setdefault(key, KnownKey())

    # Changes

    def begin(self, client: SimClient, keys: Iterable[str]) -> KeyChange:
        change = KeyChange(client, {}, {}, {}, client.operations.counts.repeated_requests)
        for key in keys:
            known = self.of(key)
            change.was_alone[key] = not known.num_open
            change.was_absent[key] = known.is_absent
            known.num_open += 1
            known.generation += 1
            known.has_vanished = False
            change.generations[key] = known.generation
            known.forget()
        self._open[change] = None
        return change

    def failed(self, change: KeyChange) -> None:
        """The change may have happened, or may still happen."""
        self._open.pop(change, None)
        held_s = self._cluster.network.held_s(change.client.name, self._cluster.leader)
        for key in change.generations:
            known = self.of(key)
            known.num_open -= 1
            self._unclear(known, held_s)

    def client_crashed(self, client: SimClient) -> None:
        """The changes that it had begun have no answer."""
        for change in [one for one in self._open if one.client is client]:
            self.failed(change)

    def _unclear(self, known: KnownKey, held_s: float = 0.0) -> None:
        late_s = SLOW_S if self._cluster.checkers.is_slow_to_answer else LATE_S
        known.unclear_until = max(known.unclear_until, self._cluster.kernel.now + held_s + late_s)

    def ended(self, change: KeyChange) -> None:
        """The change has ended, and its result is unknown."""
        for key in change.generations:
            self._ended(change, key)

    def matching_removed(self, change: KeyChange, is_all: bool) -> None:
        """Everything found under these keys is removed; ``is_all``: including what is on a node that is
        away."""
        for key in change.generations:
            known = self._ended(change, key)
            if known is not None:
                known.is_absent = is_all or change.was_absent[key]

    def _ended(self, change: KeyChange, key: str) -> KnownKey | None:
        """Update what is known of the key, if this change was alone and its answer is clear."""
        known = self.of(key)
        self._open.pop(change, None)
        known.num_open -= 1
        if change.client.operations.counts.repeated_requests != change.num_repeated:
            self._unclear(known)
        is_alone = known.generation == change.generations[key] and not known.num_open
        is_clear = known.unclear_until <= self._cluster.kernel.now
        return known if is_alone and change.was_alone[key] and is_clear else None

    def removed(self, change: KeyChange, key: str, outcome: bool | Refusal) -> None:
        known = self._ended(change, key)
        if known is not None and isinstance(outcome, bool):
            # False: none was found; one on a node that is away may come back with it.
            known.is_absent = outcome or change.was_absent[key]

    def put(
        self,
        change: KeyChange,
        key: str,
        value: bytes,
        outcome: Refusal | None,
        is_durable: bool,
        replace: bool,
    ) -> None:
        known = self._ended(change, key)
        if outcome is not None:  # its reservation may last for a while, and other writers are made to wait
            self._unclear(self.of(key))
        if known is None or outcome is not None or known.has_vanished:
            return
        if change.was_absent[key] or replace:
            known.value, known.is_durable = value, is_durable
        stored = self._cluster.master.master.objects.readable.get(key)
        if stored is not None:
            known.nodes = {
                extent.segment.node: None
                for extent in stored.complete(Tier.MEMORY)
                if extent.segment.is_alive
            }
        known.is_present = known.is_durable or bool(known.nodes)

    # Events that end promises

    def dropped(self, key: str, reason: str) -> list[str]:
        """The master has dropped it, with a reason. Returns the nodes that had it in memory and are alive."""
        known = self.of(key)
        left: list[str] = []
        if reason.startswith(("evicted", "removed", "replaced")) or "wrong" in reason:
            known.forget()
            known.has_vanished = True
        else:
            left = [name for name in known.nodes if name not in known.spared]
            known.is_present &= known.is_durable
        known.nodes, known.spared = {}, {}
        return left

    def unmounted(self, name: str) -> None:
        """The master has forgotten that node's memory: the node died, or was silent for too long."""
        for known in self._keys.values():
            if known.nodes.pop(name, "") is None:
                known.is_present &= known.is_durable or bool(known.nodes)

    def node_crashed(self, name: str, has_lost_power: bool) -> None:
        has_lied = has_lost_power and self._cluster.checkers.has_lying_disks
        self._doubts_ssds |= has_lied
        for known in self._keys.values():
            known.nodes.pop(name, None)
            if has_lied:
                known.doubt_ssds()
            known.is_present &= known.is_durable or bool(known.nodes)

    def replica_completed(self, event: ReplicaCompleted) -> None:
        if event.extent.segment.tier is Tier.MEMORY:
            self.copied(event.stored.key, event.extent.segment.node)

    def replica_removed(self, event: ReplicaRemoved) -> None:
        stored, segment = event.stored, event.extent.segment
        if segment.tier is not Tier.MEMORY:
            return
        if event.is_evicted and stored.is_readable:
            self.evicted(stored.key, segment.node, bool(stored.complete(Tier.SSD)))
        elif event.is_moved:
            self.moved(stored.key, segment.node)

    def copied(self, key: str, node: str) -> None:
        """The master has an additional replica of it, in that node's memory."""
        known = self.of(key)
        if known.is_present and not known.num_open:
            known.nodes[node] = None
            known.spared.pop(node, None)

    def moved(self, key: str, node: str) -> None:
        """It left a node's memory: other nodes have it, and the node was drained or the object is no longer
        hot."""
        known = self.of(key)
        known.nodes.pop(node, None)
        known.spared.pop(node, None)
        known.is_present &= known.is_durable or bool(known.nodes)

    def evicted(self, key: str, node: str, is_on_ssd: bool = True) -> None:
        """It was evicted from a node's memory, and the master assumes that it is readable elsewhere."""
        known = self.of(key)
        if not is_on_ssd:
            self.moved(key, node)
            return
        if node in known.nodes:
            known.spared[node] = None
        if self._doubts_ssds:
            known.nodes.pop(node, None)
            known.is_present &= known.is_durable or bool(known.nodes)

    def master_crashed(self) -> None:
        """Without a log, the nodes' journals count; and the nodes learn of changes a moment later."""
        if not self._cluster.checkers.has_oplog:
            self.index_lost()

    def index_lost(self) -> None:
        """Another master begins with the nodes' journals."""
        for known in self._keys.values():
            known.is_absent, known.nodes, known.value = False, {}, None
            known.is_present &= known.is_durable

    # Reads

    def begin_read(self, keys: Iterable[str]) -> KeyRead:
        known = {key: self.of(key) for key in keys}
        return KeyRead(
            {key: one.generation for key, one in known.items()},
            {key: None for key, one in known.items() if one.is_absent and not one.num_open},
            {key: one.value for key, one in known.items() if one.value is not None},
        )

    def why_wrong(self, look: KeyRead, key: str, value: bytes) -> tuple[Invariant, str] | None:
        """Why ``value`` can't be a correct read, if the key has not been changed since ``look``; None if it
        can."""
        known = self.of(key)
        if known.generation != look.generations[key]:
            return None
        if key in look.absent and known.is_absent:
            return Invariant.PHANTOM, f"a phantom: {key!r} was read, after it was removed"
        if key in look.values and known.value == look.values[key] != value:
            return Invariant.STALE, f"a stale value: {key!r} was read as it was before its last put"
        return None

    def promised(self) -> dict[str, bytes | None]:
        """Keys that must be readable, with the value where it is known."""
        return {key: known.value for key, known in self._keys.items() if known.is_present}
