# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of the index that other routers query and at which they register publishers of KV events.

It owns the subscriptions to registered publishers and the shape of answers and errors; the contents of the
index and of answers are ``publisher_registry.py``'s. A publisher that can't be reached is registered all the
same: its events are read as soon as it is reachable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from fastapi import FastAPI, Request, Response
from prometheus_client import Counter, Gauge
from starlette.exceptions import HTTPException

import mooncake
from mooncake import metrics
from mooncake.conductor.event_subscriptions import EventReader, EventSource, subscribe
from mooncake.conductor.messages import BlocksCleared
from mooncake.conductor.publisher_registry import (
    PublisherRegistry,
    Query,
    QueryByHash,
    Register,
    Unregister,
)
from mooncake.errors import InvalidArgument
from mooncake.http import large_json, server
from mooncake.http.server import HttpServer, listen
from mooncake.log import get_logger
from mooncake.security import TRUSTED, HttpAuth, process_identity
from mooncake.security.http_auth import PRINCIPAL, AdminKey, challenge
from mooncake.types import InstanceId

log = get_logger(__name__)

MAX_BODY_BYTES = 16 << 20

LARGE_BLOCKS = 2048
"""Blocks of a prompt from which they are named beside the event loop; it takes about 2 µs a block."""

_queries = Counter(
    "mooncake_conductor_queries",
    "Queries of other routers, by path and the status of the answer.",
    ["path", "status"],
    registry=metrics.registry,
)
_registered = Gauge(
    "mooncake_conductor_registered_publishers",
    "Publishers of KV events that are registered.",
    registry=metrics.registry,
)

BodyT = TypeVar("BodyT")


class PublisherSubscriptions:
    """Follows the registered publishers. Use it on one event loop."""

    def __init__(self, seed: int) -> None:
        self.registry = PublisherRegistry(seed)
        self._zmq = zmq.asyncio.Context()
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}

    def register(self, request: Register) -> None:
        self._stop(request.holder)
        reader = EventReader(request.holder, self.registry.register(request))
        source = EventSource(request.endpoint, request.replay_endpoint or None, request.topic)
        self._tasks[request.holder] = asyncio.get_running_loop().create_task(self._follow(reader, source))
        _registered.set(len(self._tasks))
        log.info(
            "publisher_registered",
            instance=request.instance_id,
            rank=request.dp_rank,
            source=request.endpoint,
        )

    def unregister(self, request: Unregister) -> list[Register]:
        gone = self.registry.unregister(request)
        for one in gone:
            self._stop(one.holder)
            log.info("publisher_unregistered", instance=one.instance_id, rank=one.dp_rank)
        _registered.set(len(self._tasks))
        return gone

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._zmq.destroy(linger=0)

    def _stop(self, holder: InstanceId) -> None:
        task = self._tasks.pop(holder, None)
        if task is not None:
            task.cancel()

    async def _follow(self, reader: EventReader, source: EventSource) -> None:
        try:
            await subscribe(self._zmq, reader, source, self.registry.take)
        except zmq.ZMQError as error:
            log.warning(
                "kv_events_ignored", instance=reader.instance, source=source.endpoint, reason=str(error)
            )
        except Exception as error:  # whatever it is, the index must not keep what is no longer followed
            log.exception(
                "kv_events_ignored", instance=reader.instance, source=source.endpoint, reason=repr(error)
            )
            self.registry.take(BlocksCleared(reader.instance, "lost: its events are not followed"))


class QueryServer:
    """Serves ``publishers`` by HTTP."""

    def __init__(self, publishers: PublisherSubscriptions, host: str, port: int, api_key: str = "") -> None:
        self._publishers = publishers
        app = HttpAuth(make_app(publishers, api_key), None, TRUSTED, open_paths=("/health",), api_key=api_key)
        self._web = HttpServer(app, listen(host, port), tls=process_identity().server_tls)
        self.port = self._web.port

    async def start(self) -> None:
        await self._web.start()

    async def close(self) -> None:
        await self._web.close()
        await self._publishers.close()


