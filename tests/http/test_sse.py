# SPDX-License-Identifier: Apache-2.0
"""However the bytes are cut, the events are the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

import aiohttp
import pytest
from fastapi import FastAPI, Response
from hypothesis import given
from hypothesis import strategies as st

from mooncake import clock
from mooncake.errors import ProtocolError
from mooncake.http import sse
from mooncake.http.server import HttpServer, listen
from mooncake.http.sse import EventParser, EventStreamResponse, StreamOutcome, data_of, name_of


@given(st.lists(st.integers(1, 9), max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_cuts_do_not_matter(cuts: list[int], newline: bytes) -> None:
    wire = b'data: {"a": 1}|| data: x|data:b||: comment||event: e|data: one|data: two||data: [DONE]||'
    wire = wire.replace(b"|", newline).replace(newline + b" data", newline + b"data")
    parser, found = EventParser(), []
    for size in cuts:
        found += parser.feed(wire[:size])
        wire = wire[size:]
    found += parser.feed(wire)
    assert found == [b'{"a": 1}', b"x\nb", b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(1, 9), max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_whole_events_are_the_bytes_that_were_sent(cuts: list[int], newline: bytes) -> None:
    events = [b"event: a|data: 1||", b": ping||", b"data: x|data:b||", b"event:b|data: []||"]
    events = [event.replace(b"|", newline) for event in events]
    wire = b"".join(events) + b"event: c"
    parser, found = EventParser(), []
    for size in cuts:
        found += parser.whole(wire[:size])
        wire = wire[size:]
    found += parser.whole(wire)
    assert (found, parser.rest) == (events, b"event: c")
    assert [name_of(event) for event in found] == ["a", "", "", "b"]
    assert [data_of(event) for event in found] == [b"1", b"", b"x\nb", b"[]"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(ProtocolError):
        EventParser().feed(b"data: " + b"x" * 200)
    with pytest.raises(ProtocolError):
        EventParser().whole(b"data: " + b"x" * 200)


def endless(ended: asyncio.Event, outcomes: list[StreamOutcome], deadline: float = math.inf) -> FastAPI:
    """An application whose stream has a first event and waits for the second one."""
    app = FastAPI()

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b"never"

    @app.get("/")
    async def answer() -> Response:
        response = EventStreamResponse(b"data: first\n\n", events(), {}, ended.set, deadline)
        response.on_outcome = outcomes.append
        return response

    return app


async def test_a_stream_that_is_cut_by_the_end_of_its_server_says_so() -> None:
    ended, outcomes = asyncio.Event(), list[StreamOutcome]()
    server = HttpServer(endless(ended, outcomes), listen("127.0.0.1", 0), grace_s=1.0)
    await server.start()
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{server.port}/") as response:
        assert await response.content.readuntil(b"\n\n") == b"data: first\n\n"
        closing = asyncio.create_task(server.close())
        rest = await response.content.read()
        assert b"gateway_stopping" in rest
        await closing
    assert ended.is_set() and outcomes == [StreamOutcome.BROKEN]


async def test_a_stream_whose_events_end_after_their_deadline_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "FINAL_EVENT_TIMEOUT_S", 0.01)
    ended, outcomes = asyncio.Event(), list[StreamOutcome]()
    server = HttpServer(endless(ended, outcomes, clock.monotonic()), listen("127.0.0.1", 0))
    await server.start()
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{server.port}/") as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
        await ended.wait()
    await server.close()
    assert outcomes == [StreamOutcome.BROKEN]
