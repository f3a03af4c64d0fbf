# SPDX-License-Identifier: Apache-2.0
"""``mooncaked``: a whole store in one process, or this host's part of one.

A master (unless ``--master`` names another), a node with its pools, and the status service for gRPC, all on
one event loop and behind one port: store and gRPC clients are distinguished by their first bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mooncake import clock
from mooncake.config import AlsoFrom, Port, Secret
from mooncake.errors import InvalidArgument
from mooncake.files import LockedDirectory, OsDirectory
from mooncake.log import get_logger
from mooncake.security import check_address
from mooncake.store import messages as m
from mooncake.store.ha.master_client import AsyncMasterClient
from mooncake.store.master.context import LoadHttp
from mooncake.store.node.node import MIN_BYTES, Node, NodeSettings
from mooncake.store.node.ssd import report_missing_parent
from mooncake.store.server import running
from mooncake.store.settings import MasterSettings
from mooncake.transfer import DEFAULT_TRANSFER, TransferSettings
from mooncake.transfer.memory import available_bytes

log = get_logger(__name__)

Gigabytes = Annotated[float, Meta(ge=0, le=1e9)]
ANSWER_S = 10.0
FOLDER_PREFIX, SOCKET = "mooncaked-", "grpc"
LEFT_AFTER_S = 86400.0
"""Age from which a folder without a listener counts as left behind: a daemon that starts is younger."""


@dataclasses.dataclass(frozen=True)
class DaemonSettings:
    """Run a whole store in one process: its master, this host's memory and SSD, and a status service."""

    host: str = "127.0.0.1"
    "Address to listen on; other hosts need one they can reach."

    port: Port = 50051
    "Port for clients of the store and of gRPC; 0 takes a free one."

    master: str = ""
    "`host:port` of an existing master whose store this host joins; empty: run a master here."

    capacity_hbm: Gigabytes = 0.0
    "Device memory for the store, in GB (10^9 bytes); 0: none."

    capacity_dram: Gigabytes = 2.0
    "Memory for the store, in GB."

    capacity_nvme: Gigabytes = 0.0
    "SSD capacity for the store, in GB; needs `nvme_path`."

    nvme_path: str = ""
    "Directory on that SSD, created if it does not exist."

    name: str = ""
    "Name of this node's segment; empty takes `<host name>-<process id>-<number>`."

    advertise_host: str = ""
    "Address given to clients; empty takes `host`, or the default route's if that is a wildcard."

    transfer_port: Port = 0
    "TCP port of the transfer engine; 0 takes a free one."

    huge_pages: bool = True
    "Use huge pages where they are available."

    hbm_device: str = "cuda:0"
    "Device that the memory is allocated on."

    log_blocks: bool = True
    "Log every block that is written, read or copied to another tier (`block_write`, `block_read`)."

    metadata: str = ""
    "URL of a metadata service (`http://`, `etcd://`, `redis://`) where others find this node by its name."

    oplog: str = ""
    "File that keeps the master's metadata; empty: `master.oplog` beside the SSD tier, if there is one."

    repair: bool = False
    "Start with the whole records of a damaged oplog or SSD index, and keep copies of the files."

    metrics_port: Port = 0
    "Port of the master's `/metrics` and admin calls; 0 takes a free one."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "Key that admin calls which change state must send as X-API-Key; empty refuses all such calls."

    transfer: TransferSettings = DEFAULT_TRANSFER

    def __post_init__(self) -> None:
        if bool(self.nvme_path) != bool(self.capacity_nvme):
            allowed = "more than 0 with nvme_path, and 0 without"
            raise InvalidArgument("capacity_nvme", self.capacity_nvme, allowed)
        capacities = ("capacity_hbm", "capacity_dram", "capacity_nvme")
        if not any(getattr(self, field) for field in capacities):
            raise InvalidArgument("capacity_dram", self.capacity_dram, "more than 0, or one of the others")
        for field in capacities:
            if 0 < getattr(self, field) < MIN_BYTES / 1e9:
                raise InvalidArgument(field, getattr(self, field), f"0, or at least {MIN_BYTES / 1e9:g} GB")

    def of_node(self, master: str) -> NodeSettings:
        """Settings of this process's node."""
        return NodeSettings(
            master=master,
            name=self.name,
            host=self.host,
            advertise_host=self.advertise_host,
            port=self.transfer_port,
            pool_size_bytes=_bytes_of(self.capacity_dram),
            huge_pages=self.huge_pages,
            ssd_path=self.nvme_path,
            ssd_size_bytes=_bytes_of(self.capacity_nvme),
            hbm_size_bytes=_bytes_of(self.capacity_hbm),
            hbm_device=self.hbm_device,
            log_blocks=self.log_blocks,
            log_writes=bool(self.master),  # a master in this process logs them, with the client's address
            metadata=self.metadata,
            ssd_repair=self.repair,
            transfer=self.transfer,
        )

    def of_master(self) -> MasterSettings:
        """Settings of this process's master."""
        beside = str(Path(self.nvme_path).expanduser() / "master.oplog") if self.nvme_path else ""
        return MasterSettings(
            host=self.host,
            port=self.port,
            metrics_port=self.metrics_port,
            admin_api_key=self.admin_api_key,
            oplog=self.oplog or beside,
            oplog_repair=self.repair,
            log_blocks=self.log_blocks,
        )


