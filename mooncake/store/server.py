"""The master's process: connections, the driver of the core, metrics. Decides nothing.

All requests are handled on one loop, in the order in which they arrive, by plain function calls;
that is what makes the core's answers consistent without a lock, and fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import secrets
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake import clock
from mooncake.driver import Driver
from mooncake.errors import InvalidArgument, MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.rpc import Call, Connection, RpcServer
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store import tenantfile
from mooncake.store.admin.app import make_app
from mooncake.store.admin.desk import Leadership, Publisher
from mooncake.store.admin.exported import summary
from mooncake.store.effects import ConnectionLost, Effect, Event, Keep, Received, Reply
from mooncake.store.master import Master
from mooncake.store.oplog import Oplog
from mooncake.store.records import Record
from mooncake.store.settings import MasterSettings
from mooncake.web import WebServer, listen

log = get_logger(__name__)


class MasterServer:
    """Serves one ``Master`` to clients and nodes."""

    def __init__(self, settings: MasterSettings, other: str = "") -> None:
        """``other``: Unix socket of the server for clients that open with another protocol."""
        self.settings = settings
        self.publisher: Publisher | None = None
        # Random, so that a client of an earlier master can't mean an object of this one.
        self.master = Master(settings, first_object_id=secrets.randbits(42) << 20)
        self._driver: Driver[Event, Effect] = Driver(self.master, self._perform)
        self._oplog = Oplog(Path(settings.oplog)) if settings.oplog else None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises when this master must not go on."""
        self._rpc = RpcServer(dict.fromkeys(m.REQUESTS, self._received), self._connection_lost, other=other)
        self._metrics = _Metrics(self.master)
        self._is_serving = False

    @property
    def port(self) -> int:
        return self._rpc.port

    @property
    def connections(self) -> list[Connection]:
        return list(self._rpc.connections)

    async def start(self) -> int:
        """Take over what an earlier master wrote down, and listen. Returns the port.

        Raises:
            AddressInUse: the port is taken.
            InvalidArgument: the oplog can't be used.
        """
        if self._oplog is not None:
            self.master.restore(self._oplog.read(), clock.monotonic())
            self._oplog.rewrite(self.master.snapshot())
            num_objects = len(self.master.objects.readable)
            log.info("oplog_read", path=self.settings.oplog, num_objects=num_objects)
        port = await self._rpc.start(self.settings.host, self.settings.port)
        registry.register(self._metrics)
        self._is_serving = True
        return port

    @property
    def leadership(self) -> Leadership:
        """Who leads: a master that has no others always does."""
        return Leadership(True, "serving", f"{self.settings.host}:{self.port}", 0)

    @property
    def num_clients(self) -> int:
        return len(self._rpc.connections)

    @property
    def replication(self) -> dict[str, float]:
        return {}

    async def ask(self, message: msgspec.Struct) -> msgspec.Struct:
        """What a client that sent ``message`` would be answered; from this process, for its HTTP side."""
        own = _OwnCall()
        try:
            self._driver.post(Received(own, own, message))
        except MooncakeError as error:
            return Failure(error.code, str(error))
        return await own.answer

    async def close(self) -> None:
        """Stop serving. Harmless when repeated."""
        if not self._is_serving:
            return
        self._is_serving = False
        self._driver.close()
        await self._rpc.close()
        registry.unregister(self._metrics)
        if self._oplog is not None:
            self._oplog.close()

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            effect.origin.reply(effect.message)
        elif isinstance(effect, Keep):
            self._keep(effect.records)
        else:
            log.info(effect.event, **effect.fields)

    def _keep(self, records: list[Record]) -> None:
        if self._oplog is None:
            return
        try:
            self._oplog.append(records)
            if self._oplog.wants_compaction:
                self._oplog.rewrite(self.master.snapshot())
        except (OSError, InvalidArgument) as error:
            failure = Unavailable(
                f"the oplog {self.settings.oplog} can't be written ({error}); free some space"
            )
            if not self.failed.done():
                self.failed.set_exception(failure)
            raise failure from error

    def _received(self, message: msgspec.Struct, call: Call) -> None:
        self._driver.post(Received(call, call.connection, message))

    def _connection_lost(self, connection: Connection) -> None:
        if self._is_serving:
            self._driver.post(ConnectionLost(connection))


