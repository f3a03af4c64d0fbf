# SPDX-License-Identifier: Apache-2.0
"""A master in a thread of the test's process, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings

SETTINGS = MasterSettings(port=0, lease_s=0.2, put_s=5.0, grace_s=0.0)
"""Short leases. Heartbeats are as usual: a node that a busy host stops for a moment is not suspected."""

LONG_LEASES = MasterSettings(port=0, lease_s=10.0, grace_s=0.0)
"""Settings with long leases, for tests that do not depend on time and may run on a loaded host."""


class RunningMaster:
    """Master that listens until ``stop``; another ``start`` uses the same port, without any state."""

    def __init__(self, settings: MasterSettings = SETTINGS) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server: MasterServer | None = None
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        async def begin() -> MasterServer:
            settings = MasterSettings(**{**_fields(self._settings), "port": self.port})
            server = MasterServer(settings)
            await server.start()
            return server

        self.server = self._run(begin())
        self.port = self.server.port

    def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            self._run(server.close())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


def _fields(settings: MasterSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


@contextmanager
def a_store(
    master: RunningMaster, segment_bytes: int = 16 << 20, buffer_bytes: int = 16 << 20, **more: Any
) -> Iterator[MooncakeDistributedStore]:
    """A store that is set up, and closed at the end."""
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", master.address)
    assert store.setup(*arguments, **more) == 0
    try:
        yield store
    finally:
        store.close()


def segments_of(store: MooncakeDistributedStore, key: str) -> list[str]:
    """Segments that hold replicas of an object in memory."""
    copies = store.get_replica_desc(key)
    return [copy.get_memory_descriptor().buffer_descriptor.transport_endpoint for copy in copies]
