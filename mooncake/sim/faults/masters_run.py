# SPDX-License-Identifier: Apache-2.0
"""The world of several masters: elections, logs, standbys, nodes and clients, and one run under one seed.

Masters elect a leader, nodes contribute memory and SSD to it, clients use the store. Nodes, clients and their
checkers are those of the store's world; the record that the masters elect by answers late, applies a request
without answering, or is unreachable.

The first part of a run is as rough as the seed says. Then everything heals, and the run has to show that one
master leads and all others are in sync with it, that each client can put and get, and that nothing
acknowledged is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random
from typing import Any

from mooncake.rpc.wire import Failure
from mooncake.sim.faults import cluster_faults
from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.cluster_faults import MASTERS_SETTINGS, MastersFaults
from mooncake.sim.faults.disks import SimDirectory, SimDisk
from mooncake.sim.faults.invariants import Invariant, SpaceGrant, Violation
from mooncake.sim.faults.masters_checkers import MastersCheckers, ReplicationChecker
from mooncake.sim.faults.masters_host import MasterHost
from mooncake.sim.faults.network import LEASE_STORE, MASTERS, DirectedNetwork, is_not_leader, over_the_wire
from mooncake.sim.faults.nodes import SimNode, requests
from mooncake.sim.faults.store_run import StoreCluster
from mooncake.sim.faults.workload import TIMEOUT_S, WorkloadClient, any_policy
from mooncake.sim.kernel import Kernel
from mooncake.store import messages as m
from mooncake.store.client.effects import CallMaster
from mooncake.store.client.grants import ReadGrant
from mooncake.store.ha import election as el
from mooncake.store.ha.leader_search import DOUBT_S, PAUSE_S
from mooncake.store.settings import MasterSettings


class SimLeaseStore:
    """The leader's record, and the service that keeps it."""

    def __init__(self, world: MastersCluster) -> None:
        self._world = world
        self.record: bytes | None = None

    def ask(
        self, host: MasterHost, effect: el.ReadLease | el.CompareAndSet, answered: Callable[[el.Event], None]
    ) -> None:
        world, random, faults = self._world, self._world.kernel.random, self._world.faults_of_masters
        patience_s = host.settings.election_lease_s / 4
        arrives_s = random.expovariate(200) + world.network.held_s(host.name, LEASE_STORE)
        if random.random() < faults.lease_store_slow_chance:
            arrives_s += random.uniform(0, 4)
        answers_s = arrives_s + random.expovariate(200) + world.network.held_s(LEASE_STORE, host.name)
        answer: list[el.Event] = []

        def happens() -> None:
            if isinstance(effect, el.ReadLease):
                answer.append(el.LeaseRead(self.record))
                return
            answer.append(el.CompareAndSetDone(self.record == effect.old))
            if self.record == effect.old:
                self.record = effect.new

        if random.random() >= faults.lease_store_loss_chance:
            world.kernel.after(arrives_s, happens)
        is_answered = answers_s < patience_s and random.random() >= faults.lease_store_loss_chance

        def ended() -> None:
            answered(answer[0] if is_answered and answer else el.NoAnswer("no answer"))

        host.process.after(answers_s + 1e-6 if is_answered else patience_s, ended)


class MastersClient(SimClient):
    """Finds the master that leads, and finds it again after a change."""

    def __init__(self, cluster: StoreCluster, name: str, host: str, tenant: str = "") -> None:
        super().__init__(cluster, name, host, tenant)
        self._frames: dict[int, tuple[int, Any]] = {}
        """Request id -> what was sent and is not answered yet."""

    def _ask(self, effect: CallMaster, resume: Callable[[Any], None]) -> None:
        super()._ask(effect, resume)
        number = self._last_id
        self._frames = {one: frame for one, frame in self._frames.items() if one in self._waiting}
        self._frames[number] = (number, over_the_wire(effect.message, requests))
        self.process.after(DOUBT_S, lambda: self._check_leader(number))

    def _check_leader(self, number: int) -> None:
        if number in self._waiting and self._end is not None:
            self._resend(number, "")

    def _replied(self, frame: tuple[int, Any]) -> None:
        number, reply = frame
        if number in self._waiting and is_not_leader(reply):
            assert isinstance(reply, Failure)
            self._resend(number, reply.message)
        else:
            super()._replied(frame)

    def _resend(self, number: int, leader: str) -> None:
        """Send again to the current leader. Other requests on the connection are lost with it."""
        network = self.cluster.network
        assert isinstance(network, DirectedNetwork)
        network.hints[self.name] = leader
        end, self._end = self._end, None
        if end is not None:
            end.on_message = end.on_closed = None
            end.close()
        if number in self._frames:
            self._queued.append(self._frames[number])
        self._lost("it does not lead")
        self.process.after(0.0 if leader else PAUSE_S, lambda: self._connect() if self._queued else None)


