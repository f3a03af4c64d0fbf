# SPDX-License-Identifier: Apache-2.0
"""The connectors that ``test_connectors.py`` holds to their contract: yours is one more class and line.

A connector brings the blocks of an engine to a cache outside its process and back. The suite starts the
cache once, asks it for links as engines do, and does to it what happens to caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Protocol

import numpy as np

from mooncake.cli.ports import free_ports
from mooncake.connectors.kv_link import AnyLink
from mooncake.connectors.memory import CacheIdentity, HostMemory
from mooncake.connectors.store_link import LinkSettings, StoreLink
from mooncake.prefix import BlockHash
from mooncake.store import AsyncStore, StoreSettings
from mooncake.transfer import Op, Status, TransferEngine, TransferSettings
from tests.cluster import wait_for

HOST = "127.0.0.1"
PATIENCE_S = 2.0
"""How long the links under test wait for a load, at most; a lookup or a save has half of it."""


class Connector(Protocol):
    """A cache in processes of its own, and the links to it."""

    def start(self, folder: Path) -> None:
        """Return when the cache takes blocks. ``folder`` is for its files."""
        ...

    def signal(self, number: int) -> None:
        """Send it to every process of the cache."""
        ...

    def stop(self) -> None:
        """End the cache, also one that was killed or is frozen."""
        ...

    def link(
        self, identity: CacheIdentity, memory: HostMemory
    ) -> contextlib.AbstractAsyncContextManager[AnyLink]:
        """The link of one engine."""
        ...

    async def spoil(self, identity: CacheIdentity, block_hash: BlockHash, offset: int) -> None:
        """Flip a bit of the stored block, ``offset`` bytes after its start, behind everybody's back."""
        ...


class StoreConnector:
    """``StoreLink`` over a ``mooncaked``."""

    def start(self, folder: Path) -> None:
        (port,) = free_ports(HOST, 1, Random())
        self.address = f"{HOST}:{port}"
        arguments = ["daemon", "--port", str(port), "--capacity-dram", "0.064", "--no-huge-pages"]
        log = folder / f"mooncaked-{port}.log"
        with log.open("w") as output:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", "mooncake", *arguments, "--parent", str(os.getpid())],
                stdout=output,
                stderr=output,
            )
        wait_for(lambda: "ready role=daemon" in log.read_text(), "the daemon to be ready", 60.0)

    def signal(self, number: int) -> None:
        self._daemon.send_signal(number)
        if number == signal.SIGKILL:
            self._daemon.wait(10.0)

    def stop(self) -> None:
        self._daemon.kill()
        self._daemon.wait(10.0)

    @contextlib.asynccontextmanager
    async def link(self, identity: CacheIdentity, memory: HostMemory) -> AsyncIterator[StoreLink]:
        async with self._client() as (store, transfer):
            half_s = PATIENCE_S / 2
            settings = LinkSettings(lookup_timeout_s=half_s, load_timeout_s=PATIENCE_S, retry_after_s=0.2)
            link = StoreLink(store, transfer, identity, memory, asyncio.get_running_loop(), settings)
            try:
                yield link
            finally:
                await link.close()

    async def spoil(self, identity: CacheIdentity, block_hash: BlockHash, offset: int) -> None:
        async with self._client() as (store, transfer):
            (grant,) = await store.open_reads([identity.key(block_hash)])
            assert grant is not None
            byte = np.zeros(1, dtype=np.uint8)
            transfer.register_all([byte])
            columns = [np.array([n], dtype=np.uint64) for n in (byte.ctypes.data, grant.address + offset, 1)]
            for op in (Op.READ, Op.WRITE):
                done = await asyncio.to_thread(transfer.run, op, grant.segment, *columns)
                assert done.status == Status.OK
                byte ^= 1

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[tuple[AsyncStore, TransferEngine]]:
        transfer = TransferEngine(TransferSettings())
        store = AsyncStore(self.address, transfer, StoreSettings(timeout_s=1.0))
        try:
            yield store, transfer
        finally:
            await store.close()
            transfer.close()


CONNECTORS: list[Callable[[], Connector]] = [StoreConnector]