class _OwnCall:
    """Stands where the ``Call`` of a client would: the origin of a message of this process itself."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[msgspec.Struct] = asyncio.get_running_loop().create_future()

    def reply(self, message: msgspec.Struct) -> None:
        if not self.answer.done():
            self.answer.set_result(message)


async def serve(settings: MasterSettings) -> None:
    """Run a master until cancelled; raises as ``running`` does."""
    async with running(settings) as server:
        await server.failed


@contextlib.asynccontextmanager
async def running(settings: MasterSettings, other: str = "") -> AsyncIterator[MasterServer]:
    """A master that serves clients, nodes and HTTP; its ``failed`` raises when it must not go on.

    Args:
        settings: see ``MasterSettings``.
        other: Unix socket of the server for clients that open with another protocol.

    Raises:
        AddressInUse: a port is taken.
        InvalidArgument: the oplog can't be used.
        Unavailable: the oplog can't be written any more.
    """
    # Millions of long-lived objects and no cycles: full collections would only cost pauses.
    gc.set_threshold(100_000, 50, 1_000_000)
    quotas = tenantfile.read(settings.tenants_file) if settings.tenants_file else {}
    server = MasterServer(settings, other)
    metrics_host = settings.metrics_host or settings.host
    web = WebServer(make_app(server), listen(metrics_host, settings.metrics_port))
    stack = contextlib.AsyncExitStack()
    try:
        port = await server.start()
        await web.start()
        address, metrics_address = f"{settings.host}:{port}", f"{metrics_host}:{web.port}"
        log.info("ready", role="master", address=address, metrics=metrics_address)
        log.info(f"Master service started on port {port}")  # the words that existing launchers wait for
        if settings.tenants_file:
            for tenant, size_bytes in quotas.items():
                await server.ask(m.SetQuota(tenant, size_bytes))
        if settings.report_s:
            reporting = asyncio.create_task(_report(server, settings.report_s))
            stack.callback(reporting.cancel)
        if settings.kv_events_endpoint:
            await stack.enter_async_context(_publishing(server))
        yield server
    finally:
        await stack.aclose()
        await web.close()
        await server.close()


async def _report(server: MasterServer, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        status = await server.ask(m.Status())
        if isinstance(status, m.MasterStatus):
            log.info("summary", text=summary(server, status))


@contextlib.asynccontextmanager
async def _publishing(server: MasterServer) -> AsyncIterator[None]:
    from mooncake.store.kvpublisher import KvEventPublisher  # late: it needs ZeroMQ

    server.publisher = KvEventPublisher(server)
    try:
        server.publisher.start()
        yield
    finally:
        await server.publisher.close()


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
    "evicted_replicas": "Replicas evicted whose object stayed readable on another tier",
    "removed_objects": "Objects removed by request",
    "corrupt_objects": "Objects dropped because a reader found wrong bytes",
    "corrupt_replicas": "Replicas dropped because a reader found wrong bytes",
    "lost_objects": "Objects dropped because their node was lost",
    "done_tasks": "Copies that nodes made",
    "failed_tasks": "Copies that were given up",
    "demoted_objects": "Objects copied from memory to SSD",
    "demoted_bytes": "Bytes copied from memory to SSD",
    "promoted_objects": "Objects copied from SSD to memory because they were read again",
    "promoted_bytes": "Bytes copied from SSD to memory because they were read again",
    "promotions_admitted": "Such copies that were begun",
    "promotions_failed": "Such copies that were given up",
    "promotions_too_rare": "Lookups that found an object only on SSD, and too rarely",
    "promotions_no_room": "Lookups that found an object only on SSD, and no memory for it",
    "reported_objects": "Objects known because their node said so",
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