class _Invalid(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def make_app(publishers: PublisherSubscriptions, api_key: str = "") -> FastAPI:
    """Make the HTTP application. Changes of registrations need ``api_key`` in the header X-API-Key; without a
    configured key they are refused."""
    key = AdminKey(api_key)
    app = FastAPI(title="Mooncake conductor", version=mooncake.__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(_Invalid)
    async def _invalid(http: Request, error: _Invalid) -> Response:
        response = _answer(http, {"error": str(error)}, error.status)
        response.headers.update(challenge(error.status))
        return response

    @app.exception_handler(HTTPException)
    async def _not_served(http: Request, error: HTTPException) -> Response:
        return _json({"error": f"{http.method} {http.url.path}: {error.detail}"}, error.status_code)

    @app.post("/register")
    async def register(http: Request) -> Response:
        """Subscribe to the KV events of an instance; needs the key."""
        _check_key(http, key)
        request = await _body(http, Register)
        publishers.register(request)
        return _answer(http, {"status": "registered successfully", "instance_id": request.instance_id})

    @app.post("/unregister")
    async def unregister(http: Request) -> Response:
        """End subscriptions, and forget the blocks that they reported; needs the key."""
        _check_key(http, key)
        request = await _body(http, Unregister)
        gone = publishers.unregister(request)
        if not gone:
            raise _Invalid(404, f"`instance_id` {request.instance_id!r} is not registered with these fields")
        names = [f"{one.instance_id}|{one.scope.tenant}|{one.dp_rank}" for one in gone]
        return _answer(http, {"status": "unregistered successfully", "removed_instances": names})

    @app.post("/query")
    async def query(http: Request) -> Response:
        """How many tokens of a prompt each instance has cached."""
        request = await _body(http, Query)
        return _answer(http, await _match(publishers.registry, request))

    @app.post("/query_by_hash")
    async def query_by_hash(http: Request) -> Response:
        """How many tokens of a prompt, given as its block hashes, each instance has cached."""
        request = await _body(http, QueryByHash, block_hash="seq_hashes")
        return _answer(http, await _match(publishers.registry, request))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether it serves, and the number of registered publishers."""
        return _json({"status": "ok", "publishers": len(publishers.registry.registered)})

    @app.get("/metrics")
    async def page() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(metrics.page(), media_type=metrics.CONTENT_TYPE)

    return app


def read_registrations(path: str) -> tuple[int | None, list[Register]]:
    """The port and the publishers in a file of the existing conductor's form.

    Raises:
        InvalidArgument: the file can't be read, or has another form.
    """
    try:
        text = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgument("registrations", path, f"a file that can be read ({error.strerror})") from error
    try:
        file = msgspec.json.decode(text, type=_RegistrationsFile)
        found = [
            msgspec.convert({"instance_id": name, **fields}, Register)
            for name, fields in file.kvevent_instance.items()
        ]
    except msgspec.MsgspecError as error:
        raise InvalidArgument("registrations", path, f"a file as in docs/conductor.md ({error})") from error
    return file.http_server_port, found


class _RegistrationsFile(msgspec.Struct):
    http_server_port: int | None = None
    kvevent_instance: dict[str, dict[str, Any]] = {}


async def _match(registry: PublisherRegistry, request: Query | QueryByHash) -> dict[str, Any]:
    """The answer to a query; only the index is read on the event loop if the query is large."""
    if request.num_blocks < LARGE_BLOCKS:
        return registry.answer(request)
    return registry.answer(request, await large_json.beside(registry.keys_of, request))


async def _body(http: Request, shape: type[BodyT], **aliases: str) -> BodyT:
    try:
        text = await server.read_body(http, MAX_BODY_BYTES)
    except server.BodyTooLarge as error:
        raise _Invalid(413, str(error)) from error
    except server.BodyBudgetExceeded as error:
        raise _Invalid(503, str(error)) from error
    try:
        return await large_json.decoded(text, partial(_decoded, shape, aliases))
    except msgspec.ValidationError as error:
        raise _Invalid(400, str(error)) from error
    except msgspec.DecodeError as error:
        raise _Invalid(400, f"the body is not JSON: {error}") from error


def _decoded(shape: type[BodyT], aliases: Mapping[str, str], text: bytes) -> BodyT:
    """A body as ``shape``; ``aliases``: other names of its fields. Raises msgspec.DecodeError."""
    if len(text) < large_json.LARGE_BYTES and not aliases:
        return large_json.decode_as(text, shape)
    fields = large_json.decode(text)
    if isinstance(fields, dict):
        fields = {aliases.get(name, name): value for name, value in fields.items()}
    return msgspec.convert(fields, shape)


def _check_key(http: Request, key: AdminKey) -> None:
    refusal = key.refusal(http.headers, http.scope.get(PRINCIPAL))
    if refusal is not None:
        raise _Invalid(refusal.status, refusal.message)


def _answer(http: Request, answer: Any, status: int = 200) -> Response:
    _queries.labels(http.url.path, status).inc()
    return _json(answer, status)


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
