"""One run of the store under one seed: the cluster, the work, the faults, and a calm end.

The first part is as rough as the seed says. Then everything heals, and the cluster has to show that
nothing is stuck: every operation has ended, and each client can put and get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mooncake.sim import faults as faults_module
from mooncake.sim.checkers import Violation
from mooncake.sim.clients import SimClient
from mooncake.sim.cluster import Cluster
from mooncake.sim.disks import SimDisk
from mooncake.sim.faults import Faults
from mooncake.sim.kernel import Kernel
from mooncake.sim.workload import TIMEOUT_S, Worker, several_replicas
from mooncake.store.settings import MasterSettings

SETTINGS = MasterSettings(
    lease_s=4.0, put_s=6.0, grace_s=2.0, heartbeat_s=0.5, segment_ttl_s=3.0, high_watermark=0.9
)
ROUGH_S = 60.0
CALM_S = 60.0
"""More than restarts, give-ups and rests take, one after the other."""
QUIET_S = 20.0
"""Longer than leases, graces and the master's look at what is left."""
HOSTS = ("left", "right")


class StoreRun:
    """Prepare with a seed (and faults, else the seed draws them), then ``run()``."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.kernel = Kernel(seed)
        random = self.kernel.random
        self.faults = faults if faults is not None else faults_module.draw(random)
        self.cluster = Cluster(self.kernel, self.faults, SETTINGS)
        self._is_rough = True
        self._num_clients = random.randint(2, 4)
        self._keys = [f"key{number}" for number in range(random.choice((4, 12, 40)))]
        self._max_bytes = random.choice((64, 700, 2000))
        pool_bytes = random.choice((4096, 16384, 65536))
        self._sizes = {f"node{number}": pool_bytes for number in range(random.randint(1, 3))}
        self._disks = {name: 4 * pool_bytes for name in self._sizes if random.random() < 0.6}
        self._workers: dict[str, Worker] = {}

    def _worker(self, client: SimClient) -> Worker:
        return Worker(client, self._keys, self._max_bytes)

    @property
    def counts(self) -> dict[str, int]:
        """What the clients saw."""
        return self.cluster.checkers.counts

    def run(self) -> None:
        """Raises Violation (or the assertion of a core) with the seed in its message."""
        try:
            self._run()
        except AssertionError as error:
            last = "\n  ".join(self.kernel.trace[-12:])
            message = f"seed {self.kernel.seed} at {self.kernel.now:.6f}: {error}\n{self.faults}\n  {last}"
            raise Violation(message) from error

    def _run(self) -> None:
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
        self.cluster.start_node(name, host, self._sizes[name])

    def _start_client(self, name: str) -> None:
        client = self.cluster.start_client(name, HOSTS[int(name[-1]) % len(HOSTS)])
        worker = self._workers[name] = self._worker(client)
        if not self._is_rough:
            worker.stop()

    # Faults

    def _plan_faults(self) -> None:
        faults = self.faults
        self._now_and_then(faults.partition_every_s, self._partition)
        self._now_and_then(faults.crash_master_every_s, self._crash_master)
        self._now_and_then(faults.crash_node_every_s, self._crash_node)
        self._now_and_then(faults.crash_client_every_s, self._crash_client)
        self._now_and_then(faults.corruption_every_s, self._corrupt)

    def _now_and_then(self, every_s: float, action: Callable[[], None]) -> None:
        self.kernel.now_and_then(every_s, action, lambda: self._is_rough)

    def _partition(self) -> None:
        names = ["master", *self.cluster.nodes, *self.cluster.clients]
        one, other = self.kernel.random.sample(names, 2)
        seconds = self.kernel.random.expovariate(1 / self.faults.partition_s)
        self.cluster.network.partition(one, other, seconds)

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
            self.cluster.checkers.ledger.node_crashed(name, loses_power)
            self._restart_later(lambda: self._start_node(name))

    def _crash_client(self) -> None:
        name = self.kernel.random.choice(list(self.cluster.clients))
        if self.cluster.clients[name].process.is_alive:
            self.cluster.clients[name].process.crash()
            self.cluster.checkers.ledger.client_crashed(self.cluster.clients[name])
            self._restart_later(lambda: self._start_client(name))

    def _corrupt(self) -> None:
        node = self.cluster.nodes[self.kernel.random.choice(list(self.cluster.nodes))]
        segment = self.kernel.random.choice(list(node.segments.values()))
        at = self.kernel.random.randrange(len(segment.bytes))
        segment.bytes[at] ^= 1 << self.kernel.random.randrange(8)
        self.kernel.tell(f"a bit falls at {at} of {segment.name}")

    # The calm end

    def _calm_down(self) -> None:
        self.kernel.tell("calm")
        self._is_rough = False
        self.cluster.network.heal()
        calm = Faults(
            has_checksums=self.faults.has_checksums,
            has_oplog=self.faults.has_oplog,
            clock_offset_s=self.faults.clock_offset_s,
            clock_drift=self.faults.clock_drift,
        )
        self.cluster.faults = self.cluster.network.faults = calm
        for disk in self.cluster.disks.values():
            disk.faults = calm
        for worker in self._workers.values():
            worker.stop()

    def _prove_health(self) -> None:
        for name, client in self.cluster.clients.items():
            if not client.process.is_alive:
                raise Violation(f"{name} was not started again")
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
                raise Violation(f"{name} can't put and get in a healed cluster: {results}")

    def _prove_promises(self) -> None:
        """Everything that was acknowledged and is still promised can be read."""
        if self.faults.corruption_every_s:
            return
        client = next(iter(self.cluster.clients.values()))
        ledger = self.cluster.checkers.ledger
        for key, value in ledger.promised().items():
            if key not in ledger.promised():
                continue  # evicted for the sake of those that were read before it
            results: list[list[int | None]] = []
            deadline = client.now + TIMEOUT_S
            operation = client.operations.get_into([key], [1000], [self._max_bytes], deadline)
            client.run(operation, deadline, lambda sizes, error, into=results: into.append(sizes))  # type: ignore[misc]
            self.kernel.run(self.kernel.now + 1.0)
            size = results[0][0] if results and results[0] else None
            got = None if size is None else bytes(client.memory[1000 : 1000 + size])
            if got is None or (value is not None and got != value):
                story = "\n    ".join(self.cluster.master.master.story(key))
                raise Violation(f"{key!r} was acknowledged and is lost: {results}\n    {story}")

    def _prove_convergence(self) -> None:
        """Nothing is half done: every copy is finished or given up, every byte taken is an object's, and
        each node's journal says of its segments what the master does."""
        master = self.cluster.master.master
        if master.objects.writing:
            raise Violation(f"still being written: {list(master.objects.writing.values())}")
        for stored in master.objects.readable.values():
            if not all(extent.is_complete for extent in stored.extents):
                raise Violation(f"{stored} is half copied: {stored.extents}")
        for segment in master.segments.mounted.values():
            if segment.num_tasks:
                raise Violation(f"{segment} has {segment.num_tasks} tasks left")
            owned = {
                extent.offset: stored.object_id
                for stored in master.objects.readable.values()
                for extent in stored.extents
                if extent.segment is segment
            }
            if owned.keys() != segment.allocator.allocations.keys():
                lost = segment.allocator.allocations.keys() - owned.keys()
                raise Violation(f"{segment}: space of nobody at {sorted(lost)}")
            served = self.cluster.segment(segment.name, segment.epoch)
            held = {} if served is None else {one.offset: one.object_id for one in served.entries()}
            if held != owned:
                wrong = sorted(held.items() ^ owned.items())
                raise Violation(f"{segment.name}: journal and master differ in {wrong[:8]}")


class ReplicasRun(StoreRun):
    """The same where nodes always fail and objects have several replicas, so that they survive it. Each
    client has keys of its own: the ledger knows what must be there."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        super().__init__(seed, faults)
        random = self.kernel.random
        if not self.faults.crash_node_every_s:
            every_s = random.choice((5.0, 10.0, 20.0))
            self.faults = dataclasses.replace(self.faults, crash_node_every_s=every_s)
            self.cluster = Cluster(self.kernel, self.faults, SETTINGS)
        pool_bytes = random.choice((16384, 65536))
        self._sizes = {f"node{number}": pool_bytes for number in range(random.randint(2, 4))}
        self._disks = {name: 4 * pool_bytes for name in self._sizes if random.random() < 0.3}
        self._own = {
            f"client{client}": [f"key{number} of {client}" for number in range(8)]
            for client in range(self._num_clients)
        }
        self._keys = [key for keys in self._own.values() for key in keys]

    def _worker(self, client: SimClient) -> Worker:
        return Worker(client, self._keys, self._max_bytes, self._own[client.name], several_replicas)
