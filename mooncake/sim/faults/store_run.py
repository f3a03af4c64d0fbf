# SPDX-License-Identifier: Apache-2.0
"""The store's world: the cluster on the kernel, and one run of it under one seed.

The cluster is a master, nodes and clients made of the cores that ship. Only the shells are simulated: a
connection carries encoded messages, a pool is a bytearray, a transfer copies slice by slice at instants of
its own, so that readers can see torn objects and writes can land after their writer has abandoned them. Every
process has a clock of its own.

The first part of a run is as rough as the seed says. Then everything heals, operators undo their requests,
and the cluster has to show that nothing is stuck: every operation has ended, each client can put and get, and
what was promised is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import msgspec

from mooncake.rpc.wire import decoder_for
from mooncake.sim.faults import cluster_faults
from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.disks import SimDisk
from mooncake.sim.faults.invariants import Checkers, Invariant, Violation
from mooncake.sim.faults.network import ConnectionEnd, Network, over_the_wire
from mooncake.sim.faults.nodes import SimNode, SimSegment
from mooncake.sim.faults.workload import (
    PLAIN,
    TIMEOUT_S,
    MixedWorkloadClient,
    WorkloadClient,
    WorkloadMix,
    draw_mix,
    several_replicas,
)
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
from mooncake.store.master.objects import split_scoped
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
            answers, origin = self._cluster.checkers.answers, (end, request_id)
            answers.received(self.master, origin, message, self.process.now)
            self._driver.post(Received(origin, end, message))
            answers.handled(self.master, message)
            if self._cluster.kernel.now < self.overloaded_until:
                self.process.pause(self._cluster.faults.handler_s)

        end.on_message = received
        end.on_closed = lambda reason: self._driver.post(ConnectionLost(end))

    def _perform(self, effect: Effect) -> None:
        if not self.process.is_alive:
            return  # it ended while it logged what comes before this
        if isinstance(effect, Reply):
            end, request_id = effect.origin
            self._cluster.checkers.answers.replied(self.master, effect.origin, effect.message)
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

    def start_node(self, name: str, host: str, size_bytes: int, device_bytes: int = 0) -> None:
        self.kernel.trace_line(f"{name} starts")
        self.nodes[name] = SimNode(self, name, host, size_bytes, self.disks.get(name), device_bytes)

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


ROUGH_S = 60.0
CALM_S = 60.0
"""More than restarts, timeouts and quarantines take, one after the other."""
MAX_PAUSE_S = 15.0
"""For one process: a request that arrived then is still recognised as late (``invariants.SLOW_S``)."""
QUIET_S = 20.0
"""Longer than leases, grace periods and the master's check of what is left."""
HOSTS = ("left", "right")


