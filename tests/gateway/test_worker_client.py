# SPDX-License-Identifier: Apache-2.0
"""Each kind of a worker's answer, as one of three outcomes, and for how long it may be silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from mooncake.gateway import worker_client
from mooncake.gateway.engine_apis import RESPONSES
from mooncake.gateway.worker_client import CompletionChunk, WorkerBusy, WorkerClient, WorkerFailed
from mooncake.http.openai import ApiError


@contextlib.asynccontextmanager
async def answering(status: int, body: bytes, content_type: str = "application/json") -> AsyncIterator[str]:
    """A server with one answer to everything; yields its address."""

    async def handle(request: web.Request) -> web.Response:
        headers = {"Retry-After": "3"}
        return web.Response(status=status, body=body, content_type=content_type, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def workers() -> AsyncIterator[WorkerClient]:
    workers = WorkerClient(stall_timeout_s=5.0)
    await workers.open()
    yield workers
    await workers.close()


async def chunks(workers: WorkerClient, body: bytes) -> list[CompletionChunk]:
    async with answering(200, body, "text/event-stream") as address:
        return [chunk async for chunk in workers.stream(address, {"prompt": [1]}, {})]


ERROR = b'{"error": {"message": "m", "type": "t", "param": "p", "code": "c"}}'
SGLANG_ERROR = b'{"object": "error", "message": "m", "type": "t", "param": "p", "code": 400}'


@pytest.mark.parametrize(
    ("status", "body", "meaning"),
    [
        (200, b"not json", WorkerFailed),
        (200, b'{"choices": 5}', WorkerFailed),
        (500, ERROR, WorkerFailed),
        (502, b"<html>", WorkerFailed),
        (429, ERROR, WorkerBusy),
        (503, b"", WorkerBusy),
        (400, ERROR, ApiError),
        (400, SGLANG_ERROR, ApiError),
        (404, b"no such page", ApiError),
    ],
)
async def test_an_answer_is_one_of_three_outcomes(
    workers: WorkerClient, status: int, body: bytes, meaning: type[Exception]
) -> None:
    async with answering(status, body) as address:
        with pytest.raises(meaning) as caught:
            await workers.complete(address, {"prompt": [1]}, {})
    if isinstance(caught.value, WorkerBusy):
        assert caught.value.answer.retry_after_s == 3.0
    if isinstance(caught.value, ApiError) and status == 400:
        assert (caught.value.detail.message, caught.value.detail.param) == ("m", "p")


async def test_an_unreachable_worker_was_not_reached(workers: WorkerClient) -> None:
    async with answering(200, b"") as address:
        pass
    with pytest.raises(WorkerFailed) as caught:
        await workers.complete(address, {"prompt": [1]}, {})
    assert not caught.value.was_reached


async def test_a_cookie_of_one_answer_does_not_go_with_the_next_request(workers: WorkerClient) -> None:
    """As load balancers before engines set them, to send all requests of one client to one engine."""
    received: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        received.append(request.headers.get("Cookie"))
        return web.json_response({}, headers={"Set-Cookie": "engine=1; Path=/"})

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"localhost:{runner.addresses[0][1]}"  # by name: cookies of addresses are ignored anyway
    try:
        for _ in range(2):
            await workers.whole(address, "/tokenize", {}, {})
    finally:
        await runner.cleanup()
    assert received == [None, None]


async def test_a_stream_is_read_to_its_end(workers: WorkerClient) -> None:
    body = b'data: {"choices": [{"index": 0, "text": "a", "new_field": 1}]}\n\ndata: [DONE]\n\n'
    [chunk] = await chunks(workers, body)
    assert chunk.choices[0].text == "a"


@pytest.mark.parametrize(
    "body", [b"", b'data: {"choices": []}\n\n', b"data: {\n\n", b"data: " + ERROR + b"\n\n"]
)
async def test_a_stream_without_a_proper_end_is_a_failure(workers: WorkerClient, body: bytes) -> None:
    with pytest.raises(WorkerFailed):
        await chunks(workers, body)


# --- silence


@dataclass
class SilentWorker:
    """A worker that answers probes, and sends the rest of its answer after some of them."""

    opening: bytes = b""
    "Sent at once, with the headers of a stream; empty: the answer is sent as a whole."
    rest: bytes = b""
    address: str = ""
    num_probes: int = 0
    has_waited: asyncio.Event = field(default_factory=asyncio.Event)

    async def health(self, request: web.Request) -> web.Response:
        self.num_probes += 1
        if self.num_probes == 3:
            self.has_waited.set()
        return web.Response()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self.opening:
            await self.has_waited.wait()
            return web.Response(body=self.rest)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(self.opening)
        await self.has_waited.wait()
        await response.write(self.rest)
        return response


@contextlib.asynccontextmanager
async def silent(opening: bytes, rest: bytes) -> AsyncIterator[SilentWorker]:
    worker = SilentWorker(opening, rest)
    app = web.Application()
    app.router.add_get("/health", worker.health)
    app.router.add_post("/{path:.*}", worker.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    worker.address = f"127.0.0.1:{runner.addresses[0][1]}"
    yield worker
    worker.has_waited.set()
    await runner.cleanup()


@pytest.fixture
async def impatient(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerClient]:
    """A client whose limit of silence is shorter than the time to its first probe."""
    monkeypatch.setattr(worker_client, "SILENCE_BEFORE_PROBE_S", 0.02)
    workers = WorkerClient(stall_timeout_s=0.01)
    await workers.open()
    yield workers
    await workers.close()


TOKEN, END = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n', b"data: [DONE]\n\n"
CREATED, DELTA = b"event: response.created\ndata: {}\n\n", b"event: delta\ndata: {}\n\n"


async def test_an_answer_in_one_piece_may_take_longer_than_a_stream_may_be_silent(
    impatient: WorkerClient,
) -> None:
    async with silent(b"", b"{}") as worker:
        assert await impatient.whole(worker.address, "/v1/completions", {}, {}) == b"{}"
        assert worker.num_probes >= 3


@pytest.mark.parametrize("opening", [b"", b": comment\n\n"], ids=["no header", "no token"])
async def test_the_first_token_may_take_longer_than_the_next_one(
    impatient: WorkerClient, opening: bytes
) -> None:
    async with silent(opening, TOKEN + END) as worker:
        [chunk] = [chunk async for chunk in impatient.stream(worker.address, {}, {})]
        assert chunk.choices[0].text == "a"


async def test_events_before_the_first_token_do_not_begin_the_answer(impatient: WorkerClient) -> None:
    async with silent(CREATED, DELTA) as worker:
        events = impatient.named_events(worker.address, RESPONSES.path, {}, {}, RESPONSES.is_opening)
        assert [event async for event in events] == [CREATED, DELTA]


@pytest.mark.parametrize("has_names", [False, True])
async def test_a_stream_that_has_begun_may_not_be_silent_for_long(
    impatient: WorkerClient, has_names: bool
) -> None:
    async with silent(DELTA if has_names else TOKEN, END) as worker:
        events: AsyncGenerator[Any, None] = impatient.stream(worker.address, {}, {})
        if has_names:
            events = impatient.named_events(worker.address, RESPONSES.path, {}, {}, RESPONSES.is_opening)
        await anext(events)
        with pytest.raises(WorkerFailed, match="stalled"):
            await anext(events)
        assert not worker.num_probes, "the limit is shorter than the time to the first probe"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stopped_worker_is_found_by_its_probe(
    impatient: WorkerClient, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    monkeypatch.setattr(worker_client, "HEALTH_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel accepts, and no process answers
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        with pytest.raises(WorkerFailed, match="/health was not answered"):
            if is_stream:
                await anext(impatient.stream(address, {}, {}))
            else:
                await impatient.whole(address, "/v1/completions", {}, {})


async def test_a_connection_without_another_end_is_ended_by_the_kernel(workers: WorkerClient) -> None:
    async with silent(TOKEN, END) as worker, workers._post(worker.address, "/", {}, {}) as response:
        assert response.connection is not None and response.connection.transport is not None
        used: socket.socket = response.connection.transport.get_extra_info("socket")
        assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60, "not the system's two hours"
