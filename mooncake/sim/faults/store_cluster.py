# SPDX-License-Identifier: Apache-2.0
"""The store's cluster on the kernel: a master, nodes and clients made of the cores that ship.

Only the shells are simulated: a connection carries encoded messages, a pool is a bytearray, a transfer
copies slice by slice at instants of its own, so that readers can see torn objects and writes can land
after their writer has abandoned them. Every process has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mooncake.rpc.wire import decoder_for
from mooncake.sim.faults.checkers import Checkers
from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.disks import SimDisk
from mooncake.sim.faults.network import ConnectionEnd, Network, over_the_wire
from mooncake.sim.faults.nodes import SimNode, SimSegment
from mooncake.sim.kernel import Kernel, Process, SimClock, SimDriver
from mooncake.store import messages as m
from mooncake.store.master.catalog_events import ReplicaCompleted, ReplicaRemoved
from mooncake.store.master.effects import (
    AppendRecords,
    ConnectionLost,
    Effect,
    Event,
    OperatorEvent,
    Received,
    Reply,
)
from mooncake.store.master.log_records import Record, decode, encode
from mooncake.store.master.master import Master
from mooncake.store.settings import MasterSettings

MASTER = "master"

_replies = decoder_for(m.REPLIES)


class SimStandby:
    """A master that applies the leader's records as they come, and answers no request yet.

    How a record gets here, the election and the wait for acknowledgements are not simulated: whatever the
    leader has acknowledged is applied here.
    """

    def __init__(self, cluster: StoreCluster, records: list[Record]) -> None:
        self.process = Process(cluster.kernel, "standby", cluster.new_clock())
        self.master = _fresh(cluster)
        self.follow(records)

    def follow(self, records: list[Record]) -> None:
        now = self.process.now
        self.master.apply(records, now)
        self.master.catalog.end_rests(now)
        self.master.check()


def _fresh(cluster: StoreCluster) -> Master:
    # As in the server: later incarnations begin with larger numbers.
    first_object_id = int(cluster.kernel.now * 1000) + 1 << 20 | cluster.kernel.random.getrandbits(20)
    return Master(cluster.settings, first_object_id)


class SimMaster:
    """One incarnation of the master process."""

    def __init__(self, cluster: StoreCluster, standby: SimStandby | None = None) -> None:
        clock = cluster.new_clock() if standby is None else standby.process.clock
        self.process = Process(cluster.kernel, MASTER, clock)
        self.master = _fresh(cluster) if standby is None else standby.master
        self._cluster = cluster
        self.overloaded_until = 0.0
        """Whether every message takes its time."""
        if standby is not None:
            self.master.settle(self.process.now)
            self.master.check()
        elif cluster.faults.has_oplog:
            records, _ = decode(bytes(cluster.oplog))
            self.master.restore(records, self.process.now)
            cluster.oplog[:] = encode(self.master.snapshot())
            self.master.check()
        self._driver: SimDriver[Event, Effect] = SimDriver(self.process, self.master, self._perform)
        self._driver.after_step = lambda: cluster.checkers.master_stepped(self.master)
        self.master.catalog.observe({ReplicaRemoved: self._removed, ReplicaCompleted: self._completed})
        cluster.network.listen(MASTER, self.process, self._accept)

    def _is_torn(self, content: bytes) -> bool:
        """Whether this process ends in the middle of the write; otherwise the write may be slow."""
        faults, kernel = self._cluster.faults, self._cluster.kernel
        if faults.torn_append_chance and kernel.chance(faults.torn_append_chance):
            num_bytes = kernel.random.randrange(len(content))
            self._cluster.oplog += content[:num_bytes]
            kernel.trace_line(f"the log of the master is torn: {num_bytes} of {len(content)} bytes")
            self.process.crash()
            self._cluster.checkers.step_was_lost()
            self._cluster.on_master_lost()
            return True
        if faults.slow_append_chance and kernel.chance(faults.slow_append_chance):
            self.process.pause(kernel.random.uniform(0.0, faults.slow_disk_s))
        return False

    def _removed(self, event: ReplicaRemoved) -> None:
        self._cluster.checkers.history.replica_removed(event)

    def _completed(self, event: ReplicaCompleted) -> None:
        self._cluster.checkers.history.replica_completed(event)

    def _accept(self, end: ConnectionEnd) -> None:
        def received(frame: tuple[int, msgspec.Struct]) -> None:
            request_id, message = frame
            last_id = self.master.objects.last_id
            self._driver.post(Received((end, request_id), end, message))
            if isinstance(message, (m.PutStart, m.PutWritten)):
                self._cluster.checkers.put_handled(self.master, message.tenant, last_id)
            if self._cluster.kernel.now < self.overloaded_until:
                self.process.pause(self._cluster.faults.handler_s)

        end.on_message = received
        end.on_closed = lambda reason: self._driver.post(ConnectionLost(end))

    def _perform(self, effect: Effect) -> None:
        if not self.process.is_alive:
            return  # it ended while it logged what comes before this
        if isinstance(effect, Reply):
            end, request_id = effect.origin
            frame = (request_id, over_the_wire(effect.message, _replies))
            self.process.when_awake(lambda: end.send(frame))
        elif isinstance(effect, AppendRecords):
            content = encode(effect.records)
            if self._cluster.faults.has_oplog and self._is_torn(content):
                return
            self._cluster.oplog += content
            if self._cluster.standby is not None:
                self._cluster.standby.follow(decode(content)[0])
        elif isinstance(effect, OperatorEvent):
            fields = {name: value for name, value in effect.fields.items() if name != "host"}
            self._cluster.kernel.trace_line(f"master: {effect.event} {fields}")


class StoreCluster:
    """Everything that runs under one seed."""

    def __init__(self, kernel: Kernel, faults: ClusterFaults, settings: MasterSettings) -> None:
        self.kernel = kernel
        self.faults = faults
        self.settings = settings
        self.network = Network(kernel, faults)
        self.oplog = bytearray()
        """The master's log, if it keeps one; outlives its process."""
        self.nodes: dict[str, SimNode] = {}
        self.disks: dict[str, SimDisk] = {}
        """Disks by node; they outlive it."""
        self.clients: dict[str, SimClient] = {}
        self.on_master_lost: Callable[[], None] = lambda: None
        """Called when a node ended by itself, so that it is started again."""
        self.num_jobs = 0
        """Jobs that were requested; each master numbers those that it began, from 1 on."""
        self.checkers = Checkers(self)
        self.standby: SimStandby | None = None
        self.master = SimMaster(self)
        self._follow()

    def start_master(self) -> None:
        self.kernel.trace_line("master starts" if self.standby is None else "the standby leads")
        self.checkers.history.master_crashed()
        self.checkers.master_died(self.master.master)
        self.master = SimMaster(self, self.standby)
        self.checkers.master_started()
        self._follow()

    def _follow(self) -> None:
        """Another standby follows from now on, if there is to be one."""
        self.standby = SimStandby(self, self.master.master.snapshot()) if self.faults.has_standby else None

    def start_node(self, name: str, host: str, size_bytes: int) -> None:
        self.kernel.trace_line(f"{name} starts")
        self.nodes[name] = SimNode(self, name, host, size_bytes, self.disks.get(name))

    def start_client(self, name: str, host: str, tenant: str = "") -> SimClient:
        self.kernel.trace_line(f"{name} starts")
        self.clients[name] = SimClient(self, name, host, tenant)
        return self.clients[name]

    @property
    def leader(self) -> str:
        """The process to connect to."""
        return MASTER

    def new_clock(self) -> SimClock:
        """A clock for one incarnation of a process."""
        random, faults = self.kernel.random, self.faults
        drift = random.uniform(-faults.clock_drift, faults.clock_drift)
        return SimClock(random.uniform(0.0, faults.clock_offset_s), 1.0 + drift)

    def segment(self, name: str, epoch: int) -> SimSegment | None:
        """The object that serves a segment, if it is still the one of this epoch."""
        node = self.nodes.get(name.partition("/")[0])
        segment = None if node is None else node.segments.get(name)
        return segment if segment is not None and segment.is_alive and segment.epoch == epoch else None
