"""What must hold in the whole cluster at every step, whatever fails. A violation ends the run.

* A read that succeeds returns a value that somebody put under that key, whole.
* Until a lease's end its bytes stay what they are, also for a reader who looks without checking.
* No space is promised to two at once: not by one master, and not by one and its successor.
* What was put stays until it is evicted, removed or replaced, or its node is lost.
* Every operation ends by its deadline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake.store.grants import PutGrant, ReadGrant
from mooncake.store.master import Master
from mooncake.store.operations import Operation

if TYPE_CHECKING:
    from mooncake.sim.cluster import Cluster, SimClient, SimNode

SLACK_S = 0.01
"""How long after its deadline an operation may take to notice; the network's delays are in it."""

LOSSES = ("evicted: ", "removed", "replaced while ", "given up", "another process took its name")


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclasses.dataclass(eq=False)
class Promise:
    """Space that somebody may touch until ``ends_at``."""

    node: SimNode
    start: int
    end: int
    ends_at: float
    who: str
    is_write: bool
    life: int
    """Which life of the master made it."""
    object_id: int


class Checkers:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._faults = cluster.faults
        """Those of the rough part; at the calm end they are gone, but not what they caused."""
        self._values: dict[str, list[bytes]] = {}
        """Key -> every value that was ever put under it."""
        self._promises: list[Promise] = []
        self._life = 0
        self._readable: dict[str, int] = {}
        """Key -> object id, as the master had it after its last step."""
        self._open: dict[int, tuple[SimClient, str, float]] = {}
        self._num_begun = 0
        self.counts: dict[str, int] = {
            "hits": 0,
            "misses": 0,
            "puts": 0,
            "refusals": 0,
            "errors": 0,
            "looks": 0,
        }

    @property
    def has_corruption(self) -> bool:
        """Memory may change by itself: only checksums protect a reader then."""
        return self._faults.corruption_every_s > 0

    # Values

    def value_put(self, key: str, value: bytes) -> None:
        self._values.setdefault(key, []).append(value)

    def value_read(self, key: str, value: bytes, how: str) -> None:
        if value not in self._values.get(key, ()):
            raise Violation(f"{how} of {key!r} gave {value[:24]!r}..., which nobody put there")

    # Space

    def promised(self, client: SimClient, grant: PutGrant | ReadGrant) -> Promise:
        """A client was granted space; it must not be anybody else's."""
        now = self._cluster.kernel.now
        self._promises = [p for p in self._promises if p.ends_at > now and p.node.is_alive]
        late_s = self._cluster.faults.late_write_s
        is_write = isinstance(grant, PutGrant)
        promise = Promise(
            node=grant.segment,
            start=grant.address,
            end=grant.address + grant.size_bytes,
            ends_at=grant.expires_at + (late_s if is_write else 0.0),
            who=f"{client.name} for {grant.key!r} #{grant.object_id}",
            is_write=is_write,
            life=self._life,
            object_id=grant.object_id,
        )
        for other in self._promises:
            if other.node is not promise.node or other.end <= promise.start or promise.end <= other.start:
                continue
            if other.object_id == promise.object_id and other.life == promise.life:
                continue
            if other.is_write or promise.is_write:
                raise Violation(
                    f"{promise.node.name}: space promised to {promise.who} is promised to {other.who} "
                    f"until {other.ends_at:.3f}"
                )
        self._promises.append(promise)
        return promise

    def kept(self, promise: Promise) -> None:
        """The holder is done with it, and nothing of it is under way."""
        if promise in self._promises:
            self._promises.remove(promise)

    # Objects

    def master_started(self) -> None:
        self._life += 1
        if not self._faults.has_oplog:
            self._readable = {}

    def master_stepped(self, master: Master) -> None:
        readable = {key: stored.object_id for key, stored in master.objects.readable.items()}
        for key, object_id in self._readable.items():
            if readable.get(key) != object_id:
                self._check_loss(master, key, object_id)
        self._readable = readable

    def _check_loss(self, master: Master, key: str, object_id: int) -> None:
        marker = f"#{object_id} unlinked: "
        reasons = [line.split(marker, 1)[1] for line in master.story(key) if marker in line]
        if len(reasons) != 1:
            raise Violation(f"{key!r} #{object_id} vanished without a reason: {master.story(key)}")
        allowed: tuple[str, ...] = LOSSES
        faults = self._faults
        if faults.is_calm:
            allowed = LOSSES[:2]
        elif faults.corruption_every_s:
            allowed = (*LOSSES, "a reader found wrong checksums")
        if not any(reason in reasons[0] for reason in allowed):
            raise Violation(f"{key!r} #{object_id} was lost: {reasons[0]}")

    # Operations

    def operation_began(
        self, client: SimClient, operation: Operation[object], deadline: float
    ) -> Callable[[], None]:
        self._num_begun += 1
        number = self._num_begun
        name = getattr(operation, "__name__", "operation")
        self._open[number] = (client, name, deadline)

        def ended() -> None:
            del self._open[number]

        return ended

    def check_ends(self, patience_s: float = SLACK_S) -> None:
        """Call at any time: nobody alive waits beyond a deadline."""
        now = self._cluster.kernel.now
        for client, name, deadline in list(self._open.values()):
            if client.process.is_alive and now > deadline + patience_s:
                raise Violation(f"{client.name} still waits in {name}, which had to end at {deadline:.3f}")
