# SPDX-License-Identifier: Apache-2.0
"""Masters that elect a leader, nodes that contribute memory and SSD to it, clients that use the store.

Nodes, clients and their checkers are those of the store's world; the record that the masters elect by answers
late, applies a request without answering, or is unreachable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mooncake.rpc.wire import Failure
from mooncake.sim.faults.clients import SimClient
from mooncake.sim.faults.disks import SimDisk
from mooncake.sim.faults.masters_checkers import MastersCheckers, ReplicationChecker
from mooncake.sim.faults.masters_faults import MastersFaults
from mooncake.sim.faults.masters_host import MasterHost
from mooncake.sim.faults.masters_network import LEASE_STORE, MASTERS, DirectedNetwork, is_not_leader
from mooncake.sim.faults.network import over_the_wire
from mooncake.sim.faults.nodes import SimNode, requests
from mooncake.sim.faults.sim_files import SimDirectory
from mooncake.sim.faults.store_cluster import StoreCluster
from mooncake.sim.kernel import Kernel
from mooncake.store.client.operations import CallMaster
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
