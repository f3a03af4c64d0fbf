"""What clients were promised about keys, and whether the store keeps to it.

A key is known only while nobody is changing it: a change (put, replace, remove) that overlaps another, has no
clear answer or was asked twice leaves it unknown until a clear one. Then:

* **No phantom**: after an acknowledged removal nobody reads the key, until somebody begins to put it.
* **No stale value**: after an acknowledged put of a key that was absent, or an acknowledged replacement,
  nobody reads another value.
* **No acknowledged loss**: what was put is there at the end, if it is on SSD (durable) or a node that has had
  it in memory lives on, and the master has not evicted it. So a replica is lost with its node, and no other.
  A disk that lies deceives the master, too: what it evicted from memory because of a copy on SSD is promised
  no more once power was lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mooncake.errors import Refusal
from mooncake.sim.faults.invariants import Invariant
from mooncake.types import Tier

if TYPE_CHECKING:
    from mooncake.sim.faults.clients import SimClient
    from mooncake.sim.faults.store_cluster import StoreCluster

LATE_S = 15.0
"""A question whose answer was lost may be in the network for so long, and take effect then."""


SLOW_S = 45.0
"""The same where the master may be paused, or so busy that it takes long until it looks at it."""


@dataclasses.dataclass(eq=False)
class KnownKey:
    """Of one key."""

    num_open: int = 0
    """Changes that are under way."""
    generation: int = 0
    """Changes that began."""
    unclear_until: float = 0.0
    has_vanished: bool = False
    """The master has dropped it since the last change began."""
    is_absent: bool = True
    is_present: bool = False
    value: bytes | None = None
    """The one that must be read; None: not known."""
    is_durable: bool = False
    nodes: dict[str, None] = dataclasses.field(default_factory=dict)
    """That have it in memory, or had until it was evicted there because it is on SSD."""
    spared: dict[str, None] = dataclasses.field(default_factory=dict)
    """The latter of them."""

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
    """One that began."""

    client: SimClient
    was_alone: dict[str, bool]
    was_absent: dict[str, bool]
    generations: dict[str, int]
    num_repeated: int


@dataclasses.dataclass(eq=False)
class KeyRead:
    """A read that began: what was known then, by key."""

    generations: dict[str, int]
    absent: dict[str, None]
    values: dict[str, bytes]


class HistoryChecker:
    def __init__(self, cluster: StoreCluster) -> None:
        self._cluster = cluster
        self._keys: dict[str, KnownKey] = {}
        self._open: dict[KeyChange, None] = {}
        self._doubts_ssds = False
        """What is said to be there may not be: one of them lied, and has lost its power."""

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
        """It may have happened, and it may still."""
        self._open.pop(change, None)
        held_s = self._cluster.network.held_s(change.client.name, self._cluster.leader)
        for key in change.generations:
            known = self.of(key)
            known.num_open -= 1
            self._unclear(known, held_s)

    def client_crashed(self, client: SimClient) -> None:
        """What it had begun has no answer."""
        for change in [one for one in self._open if one.client is client]:
            self.failed(change)

    def _unclear(self, known: KnownKey, held_s: float = 0.0) -> None:
        late_s = SLOW_S if self._cluster.checkers.is_slow_to_answer else LATE_S
        known.unclear_until = max(known.unclear_until, self._cluster.kernel.now + held_s + late_s)

    def ended(self, change: KeyChange) -> None:
        """It is over, and nobody can say what there is now."""
        for key in change.generations:
            self._ended(change, key)

    def matching_removed(self, change: KeyChange, is_all: bool) -> None:
        """All that could be found under these keys is gone; ``is_all``: and what is away with a node."""
        for key in change.generations:
            known = self._ended(change, key)
            if known is not None:
                known.is_absent = is_all or change.was_absent[key]

    def _ended(self, change: KeyChange, key: str) -> KnownKey | None:
        """What is known of it, if this change was alone and its answer is clear."""
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
            # False: there was none to be found; that of a node which is away may come back with it.
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
        if outcome is not None:  # what it reserved may be there for a while, and others are told to wait
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

    # What takes promises away

    def vanished(self, key: str, reason: str) -> list[str]:
        """The master has it no more, and says why. Returns the nodes that had it in memory and live on."""
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

    def given_up(self, name: str) -> None:
        """The master has forgotten what that node had in memory: it died, or was silent for too long."""
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

    def copied(self, key: str, node: str) -> None:
        """The master has one more replica of it, in that node's memory."""
        known = self.of(key)
        if known.is_present and not known.num_open:
            known.nodes[node] = None
            known.spared.pop(node, None)

    def moved(self, key: str, node: str) -> None:
        """It left a node's memory: others have it, and the node was drained or it is not hot any more."""
        known = self.of(key)
        known.nodes.pop(node, None)
        known.spared.pop(node, None)
        known.is_present &= known.is_durable or bool(known.nodes)

    def evicted(self, key: str, node: str, is_on_ssd: bool = True) -> None:
        """From a node's memory, and the master takes it to be readable elsewhere."""
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
        """Without a log, what the nodes say counts; and they hear of changes a moment later."""
        if not self._cluster.checkers.has_oplog:
            self.index_lost()

    def index_lost(self) -> None:
        """Another master begins with what the nodes say."""
        for known in self._keys.values():
            known.is_absent, known.nodes, known.value = False, {}, None
            known.is_present &= known.is_durable

    # Reads

    def look(self, keys: Iterable[str]) -> KeyRead:
        known = {key: self.of(key) for key in keys}
        return KeyRead(
            {key: one.generation for key, one in known.items()},
            {key: None for key, one in known.items() if one.is_absent and not one.num_open},
            {key: one.value for key, one in known.items() if one.value is not None},
        )

    def wrong(self, look: KeyRead, key: str, value: bytes) -> tuple[Invariant, str] | None:
        """Why ``value`` can't have been read, if nobody has changed the key since ``look``."""
        known = self.of(key)
        if known.generation != look.generations[key]:
            return None
        if key in look.absent and known.is_absent:
            return Invariant.PHANTOM, f"a phantom: {key!r} was read, after it was removed"
        if key in look.values and known.value == look.values[key] != value:
            return Invariant.STALE, f"a stale value: {key!r} was read as it was before its last put"
        return None

    def promised(self) -> dict[str, bytes | None]:
        """What must be readable, and the value if it is known."""
        return {key: known.value for key, known in self._keys.items() if known.is_present}
