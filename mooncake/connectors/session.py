# SPDX-License-Identifier: Apache-2.0
"""A thread with an event loop for engines in whose own threads we can't await, and a store client on it.

Owns that thread's event loop, the transfer engine and the connection to the store. ``PoolSettings`` has the
store's address; a connector reads it from the engine's configuration, or from the file or the variables that
the existing package's users have (``MOONCAKE_CONFIG_PATH``, ``MOONCAKE_MASTER``). It also mounts memory of
this process as a segment of the pool, if these say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

from mooncake.compat.config_file import CONFIG_VARIABLE, MASTER_VARIABLE, MooncakeConfig
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.store import AsyncStore, StoreSettings
from mooncake.store.node.node import Node, NodeSettings
from mooncake.transfer import TransferEngine, transfer_from_environment

log = get_logger(__name__)

ResultT = TypeVar("ResultT")

DEFAULT_TIMEOUT_S = 1.0
"""Timeout of a lookup, which then counts as a miss: computing the blocks takes about as long."""

LONGEST_CALL_S = 10.0
"""Timeout of what keeps no request waiting, such as the steps of a save."""

CLOSING_S = 10.0

_OPTIONS = ("protocol", "tenant_id", "local_hostname")
"""Options of a connector's extra configuration that the existing package's configuration has, too."""

RDMA_FIRST = ("shm", "file", "cuda", "rdma", "tcp")
"""Transports for the protocol ``rdma`` of the existing file; tcp replaces it where one side lacks it."""


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """The store's address, and this process's contribution to the pool."""

    master: str
    """``host:port`` of the master, several separated by commas, or ``etcd://…`` with leader election."""
    transports: tuple[str, ...] = ()
    """Transports by preference; empty takes the default ones."""
    host: str = "127.0.0.1"
    """Address that this process's transfer engine listens on."""
    tenant: str = "default"
    segment_bytes: int = 0
    """Memory that each rank mounts as a segment of the pool."""
    root_fs_dir: str = ""
    """Directory of the SSD tier beside that memory; empty takes the master's."""
    cluster_id: str = ""
    """Name of the cluster's folder there; empty takes the master's."""
    rdma_devices: tuple[str, ...] = ()
    """RDMA devices to use, which must exist; empty takes all that are active."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environment: Mapping[str, str]) -> PoolSettings:
        """Settings from a connector's extra configuration, and from the existing package's configuration.

        That one, which the drop-in reads, too, counts where ``extra`` has no address: the file that
        ``MOONCAKE_CONFIG_PATH`` names, or else the ``MOONCAKE_*`` variables, if ``MOONCAKE_MASTER`` is set.
        Options in ``extra`` replace what it says.

        Args:
            environment: that of this process.

        Raises:
            InvalidArgument: neither has the store's address.
            ValueError: a value in the file or the variables is invalid; the message names its field.
            OSError: the file can't be read.
        """
        options = {name: str(extra[name]) for name in _OPTIONS if extra.get(name) is not None}
        transports = transports_of(options.get("protocol", ""))
        address, file = extra.get("mooncake_store_addr"), environment.get(CONFIG_VARIABLE)
        if address:
            host, tenant = options.get("local_hostname", "127.0.0.1"), options.get("tenant_id", "default")
            return cls(str(address), transports, host, tenant)
        given = json.loads(Path(file).read_text()) if file else {}
        master = given.get("master_server_address") or environment.get(MASTER_VARIABLE)
        if not master:
            allowed = f"HOST:50051, or {CONFIG_VARIABLE} naming a file with master_server_address"
            raise InvalidArgument("mooncake_store_addr", address, f"{allowed}, or {MASTER_VARIABLE}")
        if file:
            defaults = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"}
            config = MooncakeConfig.of({**defaults, **given, "master_server_address": master})
        else:
            config = MooncakeConfig.load_from_env()
        if not transports and config.protocol == "rdma":
            transports = RDMA_FIRST
        devices = tuple(name.strip() for name in config.device_name.split(",") if name.strip())
        mounts = given.get("mode", "embedded") != "standalone-store"
        return cls(
            str(master),
            transports,
            options.get("local_hostname", config.local_hostname),
            options.get("tenant_id", config.tenant_id),
            config.global_segment_size if mounts else 0,
            config.root_fs_dir,
            config.cluster_id,
            devices if "rdma" in transports else (),
        )


def warn_of_unknown_options(extra: Mapping[str, object], known: Collection[str]) -> None:
    """Warn of options in an engine's extra configuration that are unknown here: another's, or a mistake."""
    unknown = sorted(extra.keys() - known)
    if unknown:
        log.warning("extra_config_ignored", options=",".join(unknown))


def transports_of(protocol: str) -> tuple[str, ...]:
    """Transports for a ``protocol`` that is configured by name: that one and no other."""
    return (protocol,) if protocol else ()


class TransferThread:
    """A transfer engine, and an event loop in a thread of its own. To be called from any thread.

    The engine's settings are those of ``[transfer]``, in the environment and in the file that
    ``MOONCAKE_CONFIG`` names. ``host`` is where it listens if they name no address, and ``transports``, if
    any, are used instead of theirs.
    """

    def __init__(
        self, host: str, transports: tuple[str, ...] = (), rdma_devices: tuple[str, ...] = ()
    ) -> None:
        named = {"transports": list(transports) or None, "rdma_devices": list(rdma_devices) or None}
        self.transfer = TransferEngine(transfer_from_environment(named).for_role(host))
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unbegun: set[Coroutine[Any, Any, Any]] = set()
        """Work that another thread has passed and the loop has not begun."""
        self._is_let_go = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-connector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # A loop that was blocked while it was closed has tasks that never began. They begin with their end.
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(RuntimeError):  # closed once more
            self.loop.run_until_complete(asyncio.sleep(0))
        for work in list(self._unbegun):
            work.close()

    def start(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Begin ``work`` on the loop; ``close`` ends it."""
        self._unbegun.add(work)
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self.loop)

    async def _tracked(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        self._unbegun.discard(work)
        return await self.track(work)

    def track(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Begin ``work``, from the loop itself; ``close`` ends it."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def has_released_memory(self) -> bool:
        """Whether nothing that was begun here can touch memory, even if it has not ended.

        This holds once all memory is unregistered (``close``): a step that goes on later finds its deadline
        passed and its memory unregistered. It also holds without the thread, such as in a forked process.
        """
        if not self._thread.is_alive() and not self._is_let_go.is_set():
            log.error("session_lost", reason="the thread of the connector's loop is gone")
            self.transfer.close()
            self._is_let_go.set()
        return self._is_let_go.is_set()

    def wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """``work``'s result; not from the loop's own thread."""
        return self.start(work).result()

    def close(self) -> None:
        """Release everything. May be called more than once."""
        if self.loop.is_closed():
            return
        ending = self._end()
        try:
            asyncio.run_coroutine_threadsafe(ending, self.loop).result(CLOSING_S)
        # An interpreter that shuts down starts no threads; a loop that was blocked during an earlier call of
        # this method, and goes on during this one, ends by cancelling what it has.
        except (RuntimeError, TimeoutError, CancelledError) as error:
            log.debug("session_close_timed_out", reason=str(error))
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CLOSING_S)
            if not self._thread.is_alive():
                self.loop.close()
                ending.close()  # a blocked loop has not begun it
            self.transfer.close()
            self._is_let_go.set()

    async def _end(self) -> None:
        begun = list(self._tasks)
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        # Tasks that those began when they were cancelled, to release what they had reserved.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        """Close what lives on the loop."""


class PoolSession(TransferThread):
    """A store client on a thread of its own. Its methods may be called from any thread.

    ``timeout_s``: timeout of one call to the master whose caller has none of its own. Those of lookups, for
    which requests or steps wait, are shorter.
    """

    def __init__(self, settings: PoolSettings, timeout_s: float = LONGEST_CALL_S) -> None:
        super().__init__(settings.host, settings.transports, settings.rdma_devices)
        self._settings = settings
        self._timeout_s = timeout_s
        self._node: Node | None = None
        self.store = self.wait(self._connect())

    async def _connect(self) -> AsyncStore:
        settings = StoreSettings(timeout_s=self._timeout_s, tenant=self._settings.tenant)
        return AsyncStore(self._settings.master, self.transfer, settings)

    def mount_segment(self) -> None:
        """Mount this process's segment, if the settings have one. The store may be started later."""
        if self._settings.segment_bytes and self._node is None:
            self._node = self.wait(self._mount_segment())

    async def _mount_segment(self) -> Node:
        settings, size_bytes = self._settings, self._settings.segment_bytes
        node_settings = NodeSettings(
            master=settings.master,
            pool_size_bytes=size_bytes,
            root_fs_dir=settings.root_fs_dir,
            cluster_id=settings.cluster_id,
        )
        node = Node(node_settings, self.transfer)
        await node.start()
        log.info("segment_mounted", size_bytes=size_bytes, master=self._settings.master)
        return node

    async def _close(self) -> None:
        if self._node is not None:
            await self._node.close()
        await self.store.close()
