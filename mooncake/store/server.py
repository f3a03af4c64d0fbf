"""The master's process: connections, the driver of the core, metrics. Decides nothing.

All requests are handled on one loop, in the order in which they arrive, by plain function calls;
that is what makes the core's answers consistent without a lock, and fast.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Generator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake.driver import Driver
from mooncake.log import get_logger
from mooncake.metrics import registry, serve_metrics
from mooncake.rpc import Call, Connection, RpcServer
from mooncake.store import messages as m
from mooncake.store.master import ConnectionLost, Effect, Event, Master, MasterSettings, Note, Received, Reply

log = get_logger(__name__)


class MasterServer:
    """Serves one ``Master`` to clients and nodes."""

    def __init__(self, settings: MasterSettings) -> None:
        self.settings = settings
        self.master = Master(settings)
        self._driver: Driver[Event, Effect] = Driver(self.master, _perform)
        self._rpc = RpcServer(dict.fromkeys(m.REQUESTS, self._received), self._connection_lost)
        self._metrics = _Metrics(self.master)
        self._is_serving = False

    @property
    def port(self) -> int:
        return self._rpc.port

    @property
    def connections(self) -> list[Connection]:
        return list(self._rpc.connections)

    async def start(self) -> int:
        """Listen. Returns the port.

        Raises:
            AddressInUse: the port is taken.
        """
        port = await self._rpc.start(self.settings.host, self.settings.port)
        registry.register(self._metrics)
        self._is_serving = True
        return port

    async def close(self) -> None:
        """Stop serving. Harmless when repeated."""
        if not self._is_serving:
            return
        self._is_serving = False
        self._driver.close()
        await self._rpc.close()
        registry.unregister(self._metrics)

    def _received(self, message: msgspec.Struct, call: Call) -> None:
        self._driver.post(Received(call, call.connection, message))

    def _connection_lost(self, connection: Connection) -> None:
        if self._is_serving:
            self._driver.post(ConnectionLost(connection))


async def serve(settings: MasterSettings) -> None:
    """Run a master until cancelled.

    Raises:
        AddressInUse: a port is taken.
    """
    # Millions of long-lived objects and no cycles: full collections would only cost pauses.
    gc.set_threshold(100_000, 50, 1_000_000)
    server = MasterServer(settings)
    metrics, metrics_port = serve_metrics(settings.host, settings.metrics_port)
    try:
        port = await server.start()
        address, metrics_address = (f"{settings.host}:{number}" for number in (port, metrics_port))
        log.info("ready", role="master", address=address, metrics=metrics_address)
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()
    finally:
        metrics.shutdown()


def _perform(effect: Effect) -> None:
    if isinstance(effect, Reply):
        effect.origin.reply(effect.message)
    else:
        assert isinstance(effect, Note)
        log.info(effect.event, **effect.fields)


_GAUGES = {
    "objects": "Objects that can be read",
    "objects_writing": "Objects being written",
    "capacity_bytes": "Memory of the nodes that are alive",
    "allocated_bytes": "Memory of the nodes that are alive, in use or reserved",
    "segments": "Nodes' segments that are alive",
}
_COUNTERS = {
    "puts": "Objects that became readable",
    "refused_puts": "Puts that were refused",
    "expired_puts": "Puts whose writer missed its deadline",
    "lookups": "Keys looked up",
    "lookup_hits": "Keys looked up and found",
    "evicted_objects": "Objects evicted",
    "evicted_bytes": "Bytes evicted",
    "removed_objects": "Objects removed by request",
    "corrupt_objects": "Objects dropped because a reader found wrong bytes",
    "lost_objects": "Objects dropped because their node was lost",
}


class _Metrics(Collector):
    """Exports what the core counts, at the moment of the scrape."""

    def __init__(self, master: Master) -> None:
        self._master = master

    def describe(self) -> list[Metric]:
        return []  # so that a second master in one process (a test) is no duplicate

    def collect(self) -> Generator[Metric, None, None]:
        master = self._master
        gauges = {
            "objects": len(master.objects.readable),
            "objects_writing": len(master.objects.writing),
            "capacity_bytes": master.capacity_bytes,
            "allocated_bytes": master.allocated_bytes,
            "segments": sum(segment.is_alive for segment in master.segments.mounted.values()),
        }
        for name, documentation in _GAUGES.items():
            yield GaugeMetricFamily(f"mooncake_store_{name}", documentation, value=gauges[name])
        counts = dataclasses.asdict(master.counts)
        for name, documentation in _COUNTERS.items():
            yield CounterMetricFamily(f"mooncake_store_{name}", documentation, value=counts[name])
