# SPDX-License-Identifier: Apache-2.0
"""Connections between simulated processes: ordered, delayed, breakable, and silent in a partition.

A partition loses nothing, it holds: that is what TCP makes of lost packets, until a timeout ends. It may hold
one direction only, and it may split the processes into two groups. A crash breaks the connections of a
process; the other side notices a delay later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mooncake.sim.faults.cluster_faults import ClusterFaults
from mooncake.sim.kernel import Kernel, Process


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
