from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI

from mooncake.errors import AddressInUse
from mooncake.web import WebServer, listen

app = FastAPI()


@app.get("/hello")
async def hello() -> dict[str, str]:
    return {"hello": "world"}


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
        return body


async def test_it_serves_until_closed() -> None:
    server = WebServer(app, listen("127.0.0.1", 0))
    await server.start()
    url = f"http://127.0.0.1:{server.port}/hello"
    assert await asyncio.to_thread(fetch, url) == b'{"hello":"world"}'
    await server.close()
    with pytest.raises(OSError):
        await asyncio.to_thread(fetch, url)


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"port {port} on 127.0.0.1"):
            listen("127.0.0.1", port)


def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with listen("::1", 0) as opened:
        assert opened.family == socket.AF_INET6


async def test_an_application_that_cannot_start_says_so() -> None:
    server = WebServer(_broken(), listen("127.0.0.1", 0))
    with pytest.raises(RuntimeError, match="did not start"):
        await server.start()
    await server.close()


def _broken() -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if app.title:
            raise ValueError("no disk")
        yield

    return FastAPI(lifespan=lifespan)
