# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: read from a worker, written to a client.

Owns the bytes between two blank lines, and the handling of either side's disconnect. It does not know the
meaning of an event.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from mooncake import clock
from mooncake.errors import ProtocolError
from mooncake.http.openai import ApiError, gateway_stopping
from mooncake.http.server import CLOSE_EXTENSION

ResultT = TypeVar("ResultT")

FINAL_EVENT_TIMEOUT_S = 1.0
"""Time beyond its deadline in which an answer may send its final event."""

MAX_EVENT_BYTES = 16 << 20
"""Largest size of a worker's event."""

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n")


class EventParser:
    """Parser of a worker's stream: feed all received bytes to ``feed``, or all of them to ``whole``."""

    def __init__(self) -> None:
        self._rest = b""

    def whole(self, data: bytes) -> list[bytes]:
        """Return each event that ``data`` completes as it was sent, with its name and its blank line.

        Raises:
            ProtocolError: an event exceeds the size limit.
        """
        received = self._rest + data
        ends = [0, *(found.end() for found in _BLANK_LINE.finditer(received))]
        self._rest = received[ends[-1] :]
        self._check_size()
        return [received[begin:end] for begin, end in itertools.pairwise(ends)]

    @property
    def rest(self) -> bytes:
        """The bytes after the last complete event."""
        return self._rest

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that ``data`` completes.

        Raises:
            ProtocolError: an event exceeds the size limit.
        """
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        self._check_size()
        return [found for event in events if (found := data_of(event))]

    def _check_size(self) -> None:
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ProtocolError(f"a server-sent event of more than {MAX_EVENT_BYTES} bytes")


def data_of(event: bytes) -> bytes:
    """The data of an event; empty without any."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def name_of(event: bytes) -> str:
    """The name of an event; empty without one."""
    lines = [line[6:].strip() for line in event.split(b"\n") if line.startswith(b"event:")]
    return lines[-1].decode(errors="replace") if lines else ""


def unnamed_error(error: ApiError) -> bytes:
    """The event of an error in a stream whose events have no names."""
    return b"data: " + error.body() + b"\n\n"


class StreamOutcome(StrEnum):
    """How a stream has ended, whose status is always that of its beginning."""

    COMPLETE = "complete"
    BROKEN = "broken"
    "With an event that is an error, or without its end."
    CLIENT_LEFT = "client left"
    "Or it did not read until the deadline."


class EventStreamResponse(Response):
    """Response that writes events as they are made and stops making them when the client leaves.

    ``first`` was taken from ``events`` already; an ``ApiError`` that these raise becomes the last event.
    ``on_end`` is called once in every case, and then ``on_outcome``. A server that
    closes before its answers have ended cancels them: then the last event is an error. At ``deadline`` the
    answer ends even if the client reads nothing: then no error can be sent, and the connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        on_end: Callable[[], None],
        deadline: float = math.inf,
        error_event: Callable[[ApiError], bytes] = unnamed_error,
    ) -> None:
        # A proxy that buffers would delay the stream until its end.
        no_buffering = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**no_buffering, **headers})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._first = first
        self._events = events
        self._on_end = on_end
        self.on_outcome: Callable[[StreamOutcome], None] = _ignore
        self._is_in_the_middle = False
        self._deadline = deadline
        self._error_event = error_event
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_until_disconnect(receive))
        is_read, outcome = True, StreamOutcome.BROKEN
        try:
            is_read = await self._until_over(writing, leaving)
            if writing.done():
                outcome = writing.result()
            elif leaving.done() or self._is_sending:
                outcome = StreamOutcome.CLIENT_LEFT
        except asyncio.CancelledError:
            await _cancel(writing)
            if self._is_in_the_middle:
                body = self._error_event(gateway_stopping())
                await send({"type": "http.response.body", "body": body, "more_body": False})
            raise
        finally:
            await _cancel(writing, leaving)
            await self._events.aclose()
            self._on_end()
            self.on_outcome(outcome)
            if not is_read:
                scope.get("extensions", {}).get(CLOSE_EXTENSION, {"now": _no_close})["now"]()

    async def _until_over(
        self, writing: asyncio.Future[StreamOutcome], leaving: asyncio.Future[None]
    ) -> bool:
        """Wait for either task. False when the deadline has passed and the client reads nothing."""
        both: set[asyncio.Future[Any]] = {writing, leaving}
        left_s = max(0.0, self._deadline - clock.monotonic())
        wait_s = None if left_s == math.inf else left_s
        done, _ = await asyncio.wait(both, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not done and not self._is_sending:
            # Its events end at the same deadline, with an error event.
            done, _ = await asyncio.wait(
                both, timeout=FINAL_EVENT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        return bool(done)

    async def _write(self, send: Send) -> StreamOutcome:
        outcome = StreamOutcome.COMPLETE
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._is_in_the_middle = True
        await self._send(send, self._first)
        try:
            async for event in self._events:
                await self._send(send, event)
        except ApiError as error:  # too late for an HTTP status, and no [DONE] follows
            outcome = StreamOutcome.BROKEN
            await self._send(send, self._error_event(error))
        self._is_in_the_middle = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome

    async def _send(self, send: Send, event: bytes) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._is_sending = False


def _ignore(outcome: StreamOutcome) -> None:
    """Do nothing, for streams that are not counted."""


def _no_close() -> None:
    """Do nothing, for servers other than ``HttpServer``: the connection ends when the application returns."""


async def cancel_on_disconnect(http: Request, answer: Awaitable[ResultT]) -> ResultT:
    """Wait for ``answer``, which is cancelled when the client disconnects.

    Raises:
        ApiError: 499, for the log; the client has left.
    """
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_until_disconnect(http.receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ApiError(499, "the client went away", code="client_closed_request")
        return answering.result()
    finally:
        await _cancel(answering, leaving)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