class MastersCluster(StoreCluster):
    """Everything that runs under one seed."""

    network: DirectedNetwork

    def __init__(self, kernel: Kernel, faults: MastersFaults, settings: dict[str, MasterSettings]) -> None:
        self.kernel = kernel
        self.faults_of_masters = faults
        self.faults = faults.cluster
        self.network = DirectedNetwork(kernel, faults.cluster, list(settings))
        self.nodes: dict[str, SimNode] = {}
        self.disks: dict[str, SimDisk] = {}
        self.clients: dict[str, SimClient] = {}
        self.checkers: MastersCheckers = MastersCheckers(self)
        self.replication = ReplicationChecker(self)
        self.lease_store = SimLeaseStore(self)
        self.counts: dict[str, int] = {
            "terms": 0,
            "terms that began with nothing": 0,
            "failed logs": 0,
            "crashes": 0,
            "pauses": 0,
        }
        self.hosts: dict[str, MasterHost] = {}
        self.settings_of = settings
        self.directories: dict[str, SimDirectory | None] = {}
        self.wall_s: dict[str, float] = dict.fromkeys(settings, 0.0)
        """Offset of each master's wall clock."""
        self.is_old: dict[str, bool] = dict.fromkeys(settings, False)
        self.has_forgotten: dict[str, bool] = {}
        """Masters whose logs have lost their ends, and that have neither led nor followed since."""
        self._last: MasterHost | None = None

    @property
    def leader(self) -> str:
        return MASTERS

    @property
    def master(self) -> MasterHost:  # type: ignore[override]
        """The master that led last."""
        assert self._last is not None
        return self._last

    def start_master_of(self, name: str) -> MasterHost:
        self.trace_line(f"{name} starts")
        directory = self.directories[name]
        host = MasterHost(self, name, self.settings_of[name], directory, self.is_old[name])
        self.hosts[name] = host
        if self._last is None:
            self._last = host
        return host

    def start_client(self, name: str, host: str, tenant: str = "") -> SimClient:
        self.trace_line(f"{name} starts")
        self.clients[name] = MastersClient(self, name, host, tenant)
        return self.clients[name]

    def first_id(self, name: str) -> int:
        """As ``server.py`` derives it from the wall clock."""
        random = self.kernel.random
        wall_s = 1e6 + self.kernel.now + self.wall_s[name]
        return (int(max(0.0, wall_s) * 1000) << 20) + random.getrandbits(20)

    def led(self, host: MasterHost, is_complete: bool) -> None:
        self.counts["terms"] += 1
        self.counts["terms that began with nothing"] += not is_complete
        self.trace_line(f"{host.name} leads in term {host.election.term}, complete: {is_complete}")
        record = host.election.record
        has_forgotten = self.has_forgotten.pop(host.name, False) and is_complete
        has_forgotten = has_forgotten and record is not None and not record.standbys
        if has_forgotten:
            self.trace_line(f"{host.name} may have lost the end of its log, and no standby was listed")
            self.replication.log_end_lost()
            self.checkers.forget_promises()
        before = self._last.master if self._last is not None and self._last is not host else None
        self.replication.led(host, is_complete)
        self._last = host
        self.checkers.took_over(host.master, is_complete and not has_forgotten, before)

    def lost_power(self, host: MasterHost) -> None:
        """The end of its log may be lost; no other master has it when no standby was listed."""
        self.has_forgotten[host.name] = True

    def trace_line(self, line: str) -> None:
        self.kernel.trace_line(line)


