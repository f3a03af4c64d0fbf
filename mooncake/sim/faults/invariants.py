# SPDX-License-Identifier: Apache-2.0
"""The invariants of the simulated worlds by name, and the checkers that hold a simulated store to them.

Each rule of each checker has a name, and a violation names the invariant that it breaks and ends the run. For
each of them ``tests/sim`` has a bug that is found by exactly this rule, so that no rule exists in name only:
a bug in shipped code, except for ``KEPT``. At every step of a store, whatever fails:

* A read that succeeds returns a value that was put under that key, whole.
* Until a lease ends, its bytes do not change, also for a reader that does not verify checksums.
* No space is granted twice at a time: not by one master, and not by one master and its successor.
* What was put stays until it is evicted, removed or replaced, or its node is lost.
* A put that is granted leaves its tenant within the quota that was acknowledged, and has each replica that it
  requests and for which there is room.
* No request misses what a live node has.
* Every operation ends by its deadline, and answers for each of its objects.

``HistoryChecker`` knows what clients were promised about keys. A key is known only while it is not being
changed: a change (put, replace, remove) that overlaps another, has no clear answer or was sent twice leaves
it unknown until a clear one. Then:

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
import enum
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from mooncake.errors import Refusal
from mooncake.sim.faults.nodes import NODE_ADDRESS
from mooncake.store import messages as m
from mooncake.store.allocator import ALIGNMENT_BYTES
from mooncake.store.client.effects import Operation
from mooncake.store.client.grants import PutGrant, ReadGrant
from mooncake.store.client.preallocated import PreallocatedPiece
from mooncake.store.master.catalog_events import ReplicaCompleted, ReplicaRemoved
from mooncake.store.master.master import Master
from mooncake.store.master.objects import StoredObject, scoped_all, split_scoped
from mooncake.store.master.segments import Segment
from mooncake.types import Tier

if TYPE_CHECKING:
    from mooncake.sim.faults.clients import SimClient
    from mooncake.sim.faults.nodes import SimSegment
    from mooncake.sim.faults.store_run import StoreCluster
    from mooncake.sim.kernel import Kernel


class Violation(AssertionError):
    """A broken invariant."""

    def __init__(self, message: str, rule: Invariant) -> None:
        super().__init__(message)
        self.rule = rule

    @classmethod
    def of_run(cls, error: Exception, kernel: Kernel, *drawn: object, num_lines: int = 12) -> Violation:
        """What ended a run, with its seed and what the seed drew. Whatever a core raises by itself, an
        assertion or not, is a broken core."""
        what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        last = "\n  ".join(kernel.trace[-num_lines:])
        lines = [f"seed {kernel.seed} at {kernel.now:.6f}: {what}", *map(str, drawn), f"  {last}"]
        return cls("\n".join(lines), error.rule if isinstance(error, Violation) else Invariant.CORE)


class Invariant(enum.StrEnum):
    """Invariants of the store's worlds, then those that several masters add, and then those of transfer."""

    CORE = "core"
    """Every core's own check holds after every step."""
    VALUE = "value"
    """A read that succeeds returns a value that was put under that key, whole."""
    PHANTOM = "phantom"
    """After an acknowledged removal the key is not read until a put of it begins."""
    STALE = "stale"
    """After an acknowledged put of an absent key, or a replacement, no other value is read."""
    LEASE = "lease"
    """Until a lease ends its bytes do not change, also for a reader that does not verify checksums."""
    SPACE = "space"
    """No space is granted twice at a time, not by a master and its successor either."""
    REASON = "reason"
    """Whatever is no longer readable went for a reason that the master records."""
    CAUSE = "cause"
    """Whatever went was evicted, removed or replaced, or its nodes were lost, and for no other reason."""
    REPLICA = "replica"
    """An object is not lost with one node while another has it in memory."""
    ANSWER = "answer"
    """An operation answers for every object that it is about, and says what was done."""
    MISS = "miss"
    """No request misses an object that a live node has."""
    REPLICAS = "replicas"
    """A put has each replica that it requests and for which a segment has room, until its end and after."""
    RETURNING = "returning"
    """No lookup misses an object whose node may still come back after a change of the master."""
    QUOTA = "quota"
    """A put that is granted leaves its tenant within its quota."""
    DEADLINE = "deadline"
    """Every operation ends by its deadline."""
    HEALTH = "health"
    """After everything has healed, every client can put and get."""
    PROMISE = "promise"
    """After everything has healed, what was acknowledged and not lost with its nodes can be read."""
    WRITING = "writing"
    """After everything has settled, no object is still being written."""
    COPYING = "copying"
    """After everything has settled, no copy is half done, and no task is left."""
    LEAK = "leak"
    """After everything has settled, every allocated byte belongs to an object."""
    JOURNAL = "journal"
    """After everything has settled, each node's journal agrees with the master about its segments."""

    LEADER = "leader"
    """At no instant two masters would answer, and no answer leaves one after another began to lead."""
    PREFIX = "prefix"
    """What a standby in sync has is what the leader had at that number of its log."""
    HELD = "held"
    """A standby in sync holds all space that the leader holds for a client."""
    SUCCESSION = "succession"
    """A leader that claims to have everything has what was acknowledged."""
    IDS = "ids"
    """No leader issues an object id that is not larger than all that were issued before."""

    SLICES = "slices"
    """The bytes of a completed batch are at their destination, and are counted."""
    KEPT = "kept"
    """Memory that a batch has written does not change until the next batch writes it. The fence that shipped
    transports owe is part of the simulated one, and so is the bug that this rule finds."""
    ENDS = "ends"
    """Every batch ends by its deadline."""
    STATUS = "status"
    """A failed batch has a reason."""
    BLAME = "blame"
    """A batch fails only if every path to its peer failed or its time ran out; none fails after healing."""
    RETURN = "return"
    """After everything has healed, every rail is used again."""


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

    @property
    def is_in_memory(self) -> bool:
        return any(node not in self.spared for node in self.nodes)

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
    present: dict[str, None]
    """Those in the memory of nodes that are alive."""


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

    def doubted(self) -> None:
        """What the changes under way did may be undone: their answers say nothing about what is there now."""
        for known in self._keys.values():
            known.generation += 1

    def is_clear_after(self, change: KeyChange, key: str) -> bool:
        """The change has ended with an answer. Returns whether it is the last word on the key."""
        return self._ended(change, key) is not None

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
            {key: None for key, one in known.items() if one.is_in_memory and not one.num_open},
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

    def why_wrong_presence(self, look: KeyRead, key: str, is_there: bool) -> tuple[Invariant, str] | None:
        """Why it can't be that there is an object, or none, if the key has not been changed since ``look``.
        None if it can; that there is none is correct where a node is not reached."""
        known = self.of(key)
        if known.generation != look.generations[key]:
            return None
        if is_there and key in look.absent and known.is_absent:
            return Invariant.PHANTOM, f"a phantom: {key!r} was found, after it was removed"
        is_reached = self._cluster.checkers.all_nodes_stay
        if not is_there and is_reached and key in look.present and known.is_in_memory:
            return Invariant.MISS, f"a miss: {key!r} was not found, and is in memory on {list(known.nodes)}"
        return None

    def promised(self) -> dict[str, bytes | None]:
        """Keys that must be readable, with the value where it is known."""
        return {key: known.value for key, known in self._keys.items() if known.is_present}


