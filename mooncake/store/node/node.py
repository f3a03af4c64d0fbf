# SPDX-License-Identifier: Apache-2.0
"""The node: owns this host's memory, SSD and device pools and contributes them to the store.

Memory is shared memory that transfer serves from native threads, so this process does almost no work per
object: remote clients read and write through those threads, local ones map the memory and open the file of
the SSD themselves. Each pool is a segment with its own lifecycle (``mounted_segment.py``); this module owns
what they share: the transfer engine and the SSD directory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from prometheus_client import Gauge

from mooncake.config import Port, Size
from mooncake.errors import InvalidArgument, MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.security import Identity, check_address, process_identity
from mooncake.store import messages as m
from mooncake.store.node import shared_directory
from mooncake.store.node.mounted_segment import MountedSegment, SegmentConfig
from mooncake.store.node.shared_directory import FolderOpening, SharedDirectory
from mooncake.store.node.ssd import Disk
from mooncake.store.settings import check_cluster_id, check_root_fs_dir
from mooncake.transfer import DEFAULT_TRANSFER, Region, TransferEngine, TransferSettings
from mooncake.types import Tier

log = get_logger(__name__)

PUBLISHED_FOR_S = 6.0
"""How long a descriptor stays in the metadata service after the last sign of life of its node."""

DRAIN_CONCURRENCY = 16
DRAIN_POLL_S = 0.05

POOL_BYTES = Gauge("mooncake_store_pool_bytes", "Memory of this node in the store", registry=registry)
TIER_BYTES = Gauge(
    "mooncake_store_tier_bytes", "Capacity of this node in the store, by tier", ["tier"], registry=registry
)
IS_MOUNTED = Gauge(
    "mooncake_store_mounted", "1 while all segments of this node are mounted", registry=registry
)


MIN_BYTES = 4096
OPEN_S = 3.0
"""Time that a node waits for the file system of the shared directory; it goes on without it meanwhile."""


@dataclasses.dataclass(frozen=True)
class NodeSettings:
    """Contribute this host's memory and SSD to the store."""

    master: str = "127.0.0.1:50051"
    "`host:port` of the store's master, or several with commas, or `etcd://…`, `redis://…`, `k8s://…`."

    name: str = ""
    "Name of this node's segment; empty takes `<host name>-<process id>-<number>`."

    host: str = "127.0.0.1"
    "Address to listen on, or several by commas, each a rail; other hosts need those that they can reach."

    advertise_host: str = ""
    "Address given to clients; empty takes `host`, or the default route's if that is a wildcard."

    port: Port = 0
    "TCP port of the transfer engine; 0 takes a free one."

    pool_size_bytes: Annotated[int, Size, Meta(ge=0)] = 2 << 30
    "Memory that this node contributes to the store; 0: none."

    huge_pages: bool = True
    "Use huge pages where they are available."

    ssd_path: str = ""
    "Directory on an SSD that this node contributes to the store, created if it does not exist; empty: none."

    ssd_size_bytes: Annotated[int, Size, Meta(ge=0)] = 0
    "Capacity of that directory; may grow from one start to the next, not shrink."

    root_fs_dir: str = ""
    "Directory with a folder of this host as its SSD tier where `ssd_path` is empty; empty: the master's."

    cluster_id: str = ""
    "Name of the cluster's folder in `root_fs_dir`; empty takes the master's."

    accept_root_fs_dir: bool = True
    "Whether the `root_fs_dir` that the master names is used, if it exists on this host."

    ssd_flush: bool = True
    "Announce a copy on SSD only when it survives a loss of power, not only the end of the process."

    ssd_repair: bool = False
    "Start with what is whole of a damaged SSD index, or of a data file cut short; keep a copy of the index."

    hbm_size_bytes: Annotated[int, Size, Meta(ge=0)] = 0
    "Device memory that this node contributes to the store; 0: none."

    hbm_device: str = "cuda:0"
    "Device that the memory is allocated on."

    drain_s: Annotated[float, Meta(ge=0)] = 0.0
    "Seconds that a stopping node waits for its memory to be copied to SSDs and other nodes; 0: none."

    log_blocks: bool = False
    "Log every block that is written to a tier or copied to another (`block_write`, `block_read`)."

    log_writes: bool = True
    "With `log_blocks`: also those that clients write to memory; the master can log these with their address."

    metadata: str = ""
    "URL of a metadata service (`http://`, `etcd://`, `redis://`) where others find this node by its name."

    metrics_port: Port = 0
    "Port of `/metrics`; 0 takes a free one."

    transfer: TransferSettings = DEFAULT_TRANSFER

    def __post_init__(self) -> None:
        if bool(self.ssd_path) != bool(self.ssd_size_bytes):
            raise InvalidArgument("ssd_size_bytes", self.ssd_size_bytes, "more than 0 with ssd_path, else 0")
        check_root_fs_dir(self.root_fs_dir)
        if self.cluster_id:
            check_cluster_id(self.cluster_id)
        for field in ("pool_size_bytes", "ssd_size_bytes", "hbm_size_bytes"):
            if 0 < getattr(self, field) < MIN_BYTES:
                raise InvalidArgument(field, getattr(self, field), f"0, or at least {MIN_BYTES}")


