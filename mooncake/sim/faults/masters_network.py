# SPDX-License-Identifier: Apache-2.0
"""A network with one-way and two-way partitions between groups, and with several masters of which one leads.

A partition holds messages, as ``network.py`` says. Nodes and clients do not name a master: they connect to
``MASTERS``, and are connected to the leader, found by the search of live processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mooncake.errors import PeerLost
from mooncake.rpc.wire import Failure, decoder_for
from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.faults.network import ConnectionEnd, Network, over_the_wire
from mooncake.sim.kernel import Kernel, Process
from mooncake.store import messages as m
from mooncake.store.ha.leader_search import PROBE_S, LeaderSearch, Leads, WhoLeads
from mooncake.store.ha.standby_replication import Follow, Followed

MASTERS = "masters"
LEASE_STORE = "ballot"
PROBE = 1 << 40
"""Id of the leader query: far from all other request ids of a connection."""

requests = decoder_for((*m.REQUESTS, Follow, WhoLeads))
replies = decoder_for((*m.REPLIES, Followed, Leads))


class DirectedNetwork(Network):
    """A network with directed partitions."""

    def __init__(self, kernel: Kernel, faults: ClusterFaults, masters: list[str]) -> None:
        super().__init__(kernel, faults)
        self.masters = masters
        self.hints: dict[str, str] = {}
        """Process -> the leader that it last learned of."""
        self._held_until: dict[tuple[str, str], float] = {}

    def connect(
        self,
        process: Process,
        name: str,
        opened: Callable[[ConnectionEnd], None],
        refused: Callable[[str], None],
    ) -> None:
        if name == MASTERS:
            _MasterSearch(self, process, opened, refused).ask_next()
        else:
            super().connect(process, name, opened, refused)

    def cut(self, group: Iterable[str], others: Iterable[str], one_way: bool, seconds: float) -> None:
        """The others don't receive from the group, and it does not receive from them unless ``one_way``."""
        until = self.kernel.now + seconds
        group, others = list(group), list(others)
        way = "don't reach" if one_way else "and"
        self.kernel.trace_line(f"cut for {seconds:.2f} s: {group} {way} {others}")
        for one in group:
            for other in others:
                self._held_until[one, other] = until
                if not one_way:
                    self._held_until[other, one] = until

    def heal(self) -> None:
        self._held_until.clear()

    def held_s(self, one: str, other: str) -> float:
        """How long until a message of one reaches the other."""
        names = self.masters if other == MASTERS else [other]
        until = max(self._held_until.get((one, name), 0.0) for name in names)
        return max(0.0, until - self.kernel.now)


class _MasterSearch:
    """A process looks for the master that leads: one round, as ``master_client.py`` does it."""

    def __init__(
        self,
        network: DirectedNetwork,
        process: Process,
        opened: Callable[[ConnectionEnd], None],
        refused: Callable[[str], None],
    ) -> None:
        self.master = ",".join(network.masters)
        self._network = network
        self._process = process
        self._opened = opened
        self._refused = refused
        self._search = LeaderSearch(self, "the master")
        hint = [self.hint] if self.hint else []
        self._search.begin_round([*hint, *network.masters])

    @property
    def hint(self) -> str:
        return self._network.hints.get(self._process.name, "")

    @hint.setter
    def hint(self, address: str) -> None:
        self._network.hints[self._process.name] = address

    def ask_next(self) -> None:
        address = self._search.next()
        if address is None:
            self._refused("no master leads")
            return
        is_over = False
        link: list[ConnectionEnd] = []

        def answered(answer: Any) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            timer.cancel()
            leads = answer if isinstance(answer, Leads) else PeerLost(str(answer))
            if self._search.take_answer(address, leads):
                link[0].on_message = link[0].on_closed = None
                self._opened(link[0])
                return
            for end in link:
                end.on_message = end.on_closed = None
                end.close()
            self.ask_next()

        def opened(end: ConnectionEnd) -> None:
            if is_over:
                end.close()
                return
            link.append(end)
            end.on_message = lambda frame: answered(frame[1])
            end.on_closed = answered
            end.send((PROBE, over_the_wire(WhoLeads(), requests)))

        timer = self._process.after(PROBE_S, lambda: answered("no answer"))
        self._network.connect(self._process, address, opened, answered)


def is_not_leader(reply: Any) -> bool:
    return isinstance(reply, Failure) and reply.code == "not_leader"
