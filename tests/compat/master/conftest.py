# SPDX-License-Identifier: Apache-2.0
"""A master with its HTTP side on a real socket, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from mooncake.compat.master.app import make_app
from mooncake.http.server import HttpServer, listen
from mooncake.rpc import AsyncClient
from mooncake.store import messages as m
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.waiting import LONG_HEARTBEAT_S

KEY = "a key of this test"


class MasterWithHttp:
    """A master with its HTTP side, a client of each."""

    def __init__(self, server: MasterServer, url: str, http: aiohttp.ClientSession, rpc: AsyncClient) -> None:
        self.server, self.url, self.http, self.rpc = server, url, http, rpc

    async def ask(self, path: str, method: str = "GET", **more: Any) -> tuple[int, Any]:
        """Send a request, with the key unless headers are given."""
        more = {"headers": {"X-API-Key": KEY}, **more}
        async with self.http.request(method, self.url + path, **more) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    async def mount(self, name: str = "a", size_bytes: int = 1 << 20) -> None:
        await self.rpc.call(m.Mount(name, 1, "h", 4096, size_bytes, b"", 0.0), 5)
        assert (await self.rpc.call(m.Heartbeat(name, 1), 5)).is_known

    async def put(self, *keys: str, tenant: str = "") -> None:
        sizes = [100] * len(keys)
        started = await self.rpc.call(m.PutStart(1, "h", list(keys), sizes, sizes, tenant=tenant), 5)
        ids = [one.object_id for one in started.reserved]
        ended = await self.rpc.call(m.PutEnd(list(keys), ids, [b"crc!"] * len(keys), tenant=tenant), 5)
        assert ended.outcomes == [True] * len(keys)


async def opened(settings: MasterSettings) -> AsyncIterator[MasterWithHttp]:
    server = MasterServer(settings)
    port = await server.start()
    web = HttpServer(make_app(server), listen("127.0.0.1", 0))
    await web.start()
    rpc = AsyncClient(f"127.0.0.1:{port}", m.REPLIES, "the master")
    async with aiohttp.ClientSession() as http:
        yield MasterWithHttp(server, f"http://127.0.0.1:{web.port}", http, rpc)
    await rpc.close()
    await web.close()
    await server.close()


@pytest.fixture
async def served() -> AsyncIterator[MasterWithHttp]:
    async for one in opened(MasterSettings(port=0, admin_api_key=KEY, heartbeat_s=LONG_HEARTBEAT_S)):
        yield one


@pytest.fixture
async def keyless() -> AsyncIterator[MasterWithHttp]:
    """A master without a key."""
    async for one in opened(MasterSettings(port=0, heartbeat_s=LONG_HEARTBEAT_S)):
        yield one