class AnswerChecker:
    """What a master answers, compared with what it has, and with what was answered before."""

    def __init__(self, cluster: StoreCluster) -> None:
        self._cluster = cluster
        self._asked: dict[tuple[object, int], msgspec.Struct] = {}
        """Requests without an answer, by origin."""
        self._last_id = 0
        """Greater ids are those of objects that the message in hand is granted."""
        self._with_room: list[Segment] = []
        """Segments on which each object of the message in hand may have a replica."""
        self._granted: dict[int, list[Segment]] = {}
        """Object id -> segments whose space its writer was granted."""
        self._quotas: dict[str, int] = {}
        """Quotas that were acknowledged; none where it is not known."""
        self.quota_changes = HistoryChecker(cluster)
        """Changes of quotas, with tenants as keys."""

    # Quotas

    def quota_began(self, client: SimClient) -> KeyChange:
        """A client requests another quota of its tenant."""
        self._quotas.pop(client.tenant, None)
        return self.quota_changes.begin(client, [client.tenant])

    def quota_set(self, change: KeyChange, size_bytes: int | None, reply: object) -> None:
        """The change is answered. The quota is the one in the answer, because the master rounds it up."""
        tenant, quota_bytes = change.client.tenant, None
        if isinstance(reply, m.Quotas):
            quota_bytes = {one.tenant: one.quota_bytes for one in reply.quotas}.get(tenant or "default")
            if (quota_bytes is None) != (size_bytes is None):
                what = f"tenant {tenant!r} was to have a quota of {size_bytes} bytes, and has {quota_bytes}"
                raise Violation(what, Invariant.QUOTA)
        if self.quota_changes.is_clear_after(change, tenant) and quota_bytes is not None:
            self._quotas[tenant] = quota_bytes

    def quotas_unknown(self) -> None:
        """Another master begins without a log, or an operator ends all quotas."""
        self._quotas = {}
        self.quota_changes.doubted()

    # Requests

    def received(
        self, master: Master, origin: tuple[object, int], message: msgspec.Struct, now: float
    ) -> None:
        """Call before the master handles a request."""
        self._asked[origin] = message
        self._last_id = master.objects.last_id
        self._with_room = []
        if isinstance(message, m.PutStart) and message.policy.num_replicas > 1:
            # A durable put needs nodes with an SSD, and a quota may allow fewer replicas.
            account = master.catalog.tenants.accounts.get(_tenant_of(message))
            has_quota = account is not None and account.quota_bytes is not None
            if not message.policy.is_durable and not has_quota:
                num_bytes = sum(size + ALIGNMENT_BYTES for size in message.sizes)
                self._with_room = [
                    segment
                    for segment in master.segments.mounted.values()
                    if segment.tier is Tier.MEMORY
                    and segment.takes_objects(now)
                    and segment.name not in message.avoid
                    and segment.allocator.has_hole(num_bytes)
                ]

    def handled(self, master: Master, message: msgspec.Struct) -> None:
        """Call when the master has handled the request that it has received, before another one."""
        if isinstance(message, m.PutEnd):
            self._put_handled(master, message)
        elif isinstance(message, (m.PutStart, m.PutWritten)):
            objects = [*master.objects.writing.values(), *master.objects.readable.values()]
            self._check_quota(_tenant_of(message), objects)
            if isinstance(message, m.PutStart):
                self._check_replicas(message, [one for one in objects if one.object_id > self._last_id])

    def _check_quota(self, tenant: str, objects: list[StoredObject]) -> None:
        """What counts besides (alignment, space that is released later) is the master's decision."""
        quota_bytes = self._quotas.get(tenant)
        if quota_bytes is None:
            return
        mine = [one for one in objects if split_scoped(one.key)[0] == tenant]
        granted = [one for one in mine if one.object_id > self._last_id]
        if not granted:
            return
        used_bytes = sum(
            one.size_bytes * sum(extent.segment.tier is Tier.MEMORY for extent in one.extents) for one in mine
        )
        if used_bytes > quota_bytes:
            what = f"tenant {tenant!r} uses {used_bytes} of {quota_bytes} bytes"
            raise Violation(f"{what}, and was granted {granted}", Invariant.QUOTA)

    def _check_replicas(self, message: m.PutStart, granted: list[StoredObject]) -> None:
        for stored in granted:
            taken = [extent.segment for extent in stored.extents]
            self._granted[stored.object_id] = taken
            left = [
                segment
                for segment in self._with_room
                if segment not in taken and segment.allocator.has_hole(stored.size_bytes)
            ]
            if left and len(taken) < message.policy.num_replicas:
                what = f"{stored} has {len(taken)} of {message.policy.num_replicas} replicas"
                raise Violation(f"{what}, and there is room on {left}", Invariant.REPLICAS)

    def _put_handled(self, master: Master, message: m.PutEnd) -> None:
        keys = scoped_all(message.tenant, message.keys)
        for index, (key, object_id) in enumerate(zip(keys, message.object_ids, strict=True)):
            granted = self._granted.pop(object_id, [])
            stored = master.objects.readable.get(key)
            if stored is None or stored.object_id != object_id:
                continue
            failed = message.failed[index] if message.failed else []
            complete = [extent.segment for extent in stored.complete()]
            lost = [one for one in granted if one.is_alive and one.name not in failed and one not in complete]
            if lost:
                raise Violation(f"{stored} was written, and is not on {lost}", Invariant.REPLICAS)

    def replied(self, master: Master, origin: tuple[object, int], reply: msgspec.Struct) -> None:
        """Call with the answer to a request when the master has made it."""
        message = self._asked.pop(origin, None)
        if isinstance(message, m.LookupObjects) and isinstance(reply, m.LookupReply):
            self._check_found(master, message, [one is not None for one in reply.objects])
        elif isinstance(message, m.Exists) and isinstance(reply, m.Flags):
            self._check_found(master, message, [bool(flag) for flag in reply.flags])
        elif isinstance(message, m.DropReplicas) and isinstance(reply, m.Outcomes):
            self._check_dropped(master, message, reply)

    def _check_found(self, master: Master, message: m.LookupObjects | m.Exists, found: list[bool]) -> None:
        awaited = master.segments.awaited
        for key, is_found in zip(scoped_all(message.tenant, message.keys), found, strict=True):
            stored = master.objects.readable.get(key)
            if stored is None or is_found:
                continue
            segments = [extent.segment for extent in stored.complete()]
            if any(awaited.get(segment.name) is segment for segment in segments):
                raise Violation(f"{key!r} was missed before its node came back", Invariant.RETURNING)
            alive = [segment for segment in segments if segment.is_alive]
            if alive:
                raise Violation(f"{key!r} was missed, and is on {alive}", Invariant.MISS)

    def _check_dropped(self, master: Master, message: m.DropReplicas, reply: m.Outcomes) -> None:
        for key, outcome in zip(scoped_all(message.tenant, message.keys), reply.outcomes, strict=True):
            stored = master.objects.readable.get(key)
            segments = [] if stored is None else [extent.segment for extent in stored.complete()]
            left = [
                segment
                for segment in segments
                if (segment.name == message.segment if message.segment else segment.tier is Tier.MEMORY)
            ]
            if left and isinstance(outcome, bool):
                what = f"replicas of {key!r} were {'dropped' if outcome else 'not found'}, and are on {left}"
                raise Violation(what, Invariant.ANSWER)


