"""The store's cluster on the kernel: a master, nodes and clients made of the cores that ship.

Simulated are only the shells: a connection carries encoded messages, a pool is a bytearray, a transfer
copies slice by slice at instants of its own, so that readers can see torn objects and writes can land
after their writer gave up. Every process has a clock of its own.
"""

from __future__ import annotations

import msgspec

from mooncake.rpc.wire import decoder_for
from mooncake.sim.checkers import Checkers
from mooncake.sim.clients import SimClient
from mooncake.sim.disks import SimDisk
from mooncake.sim.faults import Faults
from mooncake.sim.kernel import Clock, Kernel, Process, SimDriver
from mooncake.sim.links import End, Network, over_the_wire
from mooncake.sim.nodes import SimNode, SimSegment
from mooncake.store import messages as m
from mooncake.store.effects import ConnectionLost, Effect, Event, Keep, Note, Received, Reply
from mooncake.store.master import Master
from mooncake.store.objects import Extent, StoredObject
from mooncake.store.records import decode, encode
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier

MASTER = "master"

_replies = decoder_for(m.REPLIES)


class SimMaster:
    """One life of the master process."""

    def __init__(self, cluster: Cluster) -> None:
        self.process = Process(cluster.kernel, MASTER, cluster.new_clock())
        # As the server does it: later lives begin with larger numbers.
        first_object_id = int(cluster.kernel.now * 1000) + 1 << 20 | cluster.kernel.random.getrandbits(20)
        self.master = Master(cluster.settings, first_object_id)
        self._cluster = cluster
        if cluster.faults.has_oplog:
            records, _ = decode(bytes(cluster.oplog))
            self.master.restore(records, self.process.now)
            cluster.oplog[:] = encode(self.master.snapshot())
            self.master.check()
        self._driver: SimDriver[Event, Effect] = SimDriver(self.process, self.master, self._perform)
        self._driver.after_step = lambda: cluster.checkers.master_stepped(self.master)
        self.master.catalog.on_left.append(self._left)
        cluster.network.listen(MASTER, self.process, self._accept)

    def _left(self, stored: StoredObject, extent: Extent, _: float) -> None:
        if self.master.catalog.is_evicting and extent.segment.tier is Tier.MEMORY:
            self._cluster.checkers.ledger.evicted(stored.key, extent.segment.node)

    def _accept(self, end: End) -> None:
        def received(frame: tuple[int, msgspec.Struct]) -> None:
            request_id, message = frame
            self._driver.post(Received((end, request_id), end, message))

        end.on_message = received
        end.on_closed = lambda reason: self._driver.post(ConnectionLost(end))

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            end, request_id = effect.origin
            end.send((request_id, over_the_wire(effect.message, _replies)))
        elif isinstance(effect, Keep):
            self._cluster.oplog += encode(effect.records)
        elif isinstance(effect, Note):
            fields = {name: value for name, value in effect.fields.items() if name != "host"}
            self._cluster.kernel.tell(f"master: {effect.event} {fields}")


class Cluster:
    """Everything that runs under one seed."""

    def __init__(self, kernel: Kernel, faults: Faults, settings: MasterSettings) -> None:
        self.kernel = kernel
        self.faults = faults
        self.settings = settings
        self.network = Network(kernel, faults)
        self.oplog = bytearray()
        """What the master wrote down, if it does; outlives its process."""
        self.nodes: dict[str, SimNode] = {}
        self.disks: dict[str, SimDisk] = {}
        """By node; they outlive it."""
        self.clients: dict[str, SimClient] = {}
        self.checkers = Checkers(self)
        self.master = SimMaster(self)

    def start_master(self) -> None:
        self.kernel.tell("master starts")
        self.checkers.ledger.master_crashed()
        self.checkers.master_died(self.master.master)
        self.master = SimMaster(self)
        self.checkers.master_started()

    def start_node(self, name: str, host: str, size_bytes: int) -> None:
        self.kernel.tell(f"{name} starts")
        self.nodes[name] = SimNode(self, name, host, size_bytes, self.disks.get(name))

    def start_client(self, name: str, host: str) -> SimClient:
        self.kernel.tell(f"{name} starts")
        self.clients[name] = SimClient(self, name, host)
        return self.clients[name]

    @property
    def leader(self) -> str:
        """Whom to connect to."""
        return MASTER

    def new_clock(self) -> Clock:
        """For one life of a process."""
        random, faults = self.kernel.random, self.faults
        drift = random.uniform(-faults.clock_drift, faults.clock_drift)
        return Clock(random.uniform(0.0, faults.clock_offset_s), 1.0 + drift)

    def segment(self, name: str, epoch: int) -> SimSegment | None:
        """Whoever serves it, if that is still the one of this epoch."""
        node = self.nodes.get(name.partition("/")[0])
        segment = None if node is None else node.segments.get(name)
        return segment if segment is not None and segment.is_alive and segment.epoch == epoch else None