def without_faults(faults: MastersFaults) -> MastersFaults:
    calm = dataclasses.replace(
        type(faults.cluster)(),
        has_oplog=True,
        clock_offset_s=faults.cluster.clock_offset_s,
        clock_drift=faults.cluster.clock_drift,
    )
    return MastersFaults(cluster=calm, forbids_orphans=faults.forbids_orphans)


ROUGH_S = 40.0
CALM_S = 30.0
WRITE_BACK_S = 3.0
"""Interval at which the system writes appended log data to disk by itself, without a sync."""
ADMIN_REQUEST_S = 1.5
"""Mean time between two requests of operators."""


class MastersWorkloadClient(WorkloadClient):
    """A client with many small puts and removals, few large ones, and views that stay open for long."""

    def __init__(self, *given: Any, durable_small_puts: float) -> None:
        self._seen: dict[int, None] = {}
        """Object ids of views that were opened."""
        super().__init__(*given, durable_small_puts=durable_small_puts)

    def _next(self, *_: object) -> None:
        if self.is_stopped:
            return
        random = self._kernel.random
        work = random.choices(
            (self._put, self._put_small, self._get, self._put_parts, self._look, self._remove, self._pin),
            (4, 3, 5, 1, 3, 2, 0.5),
        )[0]
        self._client.process.after(random.uniform(0.1, 1.0), work)

    def _look_again(
        self, grant: ReadGrant, first: bytes, promises: list[SpaceGrant], num_renewals: int
    ) -> None:
        if grant.object_id not in self._seen:
            self._seen[grant.object_id] = None
            num_renewals = self._kernel.random.choice((num_renewals, 5))
            if self._kernel.chance(0.5):
                self._move(grant)
        super()._look_again(grant, first, promises, num_renewals)

    def _move(self, grant: ReadGrant) -> None:
        """Move its replica to another node while it is being read."""
        here = grant.segment.node.name
        others = [name for name in self._client.cluster.nodes if name != here]
        world = self._client.cluster
        assert isinstance(world, MastersCluster)
        if others and not any(world.is_old.values()):  # an older version drops the owner of the replica
            message = m.CopyObject(grant.key, [self._kernel.random.choice(others)], grant.segment.name)
            operation = self._client.operations.ask(message, self._deadline)
            self._client.run(operation, self._deadline, lambda result, error: None)