class StoreRun:
    """Prepare with a seed, then ``run()``. Faults and mix are drawn by the seed unless they are given.

    ``workload.PLAIN`` as mix, without faults: only faults of the first kinds, as in old reports.
    """

    def __init__(
        self, seed: int, faults: ClusterFaults | None = None, load: WorkloadMix | None = None
    ) -> None:
        self.kernel = Kernel(seed)
        random = self.kernel.random
        # Later kinds are drawn from a source of their own, so that a seed without them stays what it was.
        further = Random(f"{seed} further")
        self.faults = faults if faults is not None else cluster_faults.draw(random)
        if faults is None and load is None:
            self.faults = cluster_faults.draw_further(self.faults, further)
        self.load = load if load is not None else draw_mix(further) if faults is None else PLAIN
        self.cluster = StoreCluster(self.kernel, self.faults, self.load.settings())
        self._is_rough = True
        self._num_clients = random.randint(2, 4)
        self._keys = [f"key{number}" for number in range(random.choice((4, 12, 40)))]
        self._patterns = ["", "key1", "^key1", "2"]
        self._max_bytes = random.choice((64, 700, 2000))
        pool_bytes = random.choice((4096, 16384, 65536))
        self._sizes = {f"node{number}": pool_bytes for number in range(random.randint(1, 3))}
        self._disks = {name: 4 * pool_bytes for name in self._sizes if random.random() < 0.6}
        self._workers: dict[str, WorkloadClient] = {}

    def _worker(self, client: SimClient) -> WorkloadClient:
        return MixedWorkloadClient(client, self._keys, self._max_bytes, self.load, self._patterns)

    @property
    def counts(self) -> dict[str, int]:
        """The results that the clients saw."""
        return self.cluster.checkers.counts

    def run(self) -> None:
        """Raises Violation, with the seed in its message."""
        try:
            self._run()
        except Exception as error:
            raise Violation.of_run(error, self.kernel, self.faults, self.load) from error

    def _run(self) -> None:
        if len(self._disks) < len(self._sizes) and not self.load.evict_undemoted:
            # Otherwise memory without an SSD would stay full.
            self.load = dataclasses.replace(self.load, evict_undemoted=True)
            self.cluster = StoreCluster(self.kernel, self.faults, self.load.settings())
        for name, size_bytes in self._disks.items():
            self.cluster.disks[name] = SimDisk(self.kernel, self.faults, size_bytes)
        for name in self._sizes:
            self._start_node(name)
        for number in range(self._num_clients):
            self._start_client(f"client{number}")
        self._plan_faults()
        for _ in range(int(ROUGH_S)):
            self.kernel.run(self.kernel.now + 1.0)
            self.cluster.checkers.check_ends()
            self._restart_retired()
        self._calm_down()
        self.kernel.run(self.kernel.now + CALM_S)
        self.cluster.checkers.check_ends()
        self._prove_health()
        self._prove_promises()
        self.kernel.run(self.kernel.now + QUIET_S)
        self._prove_convergence()

    # Starting

    def _start_node(self, name: str) -> None:
        host = HOSTS[int(name[-1]) % len(HOSTS)]
        self.cluster.start_node(name, host, self._sizes[name], self.load.device_bytes)

    def _start_client(self, name: str) -> None:
        number, tenants = int(name[-1]), self.load.tenants
        tenant = tenants[number % len(tenants)]
        client = self.cluster.start_client(name, HOSTS[number % len(HOSTS)], tenant)
        worker = self._workers[name] = self._worker(client)
        if not self._is_rough:
            worker.stop()

    # Faults

    def _plan_faults(self) -> None:
        faults = self.faults
        self.cluster.on_master_lost = lambda: self._restart_later(self.cluster.start_master)
        self._now_and_then(faults.partition_every_s, self._partition)
        self._now_and_then(faults.crash_master_every_s, self._crash_master)
        self._now_and_then(faults.crash_node_every_s, self._crash_node)
        self._now_and_then(faults.crash_client_every_s, self._crash_client)
        self._now_and_then(faults.corruption_every_s, self._corrupt)
        self._now_and_then(faults.one_way_every_s, self._cut_off)
        self._now_and_then(faults.split_every_s, self._split)
        self._now_and_then(faults.pause_master_every_s, lambda: self._pause(self.cluster.master.process))
        self._now_and_then(faults.pause_node_every_s, self._pause_node)
        self._now_and_then(faults.pause_client_every_s, self._pause_client)
        self._now_and_then(faults.overload_every_s, self._overload)
        self._now_and_then(faults.full_disk_every_s, self._fill_disk)
        self._now_and_then(faults.slow_node_every_s, self._slow_down)
        self._now_and_then(faults.leave_node_every_s, self._leave)

    def _now_and_then(self, every_s: float, action: Callable[[], None]) -> None:
        self.kernel.repeat_at_random(every_s, action, lambda: self._is_rough)

    @property
    def _names(self) -> list[str]:
        return ["master", *self.cluster.nodes, *self.cluster.clients]

    def _partition(self) -> None:
        one, other = self.kernel.random.sample(self._names, 2)
        seconds = self._partition_seconds()
        self.cluster.network.partition(one, other, seconds)

    def _partition_seconds(self) -> float:
        """Draw the length of a partition.

        What it holds arrives when it was to end, even where the calm part heals it, so none outlasts half of
        that part.
        """
        seconds = self.kernel.random.expovariate(1 / self.faults.partition_s)
        return min(seconds, ROUGH_S + CALM_S / 2 - self.kernel.now)

    def _cut_off(self) -> None:
        sender, receiver = self.kernel.random.sample(self._names, 2)
        seconds = self._partition_seconds()
        self.cluster.network.cut_off([sender], [receiver], seconds)

    def _split(self) -> None:
        names = self._names
        some = self.kernel.random.sample(names, self.kernel.random.randint(1, len(names) - 1))
        seconds = self._partition_seconds()
        self.cluster.network.split(some, [name for name in names if name not in some], seconds)

    def _pause(self, process: Process, *, may_stop: bool = False) -> None:
        if not process.is_alive:
            return
        random = self.kernel.random
        seconds = min(random.expovariate(1 / self.faults.pause_s), MAX_PAUSE_S)
        is_stopped = may_stop and self.faults.may_write_late and random.random() < 0.5
        self.kernel.trace_line(
            f"{process.name} {'is stopped' if is_stopped else 'pauses'} for {seconds:.2f} s"
        )
        process.pause(seconds, is_stopped=is_stopped)

    def _pause_node(self) -> None:
        node = self.cluster.nodes[self.kernel.random.choice(list(self.cluster.nodes))]
        self._pause(node.process, may_stop=True)

    def _pause_client(self) -> None:
        client = self.cluster.clients[self.kernel.random.choice(list(self.cluster.clients))]
        self._pause(client.process, may_stop=True)

    def _outage_s(self) -> float:
        return self.kernel.random.expovariate(1 / self.faults.outage_s)

    def _overload(self) -> None:
        seconds = self._outage_s()
        self.kernel.trace_line(f"the master is overloaded for {seconds:.2f} s")
        self.cluster.master.overloaded_until = self.kernel.now + seconds

    def _fill_disk(self) -> None:
        if self.cluster.disks:
            name, seconds = self.kernel.random.choice(list(self.cluster.disks)), self._outage_s()
            self.kernel.trace_line(f"the disk of {name} is full for {seconds:.2f} s")
            self.cluster.disks[name].fill(seconds)

    def _slow_down(self) -> None:
        name, seconds = self.kernel.random.choice(list(self.cluster.nodes)), self._outage_s()
        self.kernel.trace_line(f"{name} is slow for {seconds:.2f} s")
        self.cluster.nodes[name].slow_until = self.kernel.now + seconds

    def _leave(self) -> None:
        name = self.kernel.random.choice(list(self.cluster.nodes))
        node = self.cluster.nodes[name]
        if not node.is_alive or node.is_leaving:
            return
        self.kernel.trace_line(f"{name} leaves")

        def left() -> None:
            self.cluster.checkers.history.node_crashed(name, has_lost_power=False)
            self._restart_later(lambda: self._start_node(name))

        node.leave(left)

    def _restart_later(self, start: Callable[[], None]) -> None:
        self.kernel.after(self.kernel.random.expovariate(1 / self.faults.restart_s), start)

    def _crash_master(self) -> None:
        if self.cluster.master.process.is_alive:
            self.cluster.master.process.crash()
            self._restart_later(self.cluster.start_master)

    def _crash_node(self) -> None:
        name = self.kernel.random.choice(list(self.cluster.nodes))
        if self.cluster.nodes[name].is_alive:
            self.cluster.nodes[name].process.crash()
            loses_power = name in self.cluster.disks and self.kernel.chance(self.faults.power_loss_chance)
            if loses_power:
                self.cluster.disks[name].lose_power()
            self.cluster.checkers.history.node_crashed(name, loses_power)
            self._restart_later(lambda: self._start_node(name))

    def _crash_client(self) -> None:
        name = self.kernel.random.choice(list(self.cluster.clients))
        if self.cluster.clients[name].process.is_alive:
            self.cluster.clients[name].process.crash()
            self.cluster.checkers.client_crashed(self.cluster.clients[name])
            self._restart_later(lambda: self._start_client(name))

    def _corrupt(self) -> None:
        node = self.cluster.nodes[self.kernel.random.choice(list(self.cluster.nodes))]
        segment = self.kernel.random.choice(list(node.segments.values()))
        at = self.kernel.random.randrange(len(segment.bytes))
        segment.bytes[at] ^= 1 << self.kernel.random.randrange(8)
        self.kernel.trace_line(f"a bit flips at {at} of {segment.name}")

    # The calm end

    def _calm_down(self) -> None:
        self.kernel.trace_line("calm")
        self._is_rough = False
        self.cluster.network.heal()
        calm = self.faults.calmed
        self.cluster.faults = self.cluster.network.faults = calm
        for disk in self.cluster.disks.values():
            disk.faults = calm
            disk.full_until = 0.0
        for node in self.cluster.nodes.values():
            node.slow_until = 0.0
        self.cluster.master.overloaded_until = 0.0
        for worker in self._workers.values():
            worker.stop()
        if self.load.drain or self.load.quota:
            for share in (0.5, 0.75):  # the requesting process may not have been restarted by then
                self.kernel.after(share * CALM_S, self._undo_requests)

    def _undo_requests(self) -> None:
        """Undo operators' requests: drained segments accept objects again, and quotas end."""
        # The number of some is unknown, because the answer was lost; each may have been begun twice.
        for job_id in range(1, 2 * self.cluster.num_jobs + 1):
            self._ask(m.AskJob(job_id, cancel=True))
        self.cluster.checkers.answers.quotas_unknown()
        for tenant in self.load.tenants:
            self._ask(m.SetQuota(tenant, None))
        self._restart_retired()

    def _restart_retired(self) -> None:
        """A node whose segment was drained and unmounted is restarted, with its SSD unchanged."""
        for name, node in self.cluster.nodes.items():
            if node.is_retired and node.is_alive:
                node.process.crash()
                self.cluster.checkers.has_restarts = True
                self.cluster.checkers.history.node_crashed(name, has_lost_power=False)
                self._restart_later(lambda name=name: self._start_node(name))  # type: ignore[misc]

    def _ask(self, message: msgspec.Struct) -> None:
        alive = [client for client in self.cluster.clients.values() if client.process.is_alive]
        client = alive[0] if alive else next(iter(self.cluster.clients.values()))
        deadline = client.now + TIMEOUT_S
        client.run(client.operations.ask(message, deadline), deadline, lambda reply, error: None)

    def _prove_health(self) -> None:
        for name, client in self.cluster.clients.items():
            if not client.process.is_alive:
                raise Violation(f"{name} was not started again", Invariant.HEALTH)
            key, value = f"proof of {name}", name.encode()
            client.memory[: len(value)] = value
            address, deadline = 1000, client.now + TIMEOUT_S
            results: list[object] = []

            def collect(result: object, error: Exception | None, results: list[object] = results) -> None:
                results.append(error if error is not None else result)

            operations = client.operations
            client.run(operations.put([key], [0], [len(value)], 256, deadline), deadline, collect)
            self.kernel.run(self.kernel.now + 1.0)
            client.run(operations.get_into([key], [address], [100], deadline), deadline, collect)
            self.kernel.run(self.kernel.now + 1.0)
            got = bytes(client.memory[address : address + len(value)])
            if results != [[None], [len(value)]] or got != value:
                raise Violation(f"{name} can't put and get in a healed cluster: {results}", Invariant.HEALTH)

    def _prove_promises(self) -> None:
        """Everything that was acknowledged and is still promised can be read."""
        if self.faults.corruption_every_s or self.faults.may_write_late:
            return
        clients = {client.tenant: client for client in self.cluster.clients.values()}
        history = self.cluster.checkers.history
        for key, value in history.promised().items():
            if key not in history.promised():
                continue  # evicted to make room for those that were read before it
            results: list[list[int | None]] = []
            tenant, name = split_scoped(key)
            client = clients[tenant]
            deadline = client.now + TIMEOUT_S
            operation = client.operations.get_into([name], [1000], [self._max_bytes], deadline)
            client.run(operation, deadline, lambda sizes, error, into=results: into.append(sizes))  # type: ignore[misc]
            self.kernel.run(self.kernel.now + 1.0)
            size = results[0][0] if results and results[0] else None
            got = None if size is None else bytes(client.memory[1000 : 1000 + size])
            if got is None or (value is not None and got != value):
                story = "\n    ".join(self.cluster.master.master.story(key))
                raise Violation(
                    f"{key!r} was acknowledged and is lost: {results}\n    {story}", Invariant.PROMISE
                )

    def _prove_convergence(self) -> None:
        """Nothing is half done: every copy is finished or abandoned, every allocated byte belongs to an
        object, and each node's journal agrees with the master about its segments."""
        master = self.cluster.master.master
        if master.objects.writing:
            raise Violation(
                f"still being written: {list(master.objects.writing.values())}", Invariant.WRITING
            )
        for stored in master.objects.readable.values():
            if not all(extent.is_complete for extent in stored.extents):
                raise Violation(f"{stored} is half copied: {stored.extents}", Invariant.COPYING)
        readable = list(master.objects.readable.values())
        # A durable object stays on SSD until its replacement is durable: never, where no SSD has room.
        superseded = [stored.before for stored in readable if stored.before is not None]
        for segment in master.segments.mounted.values():
            if segment.num_tasks:
                raise Violation(f"{segment} has {segment.num_tasks} tasks left", Invariant.COPYING)
            owned = {
                extent.offset: stored.object_id
                for stored in (*readable, *superseded)
                for extent in stored.extents
                if extent.segment is segment
            }
            if owned.keys() != segment.allocator.allocations.keys():
                lost = segment.allocator.allocations.keys() - owned.keys()
                raise Violation(f"{segment}: leaked space at {sorted(lost)}", Invariant.LEAK)
            served = self.cluster.segment(segment.name, segment.epoch)
            held = {} if served is None else {one.offset: one.object_id for one in served.entries()}
            if held != owned:
                wrong = sorted(held.items() ^ owned.items())
                what = f"{segment.name}: journal and master differ in {wrong[:8]}"
                raise Violation(what, Invariant.JOURNAL)