def _bytes_of(gigabytes: float) -> int:
    """Size in bytes, rounded down to whole pages."""
    return int(gigabytes * 1e9) // MIN_BYTES * MIN_BYTES


async def serve(settings: DaemonSettings, load_http: LoadHttp) -> None:
    """Run until cancelled; ``load_http``: see ``store.server.running``.

    Raises:
        AddressInUse: a port is taken.
        InvalidArgument: other hosts can reach it, and clients are not authenticated; or this host does not
            have the memory.
        MooncakeError: a pool can't be allocated, or the oplog can't be used.
    """
    check_address(settings.host)
    check_address(settings.transfer.listen_host or settings.host)
    # Before a master serves, whose clients would be lost when the allocation fails.
    if _bytes_of(settings.capacity_dram) > (available := available_bytes()):
        allowed = f"at most {available / 1e9:.3g} GB, which are available here"
        raise InvalidArgument("capacity_dram", settings.capacity_dram, allowed)
    async with AsyncExitStack() as stack:
        if settings.master:
            client = AsyncMasterClient(settings.master, m.REPLIES)
            stack.push_async_callback(client.close)
            failed: Awaitable[Any] = asyncio.get_running_loop().create_future()
            master = settings.master

            async def ask(message: msgspec.Struct) -> Any:
                return await client.call(message, ANSWER_S)

            address = await stack.enter_async_context(
                _status_service(ask, f"{settings.host}:{settings.port}")
            )
        else:
            if settings.nvme_path:
                _make_folder(settings.nvme_path)
            remove_left_folders(Path(tempfile.gettempdir()), clock.wall())
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX))
            path = f"{folder}/{SOCKET}"
            server = await stack.enter_async_context(running(settings.of_master(), load_http, path))
            await stack.enter_async_context(_status_service(server.ask, f"unix:{path}"))
            failed, master = server.failed, f"{_reachable(settings.host)}:{server.port}"
            address = f"{settings.host}:{server.port}"
        node = Node(settings.of_node(master))
        stack.push_async_callback(node.close)
        try:
            await node.start()
        except InvalidArgument as error:  # of a setting that has another name here
            of_daemon = {
                "ssd_path": ("nvme_path", settings.nvme_path),
                "ssd_size": ("capacity_nvme", settings.capacity_nvme),
            }
            if error.field not in of_daemon:
                raise
            raise type(error)(*of_daemon[error.field], error.allowed) from error
        await node.mounted.wait()
        log.info("ready", role="daemon", address=address, master=master, segment=node.name)
        await failed


def remove_left_folders(parent: Path, now: float) -> None:
    """Remove the folders of daemons that were killed: nothing listens at the sockets in them.

    A process id would not do: the directory may be common to containers, each with ids of its own.
    """
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and found.st_mtime + LEFT_AFTER_S <= now and not _is_listened_at(folder / SOCKET):
                shutil.rmtree(folder)
                log.info("left_folder_removed", path=str(folder))
        except OSError:
            continue  # another daemon has removed it, or it is no folder of ours


def _is_listened_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue is full, or it can't be known
    return True


def _make_folder(path: str) -> None:
    folder = Path(path).expanduser()
    report_missing_parent(folder)
    try:
        OsDirectory(folder, is_private=True).close()
    except OSError as error:
        raise LockedDirectory(folder, "nvme_path").trouble(error) from error


def _reachable(host: str) -> str:
    """Address at which this process reaches its own master."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


@asynccontextmanager
async def _status_service(
    ask: Callable[[msgspec.Struct], Awaitable[Any]], address: str
) -> AsyncIterator[str]:
    """Run the gRPC service if grpcio is installed; yields its address, "" if it is not."""
    try:
        from mooncake.store.grpc_status import StatusService  # late: an extra
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed; run `pip install 'mooncake-serving[grpc]'`"
        log.warning("grpc_unavailable", reason=missing)
        yield ""
        return
    service = StatusService(ask)
    try:
        port = service.start(address)
        yield address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
    finally:
        await service.close()