def _tenant_of(message: m.PutStart | m.PutWritten) -> str:
    return "" if message.tenant == "default" else message.tenant


SLACK_S = 0.01
"""How long after its deadline an operation may take to notice; includes the network's delays."""

CLOCK_SLACK_S = 0.001
"""How far two drifting clocks may diverge over the length of a promise."""

NODE_NOTICE_S = 2.5
"""How long until a node learns of a removal: until a silent connection is noticed, plus a slow message."""

LOSSES = (
    "evicted: ",
    "removed",
    "replaced while ",
    "replaced by a newer put",
    "given up",
    "another process took its name",
    "its content came back as ",
    "is newer and on ",
    "unmounted",
)

REQUESTED_LOSSES = ("evicted: ", "removed", "replaced by a newer put", "unmounted: its grace is over")
"""Reasons that remove objects when nothing fails: eviction, and requests of clients and operators."""

HARMLESS_UNMOUNT = "unmounted: drained"
"""A segment that was unmounted because it was empty takes no object with it."""


@dataclasses.dataclass(eq=False)
class SpaceGrant:
    """Space that its holder may access until ``ends_at``."""

    segment: SimSegment
    start: int
    end: int
    ends_at: float
    holder: str
    is_write: bool
    life: int
    """The master's incarnation that granted it."""
    object_id: int