class ReplicasRun(StoreRun):
    """The same where nodes always fail and objects have several replicas, so that they survive it. Each
    client has keys of its own: the history checker knows what must be there."""

    def __init__(
        self, seed: int, faults: ClusterFaults | None = None, load: WorkloadMix | None = None
    ) -> None:
        super().__init__(seed, faults, load)
        random = self.kernel.random
        if not self.faults.crash_node_every_s:
            every_s = random.choice((5.0, 10.0, 20.0))
            self.faults = dataclasses.replace(self.faults, crash_node_every_s=every_s)
            self.cluster = StoreCluster(self.kernel, self.faults, self.load.settings())
        pool_bytes = random.choice((16384, 65536))
        self._sizes = {f"node{number}": pool_bytes for number in range(random.randint(2, 4))}
        self._disks = {name: 4 * pool_bytes for name in self._sizes if random.random() < 0.3}
        self._own = {
            f"client{client}": [f"key{number} of {client}" for number in range(8)]
            for client in range(self._num_clients)
        }
        self._keys = [key for keys in self._own.values() for key in keys]

    def _worker(self, client: SimClient) -> WorkloadClient:
        own, number = self._own[client.name], client.name[-1]
        patterns = [f" of {number}", f"1 of {number}", f"^key2 of {number}"]
        return MixedWorkloadClient(
            client, self._keys, self._max_bytes, self.load, patterns, own, several_replicas
        )