class MastersRun:
    """Prepare with a seed (and faults, else the seed draws them), then ``run()``."""

    def __init__(self, seed: int, faults: MastersFaults | None = None) -> None:
        self.kernel = Kernel(seed)
        random = self.kernel.random
        self.faults = faults if faults is not None else cluster_faults.draw_among_masters(random)
        names = [f"master{number}" for number in range(random.choice((2, 3, 3)))]
        settings = MASTERS_SETTINGS
        if self.faults.forbids_orphans:
            settings = dataclasses.replace(settings, orphan_s=0.0)
        self.world = MastersCluster(self.kernel, self.faults, dict.fromkeys(names, settings))
        has_logs = self.faults.forbids_orphans or random.random() < 0.8
        for name in names:
            has_log = has_logs and (self.faults.forbids_orphans or random.random() < 0.9)
            directory = SimDirectory(random, f"/{name}") if has_log else None
            if directory is not None:
                directory.delay_s = self._slow
            self.world.directories[name] = directory
            self.world.is_old[name] = random.random() < self.faults.old_chance
        if self.faults.settings_every_s and not any(self.world.is_old.values()):
            for name in names:  # the last change of settings has reached some of them
                if random.random() < 0.5:
                    settings = cluster_faults.other_settings(settings, random)
                self.world.settings_of[name] = settings
        self._is_rough = True
        pool_bytes = random.choice((8192, 16384))
        self._sizes = {f"node{number}": pool_bytes for number in range(random.randint(1, 2))}
        self._disks = {name: 4 * pool_bytes for name in self._sizes if random.random() < 0.5}
        self._max_bytes = random.choice((200, 700))
        # From sources of their own, so that a seed without them stays what it was.
        self._device_bytes = Random(f"{seed} devices").choice((0, 0, 0, 1024))
        self._durable_small_puts = Random(f"{seed} durable").choice((0.0, 0.0, 0.5))
        self._own = {
            f"client{client}": [f"key{number} of {client}" for number in range(6)] for client in range(2)
        }
        self._workers: dict[str, WorkloadClient] = {}
        self._numbers = 0
        self._restarting: dict[str, None] = {}

    @property
    def counts(self) -> dict[str, int]:
        return {**self.world.counts, **self.world.checkers.counts}

    def run(self) -> None:
        """Raises Violation, with the seed in its message."""
        try:
            self._run()
        except Exception as error:
            raise Violation.of_run(error, self.kernel, self.faults, num_lines=16) from error

    def _run(self) -> None:
        world = self.world
        for name in world.settings_of:
            world.start_master_of(name)
        for name, size_bytes in self._disks.items():
            world.disks[name] = SimDisk(self.kernel, world.faults, size_bytes)
        for name in self._sizes:
            self._start_node(name)
        for name in self._own:
            self._start_client(name)
        self._plan_faults()
        self._let_pass(ROUGH_S)
        self._calm_down()
        self._let_pass(CALM_S)
        self._prove_health()
        self._prove_promises()

    def _let_pass(self, seconds: float) -> None:
        """Check at every instant at which something may change."""
        kernel, replication = self.kernel, self.world.replication
        end = kernel.now + seconds
        checked_at = kernel.now
        while kernel.now < end:
            kernel.run_one(end)
            replication.check_leaders()
            if kernel.now >= checked_at + 1.0:
                checked_at = kernel.now
                self.world.checkers.check_ends()

    # Starting

    def _start_node(self, name: str) -> None:
        self.world.start_node(name, f"host of {name}", self._sizes[name], self._device_bytes)

    def _start_client(self, name: str) -> None:
        client = self.world.start_client(name, f"host of node{int(name[-1]) % len(self._sizes)}")
        keys = [key for keys in self._own.values() for key in keys]
        self._workers[name] = MastersWorkloadClient(
            client,
            keys,
            self._max_bytes,
            self._own[name],
            any_policy,
            durable_small_puts=self._durable_small_puts,
        )
        if not self._is_rough:
            self._workers[name].stop()

    def _start_master(self, name: str) -> None:
        if not self.world.hosts[name].is_alive:
            self.world.start_master_of(name)

    # Faults

    def _plan_faults(self) -> None:
        faults = self.faults
        for every_s, action in (
            (faults.crash_every_s, self._crash_master),
            (faults.stop_every_s, self._stop_master),
            (faults.pause_every_s, self._pause_master),
            (faults.step_every_s, self._step_clock),
            (faults.cut_every_s, self._cut),
            (faults.full_every_s, self._fill_disk),
            (faults.broken_every_s, self._break_disk),
            (faults.settings_every_s, self._change_settings),
            (faults.cluster.crash_node_every_s, self._crash_node),
            (faults.cluster.crash_client_every_s, self._crash_client),
            (ADMIN_REQUEST_S, self._make_admin_request),
        ):
            self.kernel.repeat_at_random(every_s, action, lambda: self._is_rough)
        self.kernel.repeat_at_random(WRITE_BACK_S, self._write_back, lambda: True)
        self._look_after_masters()

    def _look_after_masters(self) -> None:
        """A supervisor restarts each master that has ended."""
        for name, host in self.world.hosts.items():
            if not host.is_alive and name not in self._restarting:
                self._restarting[name] = None
                self._later(self.faults.restart_s, lambda name=name: self._restart(name))  # type: ignore[misc]
        self.kernel.after(0.2, self._look_after_masters)

    def _restart(self, name: str) -> None:
        self._restarting.pop(name, None)
        directory = self.world.directories[name]
        if directory is not None:
            directory.crash()
        self._start_master(name)

    def _later(self, mean_s: float, action: Callable[[], None]) -> None:
        self.kernel.after(self.kernel.random.expovariate(1 / mean_s), action)

    def _any_master(self) -> MasterHost:
        """The leader more often than another."""
        hosts = list(self.world.hosts.values())
        acting = [host for host in hosts if host.acts]
        return acting[0] if acting and self.kernel.chance(0.5) else self.kernel.random.choice(hosts)

    def _crash_master(self) -> None:
        host = self._any_master()
        if not host.is_alive:
            return
        self.world.counts["crashes"] += 1
        host.process.crash()
        if host.directory is not None and self.kernel.chance(self.faults.power_loss_chance):
            host.directory.lose_power()
            self.world.lost_power(host)

    def _stop_master(self) -> None:
        host = self._any_master()
        self.world.trace_line(f"{host.name} receives SIGTERM")
        host.process.do(host.resign)

    def _pause_master(self) -> None:
        host, random = self._any_master(), self.kernel.random
        self.world.counts["pauses"] += 1
        seconds = random.expovariate(1 / self.faults.pause_s)
        self.world.trace_line(f"{host.name} is paused for {seconds:.3f} s")
        host.process.suspend(seconds)

    def _step_clock(self) -> None:
        name, random = self._any_master().name, self.kernel.random
        step_s = random.uniform(-1, 1) * self.faults.step_s
        self.world.trace_line(f"the wall clock of {name} is set by {step_s:.3f} s")
        self.world.wall_s[name] = step_s

    def _cut(self) -> None:
        random = self.kernel.random
        names = [*self.world.hosts, *self.world.nodes, *self.world.clients, LEASE_STORE]
        random.shuffle(names)
        group = names[: random.randint(1, 3)]
        seconds = random.expovariate(1 / self.faults.cut_s)
        others = [name for name in names if name not in group]
        self.world.network.cut(group, others, self.kernel.chance(self.faults.one_way_chance), seconds)

    def _fill_disk(self) -> None:
        self._break_with(lambda directory: setattr(directory, "capacity_bytes", 0), "is full")

    def _break_disk(self) -> None:
        self._break_with(lambda directory: setattr(directory, "write_error", 5), "has errors")

    def _break_with(self, fault: Callable[[SimDirectory], None], what: str) -> None:
        host = self._any_master()
        directory = host.directory
        if directory is None:
            return
        self.world.trace_line(f"the disk of {host.name} {what}")
        fault(directory)

        def well() -> None:
            directory.capacity_bytes, directory.write_error = None, 0

        self._later(self.faults.bad_disk_s, well)

    def _slow(self, what: str, num_bytes: int) -> float:
        random = self.kernel.random
        if self._is_rough and random.random() < self.faults.slow_disk_chance:
            return random.uniform(0.0, self.faults.slow_disk_s)
        return 0.0

    def _change_settings(self) -> None:
        """Stop and start each master with the new settings, one after the other. Where some are of an older
        version, those are upgraded first, as documented."""
        new = cluster_faults.other_settings(MASTERS_SETTINGS, self.kernel.random)
        if any(self.world.is_old.values()):
            new = MASTERS_SETTINGS
        if self.faults.forbids_orphans:
            new = dataclasses.replace(new, orphan_s=0.0)
        self.world.trace_line(f"new settings: {new.election_lease_s} {new.standby_ack_s} {new.rest_s}")
        for number, name in enumerate(self.world.hosts):
            self.kernel.after(2.0 * number, lambda name=name: self._start_anew(name, new))  # type: ignore[misc]

    def _start_anew(self, name: str, settings: object) -> None:
        if not self._is_rough:
            return
        self.world.settings_of[name] = settings  # type: ignore[assignment]
        self.world.is_old[name] = False
        host = self.world.hosts[name]
        host.process.do(host.resign)

    def _write_back(self) -> None:
        for host in self.world.hosts.values():
            if host.is_alive:
                host.log.write_back()

    def _crash_node(self) -> None:
        name = self.kernel.random.choice(list(self.world.nodes))
        if self.world.nodes[name].is_alive:
            self.world.nodes[name].process.crash()
            self.world.checkers.history.node_crashed(name, False)
            self._later(self.world.faults.restart_s, lambda: self._start_node(name))

    def _crash_client(self) -> None:
        name = self.kernel.random.choice(list(self.world.clients))
        if self.world.clients[name].process.is_alive:
            self.world.clients[name].process.crash()
            self.world.checkers.client_crashed(self.world.clients[name])
            self._later(self.world.faults.restart_s, lambda: self._start_client(name))

    def _make_admin_request(self) -> None:
        """Operators' requests: quotas, and the removal of all of a tenant's objects."""
        client = self.kernel.random.choice(list(self.world.clients.values()))
        if not client.process.is_alive:
            return
        self._numbers += 1
        random, nodes = self.kernel.random, list(self.world.nodes)
        if any(self.world.is_old.values()):
            nodes = ["none"]  # nothing moves: an older version drops the owner of a replica that was moved
        key = random.choice(random.choice(list(self._own.values())))
        message = random.choice(
            (
                m.CopyObject(key, [random.choice(nodes)], random.choice(nodes)),
                m.CopyObject(key, [random.choice(nodes)], random.choice(nodes)),
                m.SetQuota(f"tenant{self._numbers % 3}", self._numbers),
                m.SetQuota(f"tenant{self._numbers % 3}", None),
                m.RemoveMatching("", False, f"tenant{self._numbers % 3}"),
            )
        )
        deadline = client.now + TIMEOUT_S
        client.run(client.operations.ask(message, deadline), deadline, lambda result, error: None)

    # The calm end

    def _calm_down(self) -> None:
        world = self.world
        world.trace_line("calm")
        self._is_rough = False
        world.network.heal()
        self.faults = calm = without_faults(self.faults)
        world.faults_of_masters = calm
        world.faults = world.network.faults = calm.cluster
        for disk in world.disks.values():
            disk.faults = calm.cluster
        for directory in world.directories.values():
            if directory is not None:
                directory.capacity_bytes, directory.write_error = None, 0
        for host in world.hosts.values():
            host.process.resume()
        for worker in self._workers.values():
            worker.stop()

    def _prove_health(self) -> None:
        world = self.world
        acting = [host for host in world.hosts.values() if host.acts]
        if len(acting) != 1:
            raise Violation(
                f"everything has healed, and {[host.name for host in acting] or 'no master'} leads",
                Invariant.HEALTH,
            )
        leader = acting[0]
        assert leader.election.record is not None
        listed = [one.address for one in leader.election.record.standbys]
        for name, host in world.hosts.items():
            if not host.is_alive:
                raise Violation(f"{name} was not started again", Invariant.HEALTH)
            if host is not leader and not (host.is_in_sync and name in listed):
                what = f"{name} is not in sync with {leader.name}, which has {listed}"
                raise Violation(f"everything has healed, and {what}", Invariant.HEALTH)
        followers = leader.role.followers
        if followers is None or followers.num_held:
            raise Violation(f"{leader.name} still withholds answers", Invariant.HEALTH)
        for name, client in world.clients.items():
            self._prove_client(name, client)

    def _prove_client(self, name: str, client: SimClient) -> None:
        if not client.process.is_alive:
            raise Violation(f"{name} was not started again", Invariant.HEALTH)
        key, value = f"proof of {name}", name.encode()
        client.memory[: len(value)] = value
        results: list[object] = []

        def collect(result: object, error: Exception | None) -> None:
            results.append(error if error is not None else result)

        deadline = client.now + TIMEOUT_S
        client.run(client.operations.put([key], [0], [len(value)], 256, deadline), deadline, collect)
        self._let_pass(1.0)
        client.run(client.operations.get_into([key], [1000], [100], deadline), deadline, collect)
        self._let_pass(1.0)
        got = bytes(client.memory[1000 : 1000 + len(value)])
        if results != [[None], [len(value)]] or got != value:
            raise Violation(f"{name} can't put and get in a healed cluster: {results}", Invariant.HEALTH)

    def _prove_promises(self) -> None:
        """Everything that was acknowledged and is still promised can be read."""
        client = next(iter(self.world.clients.values()))
        history = self.world.checkers.history
        for key, value in history.promised().items():
            if key not in history.promised():
                continue
            results: list[list[int | None] | None] = []
            deadline = client.now + TIMEOUT_S
            operation = client.operations.get_into([key], [1000], [self._max_bytes], deadline)
            client.run(operation, deadline, lambda sizes, error, into=results: into.append(sizes))  # type: ignore[misc]
            self._let_pass(0.5)
            size = results[0][0] if results and results[0] else None
            got = None if size is None else bytes(client.memory[1000 : 1000 + size])
            if got is None or (value is not None and got != value):
                story = "\n    ".join(self.world.master.master.story(key))
                raise Violation(
                    f"{key!r} was acknowledged and is lost: {results}\n    {story}", Invariant.PROMISE
                )
