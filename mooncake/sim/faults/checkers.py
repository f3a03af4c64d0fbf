# SPDX-License-Identifier: Apache-2.0
"""Invariants of the whole cluster, which must hold at every step whatever fails. A violation ends the run.

* A read that succeeds returns a value that was put under that key, whole.
* Until a lease ends, its bytes do not change, also for a reader that does not verify checksums.
* No space is granted twice at a time: not by one master, and not by one master and its successor.
* What was put stays until it is evicted, removed or replaced, or its node is lost; what that promises to
  clients is in ``history_checker.py``.
* A put that is granted leaves its tenant within its quota.
* Every operation ends by its deadline.

Each of these has a name in ``invariants.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mooncake.sim.faults.history_checker import HistoryChecker, KeyRead
from mooncake.sim.faults.invariants import Invariant, Violation
from mooncake.sim.faults.nodes import NODE_ADDRESS
from mooncake.store import messages as m
from mooncake.store.client.grants import PutGrant, ReadGrant
from mooncake.store.client.operations import Operation
from mooncake.store.client.preallocated import PreallocatedPiece
from mooncake.store.master.master import Master
from mooncake.store.master.segments import Segment
from mooncake.types import Tier

if TYPE_CHECKING:
    from mooncake.sim.faults.clients import SimClient
    from mooncake.sim.faults.nodes import SimSegment
    from mooncake.sim.faults.store_cluster import StoreCluster

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
        self._open: dict[int, tuple[SimClient, str, float]] = {}
        self._num_begun = 0
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
            rule, what = wrong
            story = "\n    ".join(self._cluster.master.master.story(key))
            raise Violation(f"{how}: {what}\n    {story}", rule)

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
        if promise.object_id in self._ghosts:
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

    def is_resurrected(self, object_id: int) -> bool:
        """Whether its bytes may belong to another object, which readers detect by checksums."""
        return object_id in self._ghosts

    def master_died(self, master: Master) -> None:
        if self._faults.has_oplog:
            return
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
        if faults.is_calm:
            allowed = REQUESTED_LOSSES
        elif self.has_corruption or self.is_resurrected(object_id):
            allowed = (*LOSSES, "a reader found wrong checksums", "its bytes are wrong")
        left = self.history.dropped(key, reasons[-1])
        if left and not faults.corruption_every_s and not faults.may_write_late:
            what = f"{key!r} #{object_id} was lost ({reasons[-1]}), but was in memory on {left}, too"
            raise Violation(what, Invariant.REPLICA)
        if HARMLESS_UNMOUNT in reasons[-1] or not any(reason in reasons[-1] for reason in allowed):
            raise Violation(f"{key!r} #{object_id} was lost: {reasons[-1]}", Invariant.CAUSE)

    # Tenants

    def put_handled(self, master: Master, tenant: str, last_id: int) -> None:
        """Call after a message about puts of a tenant; objects with ids above ``last_id`` were granted by
        it."""
        name = "" if tenant == "default" else tenant
        account = master.catalog.tenants.accounts.get(name)
        if account is None or account.quota_bytes is None or account.used_bytes <= account.quota_bytes:
            return
        objects = [*master.objects.writing.values(), *master.objects.readable.values()]
        granted = [one for one in objects if one.object_id > last_id and one.account is account]
        if granted:
            what = f"tenant {name!r} uses {account.used_bytes} of {account.quota_bytes} bytes"
            raise Violation(f"{what}, and was granted {granted}", Invariant.QUOTA)

    # Operations

    def operation_began(
        self, client: SimClient, operation: Operation[object], deadline: float
    ) -> Callable[[], None]:
        self._num_begun += 1
        number = self._num_begun
        name = getattr(operation, "__name__", "operation")
        self._open[number] = (client, name, client.process.clock.instant(deadline))

        def ended() -> None:
            del self._open[number]

        return ended

    def check_ends(self, patience_s: float = SLACK_S) -> None:
        """Check that no live process waits beyond a deadline. May be called at any time."""
        now = self._cluster.kernel.now
        for client, name, deadline in list(self._open.values()):
            due_at = max(deadline, client.process.paused_until) + patience_s
            if client.process.is_alive and now > due_at:
                what = f"{client.name} still waits in {name}, which had to end at {deadline:.3f}"
                raise Violation(what, Invariant.DEADLINE)
