# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
import urllib.request
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from mooncake import metrics
from mooncake.cli.certs import CertsSettings, make
from mooncake.errors import AddressInUse
from mooncake.http.connections import ConnectionPhase, ConnectionTable, Deadlines
from mooncake.http.server import (
    CLOSE_EXTENSION,
    MAX_PAGE_CONNECTIONS,
    BodyBudgetExceeded,
    BodyTooLarge,
    CountingTransport,
    HttpServer,
    listen,
    read_body,
    serve_metrics,
)
from mooncake.security import Identity, SecuritySettings
from tests.waiting import until

app = FastAPI()


@app.get("/hello")
async def hello() -> dict[str, str]:
    return {"hello": "world"}


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
        return body


async def test_it_serves_until_closed() -> None:
    server = HttpServer(app, listen("127.0.0.1", 0))
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
    server = HttpServer(_broken(), listen("127.0.0.1", 0))
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


# --- the edge: clients that send little, much, or read nothing

QUICK = Deadlines(header_s=0.3, body_s=0.3, send_s=0.3, idle_s=0.3, refused_s=0.3)


@asynccontextmanager
async def edge(application: Any = None, **options: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(application or _bodies(), listen("127.0.0.1", 0), grace_s=1.0, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def _bodies(most_bytes: int = 1000) -> FastAPI:
    made = FastAPI()

    @made.post("/")
    async def size(http: Request) -> Response:
        try:
            return PlainTextResponse(str(len(await read_body(http, most_bytes))))
        except (BodyTooLarge, BodyBudgetExceeded) as error:
            return PlainTextResponse(str(error), 413 if isinstance(error, BodyTooLarge) else 503)

    @made.get("/hello")
    async def hello() -> Response:
        return PlainTextResponse("hello")

    @made.post("/refused")
    async def refused() -> Response:
        return PlainTextResponse("no", 401)

    return made


async def opened(server: HttpServer, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    """All bytes until the server closes; the test fails if it does not."""
    found = bytearray()
    async with asyncio.timeout(20):
        try:
            while part := await reader.read(65536):
                found += part
        except ConnectionResetError:
            pass
    return bytes(found)


ASK = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /he", b"GET /hello HTTP/1.1\r\nHost: x\r\n", ASK % 5 + b"12", b"GET /hello HTTP/1.1\r\n\r\n"],
    ids=["nothing", "half a line", "half a header", "half a body", "no second request"],
)
async def test_who_does_not_go_on_is_cut(sent: bytes) -> None:
    async with edge(deadlines=QUICK) as server:
        reader, writer = await opened(server, sent)
        answer = await to_the_end(reader)
        assert (b"hello" in answer) == (b"\r\n\r\n" in sent and b"GET" in sent)
        writer.close()
        await until(lambda: not len(server.acceptor.connections))


async def test_silent_strangers_make_room_for_who_asks() -> None:
    async with edge(max_connections=4) as server:
        outsiders = [await opened(server, b"GET /") for _ in range(12)]
        assert await asyncio.to_thread(fetch, f"http://127.0.0.1:{server.port}/hello") == b"hello"
        assert len(server.acceptor.connections) <= 4
        for reader, writer in outsiders[:8]:
            assert await to_the_end(reader) == b""
            writer.close()


async def test_who_is_being_served_is_not_cut_for_another() -> None:
    release = asyncio.Event()
    made = FastAPI()

    @made.get("/slow")
    async def slow() -> Response:
        await release.wait()
        return PlainTextResponse("slow")

    async with edge(made, max_connections=2) as server:
        asked = b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        served = [await opened(server, asked) for _ in range(2)]
        await until(lambda: server.acceptor.connections.count(ConnectionPhase.ANSWER) >= 2)
        reader, writer = await opened(server, asked)
        assert b"503 Service Unavailable" in await to_the_end(reader)
        writer.close()
        release.set()
        for reader, writer in served:
            assert (await to_the_end(reader)).endswith(b"slow")
            writer.close()


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_large_body_is_refused_before_it_is_read(is_announced: bool) -> None:
    async with edge() as server:
        asked = ASK % (1 << 30)
        if not is_announced:
            chunk = b"%x\r\n" % 2000 + b"x" * 2000 + b"\r\n"
            asked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
        reader, writer = await opened(server, asked)
        async with asyncio.timeout(20):
            assert b"413" in await reader.readline()
        writer.close()
        assert server.bodies.num_held == 0


async def test_bodies_share_a_bounded_memory_and_give_it_back() -> None:
    async with edge() as server:
        server.bodies.most_bytes = 2000
        held = [await opened(server, ASK % 901 + b"x" * 900) for _ in range(2)]
        await until(lambda: server.bodies.num_held >= 1800)
        reader, writer = await opened(server, ASK % 900 + b"x" * 900)
        async with asyncio.timeout(20):
            assert b"503" in await reader.readline()
        writer.close()
        for reader, writer in held:
            writer.write(b"x")
            async with asyncio.timeout(20):
                assert b"200" in await reader.readline()
            writer.close()
        await until(lambda: not server.bodies.num_held)


async def test_a_header_without_end_is_refused() -> None:
    async with edge() as server:
        reader, writer = await opened(server, b"GET /hello HTTP/1.1\r\n")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                for number in range(20_000):
                    writer.write(b"X-%d: %s\r\n" % (number, b"y" * 100))
                    await writer.drain()
            assert b"431" in await reader.readline()
        writer.close()


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
FIELD = b"X-A: " + b"y" * 1000 + b"\r\n"


async def send_without_end(server: HttpServer, start: bytes, more: bytes) -> None:
    """Send ``start``, and then far more of ``more`` than a header may have; the server must close."""
    reader, writer = await opened(server, start)
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            for _ in range((16 << 20) // len(more)):
                writer.write(more)
                await writer.drain()
    await to_the_end(reader)
    writer.close()
    await until(lambda: not len(server.acceptor.connections))


def num_cut(reason: str) -> float:
    return metrics.registry.get_sample_value("mooncake_http_cut_total", {"reason": reason}) or 0.0


@pytest.mark.parametrize("start", [b"0\r\n", b"0\r\nX-A: ", b"2;"], ids=["fields", "field", "extension"])
@pytest.mark.parametrize("path", ["/", "/refused"])
async def test_a_trailer_without_end_is_refused(start: bytes, path: str) -> None:
    more = FIELD * 20 if start.endswith(b"0\r\n") else b"y" * 20_000
    before = num_cut("large")
    async with edge(deadlines=Deadlines(body_s=300.0, refused_s=300.0)) as server:
        await send_without_end(server, CHUNKED.replace(b" / ", b" %b " % path.encode()) + start, more)
    assert num_cut("large") == before + 1


@pytest.mark.parametrize(("num_more", "status"), [(0, b" 200 "), (1, b" 431 ")])
async def test_a_trailer_may_be_as_large_as_a_header(num_more: int, status: bytes) -> None:
    async with edge(deadlines=Deadlines(body_s=300.0)) as server:
        reader, writer = await opened(server, CHUNKED)
        await until(lambda: server.acceptor.connections.count(ConnectionPhase.BODY) == 1)
        start, end = b"0\r\nX-A: ", b"\r\n\r\n"
        num_field = Deadlines().header_bytes + num_more - len(start) - len(end)
        writer.write(start + b"y" * num_field + end)
        async with asyncio.timeout(20):
            assert status in await reader.readline()
        writer.close()


@pytest.mark.parametrize("start", [b"GET /", b"GET /hello HTTP/1.1\r\n"], ids=["line", "fields"])
async def test_a_header_without_end_is_refused_while_the_request_before_it_runs(start: bytes) -> None:
    made, begun, ended = FastAPI(), asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        begun.set()
        yield b"begun"
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @made.get("/")
    async def slow() -> Response:
        return StreamingResponse(parts())

    before = num_cut("large")
    async with edge(made) as server:
        more = FIELD * 20 if start.endswith(b"\r\n") else b"y" * 20_000
        asked = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        reader, writer = await opened(server, asked)
        async with asyncio.timeout(20):
            await begun.wait()
            await reader.readuntil(b"begun")
            with contextlib.suppress(ConnectionError):
                writer.write(start)
                for _ in range(1000):
                    writer.write(more)
                    await writer.drain()
            assert b"431" not in await to_the_end(reader), "it would be a part of the answer that has begun"
            await ended.wait()
        writer.close()
        await until(lambda: not len(server.acceptor.connections))
    assert num_cut("large") == before + 1


def _fields(seen: list[list[tuple[bytes, bytes]]]) -> Any:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        more = True
        while more:
            more = (await receive()).get("more_body", False)
        seen.append(list(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    return application


@pytest.mark.parametrize("is_split", [False, True])
async def test_fields_of_a_trailer_are_none_of_a_header(is_split: bool) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []
    async with edge(_fields(seen)) as server:
        reader, writer = await opened(server, CHUNKED)
        trailer = b"0\r\nX-API-Key: secret\r\nExpect: 100-continue\r\n\r\n"
        for at in range(0, len(trailer), 1 if is_split else len(trailer)):
            writer.write(trailer[at : at + (1 if is_split else len(trailer))])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"GET / HTTP/1.1\r\nHost: y\r\nConnection: close\r\n\r\n")
        await to_the_end(reader)
        writer.close()
    assert seen == [
        [(b"host", b"x"), (b"transfer-encoding", b"chunked")],
        [(b"host", b"y"), (b"connection", b"close")],
    ]


async def test_large_bodies_in_small_and_large_chunks_are_no_headers() -> None:
    small, large = b"1\r\nx\r\n" * 50_000, b"40000\r\n" + b"x" * 0x40000 + b"\r\n"
    sized = b"Content-Length: 700000\r\n\r\n" + b"x" * 700_000
    async with edge(_bodies(1 << 20)) as server:
        for body, num in ((small, 50_000), (large * 2, 0x80000)):
            reader, writer = await opened(server, CHUNKED.removesuffix(b"2\r\n{}\r\n") + body + b"0\r\n\r\n")
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + sized)
            answers = await to_the_end(reader)
            writer.close()
            assert answers.count(b" 200 OK") == 2 and str(num).encode() in answers and b"700000" in answers


async def test_a_closed_connection_keeps_no_header_until_a_garbage_collection() -> None:
    begun, kept = asyncio.Event(), list[weakref.ref[Any]]()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        kept.append(weakref.ref(scope["extensions"][CLOSE_EXTENSION]["now"].__self__))
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with edge(application) as server:
        gc.disable()
        try:
            _, writer = await opened(server, CHUNKED)
            async with asyncio.timeout(20):
                await begun.wait()
            writer.close()
            await until(lambda: not len(server.acceptor.connections))
            await until(lambda: kept[0]() is None)
        finally:
            gc.enable()


async def test_who_reads_nothing_is_cut_and_its_answer_ends() -> None:
    ended = asyncio.Event()
    made = FastAPI()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            ended.set()

    @made.get("/")
    async def much() -> Response:
        return StreamingResponse(endless())

    async with edge(made, deadlines=QUICK) as server:
        outsider = socket.create_connection(("127.0.0.1", server.port))
        outsider.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            await ended.wait()
            await until(lambda: not len(server.acceptor.connections))
        outsider.close()


async def test_a_client_that_leaves_ends_its_request_and_those_in_the_pipeline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, begun, ended = FastAPI(), [], []

    @made.get("/wait/{number}")
    async def wait(number: int, http: Request) -> Response:
        begun.append(number)
        while (await http.receive())["type"] != "http.disconnect":
            pass
        ended.append(number)
        return PlainTextResponse("unread")

    async with edge(made) as server:
        requests = [b"GET /wait/%d HTTP/1.1\r\nHost: h\r\n\r\n" % number for number in range(3)]
        _, writer = await opened(server, b"".join(requests))
        await until(lambda: bool(begun))
        writer.close()
        await until(lambda: bool(ended))
        await until(lambda: not server._server.server_state.tasks)
    assert (begun, ended) == ([0], [0])
    assert not caplog.records


async def test_what_is_no_http_is_logged_as_an_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with edge() as server:
        reader, _ = await opened(server, b"no such thing\r\n\r\n")
        assert b" 400 " in await to_the_end(reader)
    [found] = [record for record in caplog.records if "Invalid HTTP" in str(vars(record))]
    assert (found.getMessage(), found.levelno) == ("http_request_malformed", logging.DEBUG)


async def test_a_fault_of_an_application_is_logged_as_an_event(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            raise RuntimeError("boom")
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async with edge(broken) as server:
        reader, _ = await opened(server, b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert b" 500 " in await to_the_end(reader)
    [found] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert found.getMessage() == "http_request_failed" and found.exc_info


def test_what_is_written_to_a_closed_connection_is_dropped() -> None:
    written: list[bytes] = []

    class Closable(asyncio.Transport):
        is_closed = False

        def is_closing(self) -> bool:
            return self.is_closed

        def write(self, data: Any) -> None:
            if self.is_closed:  # as uvloop's transport does
                raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")
            written.append(data)

    transport = Closable()
    counting = CountingTransport(transport, ConnectionTable(QUICK, 1).opened(0.0))
    counting.write(b"one")
    transport.is_closed = True
    counting.write(b"two")
    counting.writelines([b"three"])
    assert written == [b"one"] and counting.num_written == 3


async def test_tls_handshakes_have_a_deadline_too(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path, name="n"))
    cert, key, ca = (str(tmp_path / name) for name in ("n.pem", "n.key", "ca.pem"))
    identity = Identity(SecuritySettings(cert, key, ca))
    async with edge(tls=identity.server_tls, deadlines=QUICK) as server:
        reader, writer = await opened(server)
        assert await to_the_end(reader) == b""
        writer.close()
        await until(lambda: not len(server.acceptor.connections))


async def test_strangers_in_their_tls_handshakes_make_room(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path, name="n"))
    cert, key, ca = (str(tmp_path / name) for name in ("n.pem", "n.key", "ca.pem"))
    identity = Identity(SecuritySettings(cert, key, ca))
    patient = Deadlines(header_s=300.0)
    async with edge(tls=identity.server_tls, deadlines=patient, max_connections=4) as server:
        idle = [await opened(server) for _ in range(4)]
        async with asyncio.timeout(20):
            await until(lambda: len(server.acceptor.connections) >= 4)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=identity.client_tls, server_hostname="n"
            )
            writer.write(b"GET /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"hello")
        for _, one in (*idle, (reader, writer)):
            one.close()


def test_strangers_leave_room_for_who_reads_the_metrics() -> None:
    server = serve_metrics("127.0.0.1", 0)
    try:
        num_threads = threading.active_count()
        idle = [
            socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(2 * MAX_PAGE_CONNECTIONS)
        ]
        page = fetch(f"http://127.0.0.1:{server.port}/metrics")
        assert b"mooncake_http_connections" in page
        assert threading.active_count() < num_threads + 50
        for one in idle:
            one.close()
        with pytest.raises(AddressInUse, match=f"{server.port} .*: --metrics-port"):
            serve_metrics("127.0.0.1", server.port)
    finally:
        server.close()
        server.close()
