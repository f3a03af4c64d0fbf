# SPDX-License-Identifier: Apache-2.0
"""A master and a node with an SSD, in this process, over files that persist from one run to the next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings


@contextlib.asynccontextmanager
async def running_with_ssd(settings: MasterSettings, folder: Path) -> AsyncIterator[MasterServer]:
    """The master, once node "n" has mounted its memory and the SSD in folder ``ssd``."""
    server = MasterServer(settings)
    await server.start()
    node = Node(
        NodeSettings(
            master=f"127.0.0.1:{server.port}",
            name="n",
            pool_size_bytes=4 << 20,
            huge_pages=False,
            ssd_path=str(folder / "ssd"),
            ssd_size_bytes=8 << 20,
        )
    )
    try:
        await node.start()
        async with asyncio.timeout(20):
            await node.mounted.wait()
        yield server
    finally:
        await node.close()
        await server.close()