class Checkers:
    def __init__(self, cluster: StoreCluster) -> None:
        self._cluster = cluster
        self._faults = cluster.faults
        """Faults of the rough part; they have stopped at the calm end, but their consequences remain."""
        self._values: dict[str, list[bytes]] = {}
        """Key -> every value that was ever put under it."""
        self._promises: list[SpaceGrant] = []
        self._life = 0
        self._stepped_at = 0.0
        """Time of the master's last step."""
        self._readable: dict[str, int] = {}
        """Key -> object id, as of the master's last step."""
        self._readable_before: dict[str, int] = {}
        """Key -> object id, as of the step before that."""
        self._went: dict[int, float] = {}
        """Object id -> time at which the master dropped it."""
        self._ghosts: dict[int, str] = {}
        """Object id -> key, of removed objects still in the journal of a node that had not been notified when
        a master without a log died. Their space may have been reused: only checksums detect that."""
        self._mounted: dict[str, Segment] = {}
        """Memory segments that it had mounted, by node."""
        self.history = HistoryChecker(cluster)
        self.answers = AnswerChecker(cluster)
        self._open: dict[int, tuple[SimClient, str, float]] = {}
        self._num_begun = 0
        self.has_restarts = False
        """Whether a node was restarted because its SSD was drained, with what was in its memory."""
        self.counts: dict[str, int] = {
            "hits": 0,
            "misses": 0,
            "puts": 0,
            "refusals": 0,
            "errors": 0,
            "looks": 0,
            "pieces": 0,
            "written in advance": 0,
        }

    @property
    def has_corruption(self) -> bool:
        """Whether bytes may change spontaneously, be lost before a flush, or be written by a process that was
        stopped beyond every deadline: only checksums protect then."""
        faults = self._faults
        return faults.corruption_every_s > 0 or faults.power_loss_chance > 0 or faults.may_write_late

    @property
    def has_lying_disks(self) -> bool:
        """Whether disks acknowledge flushes that they did not do."""
        return self._faults.lying_disk_chance > 0

    @property
    def is_slow_to_answer(self) -> bool:
        return self._faults.is_slow_to_answer

    @property
    def has_oplog(self) -> bool:
        return self._faults.has_oplog

    @property
    def all_nodes_stay(self) -> bool:
        """Whether no node has been unreachable or was restarted."""
        return self._faults.is_calm and not self.has_restarts

    @property
    def last_look_s(self) -> float:
        """How long before the end of its lease a reader must have read."""
        return CLOCK_SLACK_S if self._faults.clock_drift else 1e-6

    # Values

    def value_put(self, key: str, value: bytes) -> None:
        self._values.setdefault(key, []).append(value)

    def value_read(self, key: str, value: bytes, how: str, look: KeyRead | None = None) -> None:
        if not self._faults.has_checksums and key in self._ghosts.values():
            return
        if value not in self._values.get(key, ()):
            raise Violation(
                f"{how} of {key!r} gave {value[:24]!r}..., which was never put there", Invariant.VALUE
            )
        wrong = None if look is None else self.history.why_wrong(look, key, value)
        if wrong is not None:
            raise self._with_story(wrong, key, how)

    def presence_answered(self, key: str, is_there: bool, how: str, look: KeyRead) -> None:
        """A client was answered whether there is an object under the key."""
        wrong = self.history.why_wrong_presence(look, key, is_there)
        if wrong is not None:
            raise self._with_story(wrong, key, how)

    def _with_story(self, wrong: tuple[Invariant, str], key: str, how: str) -> Violation:
        rule, what = wrong
        story = "\n    ".join(self._cluster.master.master.story(key))
        return Violation(f"{how}: {what}\n    {story}", rule)

    # Space

    def promised(self, client: SimClient, grant: PutGrant | ReadGrant) -> list[SpaceGrant]:
        """A client was granted space, one extent per replica; no other holder may have it."""
        is_write = isinstance(grant, PutGrant)
        late_s = self._cluster.faults.late_write_s if is_write else 0.0
        promises: list[SpaceGrant] = []
        for place in grant.targets if isinstance(grant, PutGrant) else grant.each():
            if place.segment is None:
                continue
            promises.append(
                SpaceGrant(
                    segment=place.segment,
                    start=place.address,
                    end=place.address + grant.size_bytes,
                    ends_at=self._instant(client, grant.expires_at) + late_s,
                    holder=f"{client.name} for {grant.key!r} #{grant.object_id}",
                    is_write=is_write,
                    life=self._life,
                    object_id=grant.object_id,
                )
            )
            self._add(promises[-1])
        return promises

    def renewed(self, client: SimClient, grant: ReadGrant, promises: list[SpaceGrant]) -> None:
        """The lease ends later: until then, no other holder may have the bytes that are read."""
        for promise in promises:
            if promise.segment is grant.segment and promise.start == grant.address:
                self.released([promise])
                promise.ends_at = self._instant(client, grant.expires_at)
                promise.life = self._life
                self._add(promise)

    def piece_promised(self, client: SimClient, piece: PreallocatedPiece) -> SpaceGrant | None:
        """A client was given space in advance; None where that is gone."""
        replica = piece.replica
        segment = self._cluster.segment(replica.segment, replica.epoch)
        if segment is None:
            return None
        start, ends_at = (
            replica.address,
            self._instant(client, piece.expires_at) + self._cluster.faults.late_write_s,
        )
        if ends_at <= self._cluster.kernel.now:
            return None  # returned too late to be written again
        holder = f"{client.name} in advance #{piece.advance_id}"
        end = start + piece.size_bytes
        promise = SpaceGrant(segment, start, end, ends_at, holder, True, self._life, piece.advance_id)
        self._add(promise)
        self.counts["pieces"] += 1
        return promise

    def task_promised(self, segment: SimSegment, task: m.CopyTask, ends_at: float) -> SpaceGrant:
        """A node is going to write a replica; until then no other holder may have the space."""
        start = NODE_ADDRESS + task.entry.offset
        holder = f"{segment.name} for a task about {task.entry.key!r} #{task.entry.object_id}"
        end = start + task.entry.size_bytes
        promise = SpaceGrant(segment, start, end, ends_at, holder, True, self._life, task.entry.object_id)
        self._add(promise)
        return promise

    def _instant(self, client: SimClient, shown: float) -> float:
        slack_s = CLOCK_SLACK_S if self._faults.clock_drift else 0.0
        return client.process.clock.instant(shown) - slack_s

    def _add(self, promise: SpaceGrant) -> None:
        now = self._cluster.kernel.now
        if promise.object_id in self._ghosts or promise.ends_at <= now:
            return
        self._promises = [p for p in self._promises if p.ends_at > now and p.segment.is_alive]
        for other in self._promises:
            if (
                other.segment is not promise.segment
                or other.end <= promise.start
                or promise.end <= other.start
            ):
                continue
            if other.object_id == promise.object_id and other.life == promise.life:
                continue
            if other.is_write or promise.is_write:
                raise Violation(
                    f"{promise.segment.name}: space promised to {promise.holder} is promised to "
                    f"{other.holder} until {other.ends_at:.3f}",
                    Invariant.SPACE,
                )
        self._promises.append(promise)

    def released(self, promises: Iterable[SpaceGrant]) -> None:
        """The holder has finished with them, and none of its transfers is in flight."""
        for promise in promises:
            if promise in self._promises:
                self._promises.remove(promise)

    # Objects

    def client_crashed(self, client: SimClient) -> None:
        """The changes that it had begun have no answer."""
        self.history.client_crashed(client)
        self.answers.quota_changes.client_crashed(client)

    def is_resurrected(self, object_id: int) -> bool:
        """Whether its bytes may belong to another object, which readers detect by checksums."""
        return object_id in self._ghosts

    def master_died(self, master: Master) -> None:
        if self._faults.has_oplog:
            return
        self.answers.quotas_unknown()
        for node in self._cluster.nodes.values():
            for segment in node.segments.values():
                known = master.segments.find(segment.name, segment.epoch)
                is_live = known is not None and known.is_alive
                for entry in segment.entries():
                    went_at = self._went.get(entry.object_id)
                    if went_at is not None and (not is_live or went_at > self._stepped_at - NODE_NOTICE_S):
                        self._ghosts[entry.object_id] = entry.key

    def master_started(self) -> None:
        self._life += 1
        self._mounted = {}
        if not self._faults.has_oplog:
            self._readable = {}

    def master_stepped(self, master: Master) -> None:
        # While a durable object is not durable yet, the acknowledged object is the one that it replaces.
        readable = {
            key: (stored.before or stored).object_id for key, stored in master.objects.readable.items()
        }
        mounted = {s.node: s for s in master.segments.mounted.values() if s.tier is Tier.MEMORY}
        for node, segment in self._mounted.items():
            if mounted.get(node) is not segment:
                self.history.unmounted(node)
        self._mounted = mounted
        self._stepped_at = self._cluster.kernel.now
        for key, object_id in self._readable.items():
            if readable.get(key) != object_id:
                self._went[object_id] = self._stepped_at
                self._check_loss(master, key, object_id)
        self._readable_before, self._readable = self._readable, readable

    def step_was_lost(self) -> None:
        """The master ended while it logged its last step: a part of it may be in the log, and no client was
        answered."""
        before, after = self._readable_before, self._readable
        self._readable = {key: one for key, one in before.items() if after.get(key) == one}

    def _check_loss(self, master: Master, key: str, object_id: int) -> None:
        marker = f"#{object_id} unlinked: "
        reasons = [line.split(marker, 1)[1] for line in master.story(key) if marker in line]
        if not reasons:
            story = master.story(key)
            raise Violation(f"{key!r} #{object_id} vanished without a reason: {story}", Invariant.REASON)
        allowed: tuple[str, ...] = LOSSES
        faults = self._faults
        if faults.is_calm and not self.has_restarts:
            allowed = REQUESTED_LOSSES
        elif self.has_corruption or self.is_resurrected(object_id):
            allowed = (*LOSSES, "a reader found wrong checksums", "its bytes are wrong")
        left = self.history.dropped(key, reasons[-1])
        if left and not faults.corruption_every_s and not faults.may_write_late:
            what = f"{key!r} #{object_id} was lost ({reasons[-1]}), but was in memory on {left}, too"
            raise Violation(what, Invariant.REPLICA)
        if HARMLESS_UNMOUNT in reasons[-1] or not any(reason in reasons[-1] for reason in allowed):
            raise Violation(f"{key!r} #{object_id} was lost: {reasons[-1]}", Invariant.CAUSE)

    # Operations

    def operation_began(
        self, client: SimClient, operation: Operation[object], deadline: float
    ) -> Callable[[], None]:
        self._num_begun += 1
        number = self._num_begun
        name = getattr(operation, "__name__", "operation")
        self._open[number] = (client, name, client.process.clock.instant(deadline))

        def ended() -> None:
            self._check_end(*self._open.pop(number))

        return ended

    def check_ends(self) -> None:
        """Check that no live process waits beyond a deadline. May be called at any time."""
        for operation in self._open.values():
            self._check_end(*operation)

    def _check_end(self, client: SimClient, name: str, deadline: float) -> None:
        due_at = max(deadline, client.process.paused_until) + SLACK_S
        if client.process.is_alive and self._cluster.kernel.now > due_at:
            what = f"{client.name} waited in {name} beyond {deadline:.3f}, when it had to end"
            raise Violation(what, Invariant.DEADLINE)
