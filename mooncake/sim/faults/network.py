# SPDX-License-Identifier: Apache-2.0
"""Connections between simulated processes: ordered, delayed, breakable, and silent in a partition.

A partition loses nothing, it holds: that is what TCP makes of lost packets, until a timeout ends. It may hold
one direction only, and it may split the processes into two groups. A crash breaks the connections of a
process; the other side notices a delay later.

A ``DirectedNetwork`` has several masters, of which one leads. Nodes and clients do not name a master: they
connect to ``MASTERS``, and are connected to the leader, found by the search of live processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from mooncake.errors import PeerLost
from mooncake.rpc.wire import Failure, decoder_for
from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.kernel import Kernel, Process
from mooncake.store import messages as m
from mooncake.store.ha.leader_search import PROBE_S, LeaderSearch, Leads, WhoLeads
from mooncake.store.ha.standby_replication import Follow, Followed


class ConnectionEnd:
    """One side of a connection. Compared by identity."""

    def __init__(self, link: SimConnection, process: Process) -> None:
        self.link = link
        self.process = process
        self.on_message: Callable[[Any], None] | None = None
        self.on_closed: Callable[[str], None] | None = None
        self.is_open = True
        self.free_at = 0.0
        """Earliest delivery time on this side: keeps the order of messages."""

    def send(self, message: Any) -> None:
        if self.is_open:
            self.link.carry(self, message)

    def close(self) -> None:
        """Close this side; it receives nothing more, and the other side is notified."""
        if self.is_open:
            self.is_open = False
            self.link.closed(self, "closed by the other side")


class SimConnection:
    def __init__(self, network: Network, a: Process, b: Process) -> None:
        self._network = network
        self.a = ConnectionEnd(self, a)
        self.b = ConnectionEnd(self, b)

    def other(self, end: ConnectionEnd) -> ConnectionEnd:
        return self.b if end is self.a else self.a

    def carry(self, sender: ConnectionEnd, message: Any) -> None:
        kernel, faults = self._network.kernel, self._network.faults
        receiver = self.other(sender)
        breaks = kernel.chance(faults.break_chance)
        if breaks and kernel.chance(0.5):
            self.cut("the network broke it")
            return

        def deliver() -> None:
            if receiver.is_open and receiver.process.is_alive and receiver.on_message is not None:
                receiver.on_message(message)
            if breaks:
                self.cut("the network broke it")

        self._network.plan(sender, receiver, deliver)

    def closed(self, closer: ConnectionEnd, reason: str) -> None:
        receiver = self.other(closer)

        def deliver() -> None:
            if receiver.is_open:
                receiver.is_open = False
                if receiver.process.is_alive and receiver.on_closed is not None:
                    receiver.on_closed(reason)

        self._network.plan(closer, receiver, deliver)

    def cut(self, reason: str) -> None:
        for end in (self.a, self.b):
            self.closed(self.other(end), reason)

    def crash(self, end: ConnectionEnd) -> None:
        if end.is_open:
            end.is_open = False
            self.closed(end, "the process behind it died")


class Network:
    """Which process listens under which name, and which pairs can't communicate for a while."""

    def __init__(self, kernel: Kernel, faults: ClusterFaults) -> None:
        self.kernel = kernel
        self.faults = faults
        self._listeners: dict[str, tuple[Process, Callable[[ConnectionEnd], None]]] = {}
        self._healed_at: dict[tuple[str, str], float] = {}

    def listen(self, name: str, process: Process, accept: Callable[[ConnectionEnd], None]) -> None:
        self._listeners[name] = (process, accept)

    def connect(
        self,
        process: Process,
        name: str,
        opened: Callable[[ConnectionEnd], None],
        refused: Callable[[str], None],
    ) -> None:
        """Connect to the process that listens under ``name`` when the request gets there."""

        def arrive() -> None:
            listener = self._listeners.get(name)
            if listener is None or not listener[0].is_alive:
                process.after(self.delay_s(name, process.name), lambda: refused("connection refused"))
                return
            server, accept = listener
            link = SimConnection(self, process, server)
            process.on_crash(lambda: link.crash(link.a))
            server.on_crash(lambda: link.crash(link.b))
            accept(link.b)

            def connected() -> None:
                if not process.is_alive:
                    link.crash(link.a)
                elif link.a.is_open:
                    opened(link.a)
                else:
                    refused("closed while connecting")

            delay_s = self.delay_s(name, process.name)
            process.kernel.after(delay_s, lambda: process.when_awake(connected))

        self.kernel.after(self.delay_s(process.name, name), arrive)

    def partition(self, one: str, other: str, seconds: float) -> None:
        self.kernel.trace_line(f"{one} and {other} don't reach each other for {seconds:.2f} s")
        self._hold([one], [other], seconds)
        self._hold([other], [one], seconds)

    def cut_off(self, senders: list[str], receivers: list[str], seconds: float) -> None:
        """In this direction nothing gets through; in the other one everything does."""
        self.kernel.trace_line(f"{', '.join(senders)} don't reach {', '.join(receivers)} for {seconds:.2f} s")
        self._hold(senders, receivers, seconds)

    def split(self, some: list[str], others: list[str], seconds: float) -> None:
        """Two groups; no process of one receives from the other."""
        self.kernel.trace_line(f"{', '.join(some)} and the others don't reach each other for {seconds:.2f} s")
        self._hold(some, others, seconds)
        self._hold(others, some, seconds)

    def _hold(self, senders: list[str], receivers: list[str], seconds: float) -> None:
        for sender in senders:
            for receiver in receivers:
                self._healed_at[sender, receiver] = self.kernel.now + seconds

    def heal(self) -> None:
        self._healed_at.clear()

    def held_s(self, one: str, other: str) -> float:
        """How long until a message from one reaches the other."""
        healed_at = self._healed_at.get((one, other), 0.0)
        return max(0.0, healed_at - self.kernel.now)

    def delay_s(self, sender: str, receiver: str) -> float:
        random = self.kernel.random
        delay_s = self.faults.delay_s * random.uniform(0.5, 3.0)
        if random.random() < self.faults.slow_chance:
            delay_s += random.uniform(0, self.faults.slow_s)
        return delay_s + self.held_s(sender, receiver)

    def plan(self, sender: ConnectionEnd, receiver: ConnectionEnd, action: Callable[[], None]) -> None:
        """Plan a delivery in order after everything that was sent this way before."""
        now = self.kernel.now
        at = max(now + self.delay_s(sender.process.name, receiver.process.name), receiver.free_at)
        receiver.free_at = at
        self.kernel.after(at - now, lambda: receiver.process.when_awake(action))


def over_the_wire(message: msgspec.Struct, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """The message as the other side decodes it: catches one that can't be encoded."""
    return decoder.decode(msgspec.msgpack.encode(message))


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
