# SPDX-License-Identifier: Apache-2.0
"""Network cards and disks of the simulated nodes: bandwidth that flows share fairly and never exceed.

It owns the shares of each port, and refuses to know what the bytes are. A flow goes through
one or more ports (a disk, a card outwards, a card inwards); rates are max-min fair, as TCP and RDMA
congestion control aim at: the port with the least left per flow is shared out first, and so on. Only
the flows that share ports, directly or through others, with one that begins or ends get new rates; a
flow that is alone costs one event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mooncake.sim.kernel import Kernel

ROUNDING_BYTES = 0.5


class Port:
    """One direction of a node's network cards, or its disks."""

    __slots__ = ("busy_bytes", "bytes_per_s", "flows", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.busy_bytes = 0.0
        """All bytes that were ever started through it."""

    def __repr__(self) -> str:
        return f"Port({self.name} {len(self.flows)} flows)"


class Flow:
    """A transfer of ``size`` bytes through ``ports``. Compared by identity."""

    __slots__ = ("done", "left_bytes", "ports", "rate", "since", "ticket", "what")

    def __init__(
        self, ports: Sequence[Port], size_bytes: float, done: Callable[[Any], object], what: Any
    ) -> None:
        self.ports = ports
        self.left_bytes = size_bytes
        self.done = done
        self.what = what
        self.rate = 0.0
        self.since = 0.0
        self.ticket = 0
        """Number of the event that ends it; an older one is void."""


class Fabric:
    """All flows. ``latency_s`` is added to each."""

    def __init__(self, kernel: Kernel, latency_s: float) -> None:
        self._kernel = kernel
        self._latency_s = latency_s

    def start(
        self, ports: Sequence[Port], size_bytes: float, done: Callable[[Any], object], what: Any
    ) -> Flow:
        """Start a flow; ``done(what)`` is called when the last byte has arrived."""
        flow = Flow(ports, size_bytes, done, what)
        flow.since = self._kernel.now
        is_alone = True
        for port in ports:
            is_alone = is_alone and not port.flows
            port.flows[flow] = None
            port.busy_bytes += size_bytes
        if is_alone:
            self._set_rate(flow, min(port.bytes_per_s for port in ports))
        else:
            self._share(ports)
        return flow

    def _ended(self, what: tuple[Flow, int]) -> None:
        flow, ticket = what
        if flow.ticket != ticket:
            return
        flow.ticket = -1
        has_company = False
        for port in flow.ports:
            del port.flows[flow]
            has_company = has_company or bool(port.flows)
        if has_company:
            self._share(flow.ports)
        if self._latency_s:
            self._kernel.call_at(self._kernel.now + self._latency_s, flow.done, flow.what)
        else:
            flow.done(flow.what)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = self._kernel.now
        flow.left_bytes = max(0.0, flow.left_bytes - flow.rate * (now - flow.since))
        flow.since = now
        flow.rate = rate
        flow.ticket += 1
        ends_at = now + flow.left_bytes / rate
        self._kernel.call_at(ends_at, self._ended, (flow, flow.ticket))

    def _share(self, ports: Sequence[Port]) -> None:
        """Compute new rates for all flows that share ports with each other and with ``ports``."""
        flows: dict[Flow, None] = {}
        left: dict[Port, float] = {}
        counts: dict[Port, int] = {}
        stack = list(ports)
        while stack:
            port = stack.pop()
            if port in left:
                continue
            left[port] = port.bytes_per_s
            counts[port] = len(port.flows)
            for flow in port.flows:
                if flow not in flows:
                    flows[flow] = None
                    stack.extend(flow.ports)
        while flows:
            tightest = min(
                (port for port in counts if counts[port]), key=lambda port: left[port] / counts[port]
            )
            rate = left[tightest] / counts[tightest]
            for flow in [flow for flow in tightest.flows if flow in flows]:
                del flows[flow]
                for port in flow.ports:
                    left[port] -= rate
                    counts[port] -= 1
                if rate != flow.rate:
                    self._set_rate(flow, rate)
