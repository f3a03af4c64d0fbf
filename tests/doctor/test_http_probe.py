# SPDX-License-Identifier: Apache-2.0
"""Why a server does not answer, and how far its clock is off."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import ssl
from pathlib import Path

import pytest
from aiohttp import web

from mooncake.cli.certs import CertsSettings, make
from mooncake.doctor.facts import Trouble
from mooncake.doctor.http_probe import (
    MAX_ANSWER_BYTES,
    HttpProbe,
    HttpReply,
    HttpServerAt,
    Unanswered,
    skew_of,
)
from mooncake.security import Identity


def test_a_clock_within_whole_seconds_is_right() -> None:
    date = email.utils.formatdate(1000, usegmt=True)
    for sent, received in ((999.2, 999.9), (1000.0, 1000.5), (1001.9, 1001.95)):
        assert skew_of(date, sent, received) == pytest.approx(0, abs=0.81)
    assert skew_of(date, 1300.0, 1300.1) == pytest.approx(-299)
    assert skew_of(date, 700.0, 700.1) == pytest.approx(299.9)
    assert skew_of("", 1.0, 2.0) is None and skew_of("yesterday", 1.0, 2.0) is None


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://[::1]:8000", "[::1]:8000"),
        ("https://[::1]/v1", "[::1]:443"),
        ("http://Engine-A:8000", "Engine-A:8000"),
        ("http://a", "a:80"),
    ],
)
def test_an_address_is_written_as_in_its_url(url: str, address: str) -> None:
    assert HttpServerAt(url).address == address


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"detail": "wrong"}', "wrong"),
        (b'{"error": "plain"}', "plain"),
        (b"<html>", "<html>"),
    ],
)
def test_messages_of_errors(body: bytes, message: str) -> None:
    assert HttpReply(400, body, {}, 0.0).message == message


async def test_a_server_that_closes_idle_connections_has_not_failed() -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\n{}")
        await reader.read(1)  # the next request on this connection, or its end
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with HttpProbe(Identity(), 5.0) as http:
            found = [await http.post(HttpServerAt(f"http://127.0.0.1:{port}"), "/", {}) for _ in range(3)]
    assert [one.status for one in found] == [200] * 3


async def refused(url: str, timeout_s: float = 5.0) -> Trouble:
    async with HttpProbe(Identity(), timeout_s) as http:
        with pytest.raises(Unanswered) as caught:
            await http.get(HttpServerAt(url), "/")
    assert caught.value.reach.detail
    return caught.value.reach.trouble


async def test_nothing_listens() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        assert await refused(f"http://127.0.0.1:{one.getsockname()[1]}") is Trouble.REFUSED
        assert await refused(f"https://127.0.0.1:{one.getsockname()[1]}") is Trouble.REFUSED


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
async def test_a_name_that_no_host_can_have(host: str) -> None:
    assert await refused(f"http://{host}:80") is Trouble.REFUSED
    assert await refused(f"https://{host}:443") is Trouble.REFUSED


async def test_a_server_that_is_silent() -> None:
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await refused(f"http://127.0.0.1:{port}", 0.2) is Trouble.SILENT


@pytest.mark.parametrize("answer", [b"\0\0\x18\x04\0\0\0", b"-ERR unknown command\r\n", b""])
async def test_what_listens_is_no_http_server(answer: bytes) -> None:
    """As a port of gRPC, of Redis, and of a store, which closes the connection."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with HttpProbe(Identity(), 5.0) as http:
            with pytest.raises(Unanswered) as caught:
                await http.get(HttpServerAt(url), "/")
    reach = caught.value.reach
    assert reach.trouble is Trouble.NO_HTTP
    assert reach.detail.startswith(f"{url}: what ") and reach.detail.endswith((" HTTP", " HTTP server"))


async def test_https_to_a_plain_server() -> None:
    async def hello(http: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        assert await refused(f"https://127.0.0.1:{port}") is Trouble.TLS
        async with HttpProbe(Identity(), 5.0) as http:
            reply = await http.get(HttpServerAt(f"http://127.0.0.1:{port}/"), "/")
        assert (reply.status, reply.body) == (200, b"hello")
        assert reply.skew_s == pytest.approx(0, abs=1.5)
    finally:
        await runner.cleanup()


async def test_http_to_a_server_with_tls(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "node.pem", tmp_path / "node.key")
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await refused(f"http://127.0.0.1:{port}", 3.0) in (Trouble.TLS, Trouble.SILENT)
        assert await refused(f"https://127.0.0.1:{port}") is Trouble.CERTIFICATE, "of an unknown authority"


async def test_an_endless_answer_is_cut() -> None:
    async def endless(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        for _ in range(12):
            await response.write(bytes(1 << 20))
        return response

    app = web.Application()
    app.router.add_get("/", endless)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with HttpProbe(Identity(), 20.0) as http:
            reply = await http.get(HttpServerAt(f"http://127.0.0.1:{runner.addresses[0][1]}"), "/")
        assert MAX_ANSWER_BYTES <= len(reply.body) < MAX_ANSWER_BYTES + (1 << 20)
    finally:
        await runner.cleanup()
