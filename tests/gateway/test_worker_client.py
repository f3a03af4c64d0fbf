# SPDX-License-Identifier: Apache-2.0
"""Each kind of a worker's answer, as one of three outcomes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

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
