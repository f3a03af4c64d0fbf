"""The node daemon (``mooncaked``): owns this host's memory pool and keeps it mounted with the master.

The pool is shared memory that transfer serves from native threads, so this process does next to
nothing per object: clients read and write it without it, those on this host by mapping it. When and
how to mount, ``membership.py`` decides; here are only the connection and the memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from prometheus_client import Gauge

from mooncake.config import Port, Size
from mooncake.driver import Driver
from mooncake.errors import MooncakeError, PeerLost
from mooncake.log import get_logger
from mooncake.machine import Wake
from mooncake.metrics import registry, serve_metrics
from mooncake.rpc import AsyncClient
from mooncake.store import messages as m
from mooncake.store.membership import (
    ANSWER_S,
    Answered,
    Closed,
    Connect,
    Disconnect,
    Effect,
    Event,
    Leave,
    Left,
    Membership,
    Note,
    Opened,
    Send,
)
from mooncake.transfer import TransferEngine, TransferSettings

log = get_logger(__name__)

PUBLISHED_FOR_S = 6.0
"""How long a descriptor stays in the metadata service after its node has fallen silent."""

POOL_BYTES = Gauge("mooncake_store_pool_bytes", "Memory that this node lends to the store", registry=registry)
IS_MOUNTED = Gauge("mooncake_store_mounted", "1 while the master knows this node", registry=registry)


@dataclasses.dataclass(frozen=True)
class NodeSettings:
    """Lend this host's memory to the store."""

    master: str = "127.0.0.1:50051"
    "`host:port` of the store's master."

    name: str = ""
    "Name of this node's segment; empty takes `<host name>-<process id>-<number>`."

    host: str = "127.0.0.1"
    "Address that the transfer engine listens on; other hosts need one they can reach."

    advertise_host: str = ""
    "Address that clients are told; empty takes `host`, or the default route's if that is a wildcard."

    port: Port = 0
    "TCP port of the transfer engine; 0 takes a free one."

    pool_size_bytes: Annotated[int, Size, Meta(ge=4096)] = 2 << 30
    "Memory that this node lends to the store."

    huge_pages: bool = True
    "Ask for huge pages, and do without where there are none."

    metadata: str = ""
    "URL of a metadata service (`http://`, `etcd://`, `redis://`) where others find this node by its name."

    metrics_port: Port = 0
    "Port of `/metrics`; 0 takes a free one."


class Node:
    """One pool of memory, mounted with one master."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        transfer = TransferSettings(
            name=settings.name,
            listen_host=settings.host,
            advertise_host=settings.advertise_host,
            tcp_port=settings.port,
            metadata=settings.metadata,
            metadata_ttl_s=PUBLISHED_FOR_S,
        )
        self.engine = TransferEngine(transfer)
        self.mounted = asyncio.Event()
        """Set while the master knows this node and gives out its space."""
        self._left = asyncio.Event()
        self._link: AsyncClient | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._driver: Driver[Event, Effect] | None = None

    async def start(self) -> None:
        """Get the memory and begin to mount it; ``mounted`` says when the master has it.

        Raises:
            OutOfMemory: the machine does not have the memory.
        """
        size_bytes = self.settings.pool_size_bytes
        pool = await asyncio.to_thread(
            self.engine.allocate, size_bytes, huge_pages=self.settings.huge_pages, populate=True
        )
        POOL_BYTES.set(size_bytes)
        descriptor = self.engine.describe()
        membership = Membership(
            segment=descriptor.name,
            epoch=descriptor.epoch,
            host=descriptor.host,
            address=pool.address,
            size_bytes=size_bytes,
            descriptor=descriptor.encode(),
            random=Random(descriptor.epoch),
        )
        self._membership = membership
        self._driver = Driver(membership, self._perform)
        self._driver.post(Wake())
        if self.settings.metadata:
            await asyncio.to_thread(self.engine.publish, is_patient=True)

    async def close(self) -> None:
        """Tell the master that the memory goes away, and let it go."""
        if self._driver is not None:
            self._post(Leave())
            await self._left.wait()
            self._driver.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.to_thread(self.engine.close)

    def _post(self, event: Event) -> None:
        assert self._driver is not None
        self._driver.post(event)
        is_mounted = self._membership.is_usable
        IS_MOUNTED.set(is_mounted)
        if is_mounted:
            self.mounted.set()
        else:
            self.mounted.clear()

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Connect):
            self._link = AsyncClient(self.settings.master, m.REPLIES, "the master")
            self._spawn(self._connect(self._link))
        elif isinstance(effect, Disconnect):
            link, self._link = self._link, None
            if link is not None:
                self._spawn(link.close())
        elif isinstance(effect, Send):
            assert self._link is not None
            self._spawn(self._send(self._link, effect.message))
        elif isinstance(effect, Note):
            report = log.info if effect.event == "mounted" else log.warning
            report(effect.event, master=self.settings.master, **effect.fields)
        else:
            assert isinstance(effect, Left)
            self._left.set()

    async def _connect(self, link: AsyncClient) -> None:
        """Connect, and report the loss of the connection when it comes."""
        try:
            await link.connect(ANSWER_S)
        except MooncakeError as error:
            self._report(link, Closed(str(error)))
            return
        self._report(link, Opened())
        await link.lost.wait()
        self._report(link, Closed("connection lost"))

    async def _send(self, link: AsyncClient, message: msgspec.Struct) -> None:
        try:
            reply = await link.call(message, ANSWER_S)
        except PeerLost:
            return  # whoever watches the connection reports it
        except MooncakeError as error:
            self._report(link, Closed(str(error)))
        else:
            self._report(link, Answered(reply))

    def _report(self, link: AsyncClient, event: Event) -> None:
        """What an earlier connection still has to say is of no interest."""
        if link is self._link:
            self._post(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)


async def serve(settings: NodeSettings) -> None:
    """Run a node until cancelled.

    Raises:
        AddressInUse: a port is taken.
        OutOfMemory: the machine does not have the memory.
    """
    metrics, metrics_port = serve_metrics(settings.host, settings.metrics_port)
    node = Node(settings)
    try:
        await node.start()
        log.info("pool_allocated", pool_bytes=settings.pool_size_bytes, engine=repr(node.engine))
        await node.mounted.wait()
        descriptor = node.engine.describe()
        address, metrics_address = descriptor.endpoints["tcp"], f"{settings.host}:{metrics_port}"
        log.info("ready", role="node", address=address, segment=descriptor.name, metrics=metrics_address)
        await asyncio.Event().wait()
    finally:
        await node.close()
        metrics.shutdown()