class Node:
    """The segments of one process, mounted with one master.

    Args:
        settings: see ``NodeSettings``.
        engine: used instead of an engine of the node's own, and left open when the node is closed.
        identity: identity of the node's own engine, instead of this process's.
    """

    def __init__(
        self,
        settings: NodeSettings,
        engine: TransferEngine | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.settings = settings
        self._owns_engine = engine is None
        self.engine = engine or TransferEngine(
            settings.transfer.for_role(
                settings.host,
                settings.advertise_host,
                name=settings.name,
                tcp_port=settings.port,
                metadata=settings.metadata,
                metadata_ttl_s=PUBLISHED_FOR_S,
            ),
            identity=identity,
        )
        self.name = settings.name or self.engine.name
        """Name of the node and of its memory; its other segments are ``<name>/ssd`` and ``<name>/hbm``."""
        self.segments: dict[str, MountedSegment] = {}
        """Segments by name."""
        self.mounted = asyncio.Event()
        """Set while the master has mounted every segment and allocates space on it."""
        self._disk: Disk | None = None
        self._shared: asyncio.Task[None] | None = None
        """Opens the folder in the shared directory, once the master has mounted a segment."""
        self.root_fs_dir_error: MooncakeError | None = None
        """Why this node has no SSD tier in the shared directory although one is named."""
        self._is_opening = False
        """``mounted`` waits for the shared directory."""
        self._regions: list[Region] = []
        self._is_closing = False
        """Nothing more is mounted."""

    async def start(self) -> None:
        """Allocate the pools and start to mount them; ``mounted`` is set when the master has all of them.

        Raises:
            OutOfMemory: the machine, or the device, does not have the memory.
            InvalidArgument: the directory or the device is not usable; see ``Disk``.
            Unavailable: device memory is not supported here.
            OutOfSpace, StorageError: the disk refuses.
        """
        settings = self.settings
        configs: list[SegmentConfig] = []
        if settings.pool_size_bytes:
            region = await asyncio.to_thread(self._allocate_pool)
            configs.append(SegmentConfig(self.name, region))
        if settings.hbm_size_bytes:
            region = await asyncio.to_thread(self._allocate_hbm)
            configs.append(SegmentConfig(f"{self.name}/hbm", region, Tier.DEVICE))
        if settings.ssd_path:
            disk = await asyncio.to_thread(self._open_disk)
            name = f"{self.name}/ssd"
            configs.append(SegmentConfig(name, disk.region, Tier.SSD, disk, is_flushed=settings.ssd_flush))
        for config in configs:  # after all regions are registered, so that every descriptor has all of them
            self._mount(config)
        if settings.metadata and self._owns_engine:
            await asyncio.to_thread(self.engine.publish, is_patient=True)

    def mount_region(self, region: Region, name: str, tier: Tier = Tier.MEMORY) -> MountedSegment:
        """Mount a further region of the engine as a segment.

        Raises:
            InvalidArgument: the name is taken.
            Unavailable: the node is being closed.
        """
        if self._is_closing:
            raise Unavailable(f"{self.name} is being closed and mounts nothing; use another node")
        if name in self.segments:
            raise InvalidArgument("name", name, "a name that no other segment of this node has")
        return self._mount(SegmentConfig(name, region, tier))

    async def unmount(self, name: str, grace_s: float = 0.0) -> None:
        """Unmount a segment; returns when no client with a grant on it uses its bytes any longer.

        Args:
            grace_s: time for clients that looked up an object there just before.
        """
        segment = self.segments.get(name)
        if segment is None:
            raise InvalidArgument("name", name, "the name of a segment of this node")
        await segment.close()
        self.segments.pop(name, None)
        self._changed()
        await asyncio.sleep(grace_s)

    async def start_drain(self, names: Sequence[str]) -> Any:
        """Begin to have the objects of some segments copied elsewhere; returns the master's reply. On the
        segment's own connection, since a node may drain what it mounted there without being an administrator.

        Raises:
            PeerLost, DeadlineExceeded: the master can't be reached, or does not reply in time.
        """
        return await self.segments[names[0]].ask(m.DrainSegments(list(names), [], DRAIN_CONCURRENCY))

    async def drain(self, timeout_s: float) -> None:
        """Have the objects in volatile memory copied elsewhere, as far as time and space allow."""
        names = [name for name, one in self.segments.items() if one.config.disk is None and one.is_mounted]
        if not names:
            return
        segment, fields = self.segments[names[0]], dict[str, object]()
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.start_drain(names)
                while isinstance(reply, m.JobReply) and reply.status.state in ("waiting", "running"):
                    fields = {"num_done": reply.status.num_done, "num_left": reply.status.num_left}
                    await asyncio.sleep(DRAIN_POLL_S)
                    reply = await segment.ask(m.AskJob(reply.status.job_id))
        except TimeoutError:
            log.warning("drain_incomplete", reason=f"not done within {timeout_s:g} s", **fields)
        except MooncakeError as error:
            log.warning("drain_incomplete", reason=str(error), **fields)
        else:
            log.info("drained", segments=", ".join(names), outcome=str(reply))

    async def close(self) -> None:
        """Unmount all segments and release their memory."""
        if self.settings.drain_s:
            await self.drain(self.settings.drain_s)
        self._is_closing = True
        if self._shared is not None:
            await asyncio.wait([self._shared], timeout=OPEN_S)
            self._shared.cancel()
            await asyncio.wait([self._shared])
        await asyncio.gather(*(segment.close() for segment in self.segments.values()))
        self.segments.clear()
        if self._disk is not None:
            self._disk.close()
        if self._owns_engine:
            await asyncio.to_thread(self.engine.close)
        else:
            for region in self._regions:
                await asyncio.to_thread(self.engine.unregister, region)

    def _allocate_pool(self) -> Region:
        settings = self.settings
        region = self.engine.allocate(settings.pool_size_bytes, huge_pages=settings.huge_pages)
        self._regions.append(region)
        return region

    def _allocate_hbm(self) -> Region:
        region = self.engine.allocate(self.settings.hbm_size_bytes, device=self.settings.hbm_device)
        self._regions.append(region)
        return region

    def _open_disk(self) -> Disk:
        path = Path(self.settings.ssd_path).expanduser()
        self._disk = Disk(self.engine, path, self.settings.ssd_size_bytes, self.settings.ssd_repair)
        self._regions.append(self._disk.region)
        return self._disk

    def _mount(self, config: SegmentConfig) -> MountedSegment:
        config = dataclasses.replace(
            config, log_blocks=self.settings.log_blocks, log_writes=self.settings.log_writes
        )
        segment = MountedSegment(
            config, self.engine, self.settings.master, self.name, self._own, self._changed, self._mounted
        )
        self.segments[config.name] = segment
        self._changed()
        segment.start()
        return segment

    def _mounted(self, reply: m.Mounted) -> None:
        """Begin to open the shared directory, at most once and not beside an SSD tier of the node's own."""
        settings = self.settings
        if settings.ssd_path or self._shared is not None or self._is_closing:
            return
        own = settings.root_fs_dir, settings.cluster_id
        place = shared_directory.choose(*own, settings.accept_root_fs_dir, reply)
        if place is not None:
            self._is_opening = True
            self._shared = asyncio.create_task(self._mount_shared(place))

    async def _mount_shared(self, place: SharedDirectory | InvalidArgument) -> None:
        """Mount the folder of this process, or warn and go on without one."""
        opening: FolderOpening | None = None
        try:
            if isinstance(place, InvalidArgument):
                raise place
            opening = FolderOpening(
                partial(shared_directory.open_folder, self.engine, place, self.settings.ssd_repair)
            )
            if not await opening.wait(OPEN_S):  # a file system of another host that does not answer
                log.warning("root_fs_dir_slow", path=place.path, waited_s=OPEN_S)
                self._is_opening = False
                self._changed()
                await opening.wait()
            disk = opening.result()
        except MooncakeError as error:
            self.root_fs_dir_error = error
            log.warning("root_fs_dir_unusable", reason=str(error), action=shared_directory.ADVICE)
        except asyncio.CancelledError:
            if opening is not None:
                opening.abandon()
            raise
        else:
            self._disk = disk
            self._regions.append(disk.region)
            name, is_flushed = f"{self.name}/ssd", self.settings.ssd_flush
            self._mount(SegmentConfig(name, disk.region, Tier.SSD, disk, is_flushed=is_flushed))
        finally:
            self._is_opening = False
            self._changed()

    def _own(self, name: str) -> Region | None:
        segment = self.segments.get(name)
        return None if segment is None else segment.config.region

    def _changed(self) -> None:
        is_usable = bool(self.segments) and all(one.is_usable for one in self.segments.values())
        is_mounted = is_usable and not self._is_opening
        IS_MOUNTED.set(is_mounted)
        for tier in Tier:
            configs = [one.config for one in self.segments.values() if one.config.tier is tier]
            num_bytes = sum(config.region.size_bytes for config in configs)
            TIER_BYTES.labels(str(tier)).set(num_bytes)
            if tier is Tier.MEMORY:
                POOL_BYTES.set(num_bytes)
        if is_mounted:
            self.mounted.set()
        else:
            self.mounted.clear()


async def serve(settings: NodeSettings) -> None:
    """Run a node until cancelled.

    Raises:
        AddressInUse: a port is taken.
        InvalidArgument: other hosts can reach it, and clients are not authenticated.
        MooncakeError: see ``Node.start``.
    """
    from mooncake.http.server import serve_metrics  # a node in a program's own process needs no web server

    check_address(settings.host)
    check_address(settings.transfer.listen_host or settings.host)
    # Journals are many long-lived objects without cycles, as in the master: full collections cost pauses.
    gc.set_threshold(100_000, 50, 1_000_000)
    identity = process_identity()
    tls = identity.server_tls
    # A metrics scraper can't authenticate with the cluster's key.
    metrics_host = settings.host.split(",")[0] if tls or identity.is_open else "127.0.0.1"
    metrics = serve_metrics(metrics_host, settings.metrics_port, tls)
    node = Node(settings)
    try:
        await node.start()
        configs = [segment.config for segment in node.segments.values()]
        tiers = {f"{config.tier}_bytes": config.region.size_bytes for config in configs}
        log.info("pool_allocated", **tiers, engine=repr(node.engine))
        await node.mounted.wait()
        descriptor = node.engine.describe()
        address = descriptor.endpoints.get("tcp", node.engine.handshake)
        metrics_address = f"{metrics_host}:{metrics.port}"
        log.info("ready", role="node", address=address, segment=node.name, metrics=metrics_address)
        await asyncio.Event().wait()
    finally:
        await node.close()
        await asyncio.to_thread(metrics.close)
