# SPDX-License-Identifier: Apache-2.0
"""One run of the store under one seed: the cluster, the workload, the faults, and a calm end.

The first part is as rough as the seed says. Then everything heals, operators undo their requests, and the
cluster has to show that nothing is stuck: every operation has ended, each client can put and get, and what
was promised is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import msgspec

from mooncake.sim.faults import cluster_faults as faults_module
from mooncake.sim.faults import workload_mix as load_module
from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.disks import SimDisk
from mooncake.sim.faults.invariants import Invariant, Violation
from mooncake.sim.faults.mixed_workload import MixedWorkloadClient
from mooncake.sim.faults.store_cluster import StoreCluster
from mooncake.sim.faults.workload import TIMEOUT_S, WorkloadClient, several_replicas
from mooncake.sim.faults.workload_mix import WorkloadMix
from mooncake.sim.kernel import Kernel, Process
from mooncake.store import messages as m
from mooncake.store.master.objects import split_scoped

ROUGH_S = 60.0
CALM_S = 60.0
"""More than restarts, timeouts and quarantines take, one after the other."""
MAX_PAUSE_S = 15.0
"""For one process: a request that arrived then is still recognised as late (``history_checker.SLOW_S``)."""
QUIET_S = 20.0
"""Longer than leases, grace periods and the master's check of what is left."""
HOSTS = ("left", "right")


class StoreRun:
    """Prepare with a seed, then ``run()``. Faults and mix are drawn by the seed unless they are given.

    ``workload_mix.PLAIN`` as mix, without faults: only faults of the first kinds, as in old reports.
    """

    def __init__(
        self, seed: int, faults: ClusterFaults | None = None, load: WorkloadMix | None = None
    ) -> None:
        self.kernel = Kernel(seed)
        random = self.kernel.random
        # Later kinds are drawn from a source of their own, so that a seed without them stays what it was.
        further = Random(f"{seed} further")
        self.faults = faults if faults is not None else faults_module.draw(random)
        if faults is None and load is None:
            self.faults = faults_module.draw_further(self.faults, further)
        self.load = (
            load if load is not None else load_module.draw(further) if faults is None else load_module.PLAIN
        )
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
        """Raises Violation (or a core's AssertionError) with the seed in its message."""
        try:
            self._run()
        except AssertionError as error:
            last = "\n  ".join(self.kernel.trace[-12:])
            drawn = f"{self.faults}\n{self.load}"
            message = f"seed {self.kernel.seed} at {self.kernel.now:.6f}: {error}\n{drawn}\n  {last}"
            raise Violation(message, getattr(error, "rule", None) or Invariant.CORE) from error

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
        self.cluster.start_node(name, host, self._sizes[name])

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
            self.cluster.checkers.history.client_crashed(self.cluster.clients[name])
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
        for tenant in self.load.tenants:
            self._ask(m.SetQuota(tenant, None))
        self._restart_retired()

    def _restart_retired(self) -> None:
        """A node whose segment was drained and unmounted is restarted, with its SSD unchanged."""
        for name, node in self.cluster.nodes.items():
            if node.is_retired and node.is_alive:
                node.process.crash()
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
