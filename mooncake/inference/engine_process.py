# SPDX-License-Identifier: Apache-2.0
"""The process around an engine: its link to the store, its thread, its KV events, its HTTP server.

Owns the order in which these start and stop, the same for a worker and for an engine without a model; both
bring their own model. An engine also starts without its store and connects when the store is up: the pool
makes answers faster and is never needed for one. It listens only when it can answer: probes of orchestrators
open a connection, and one that the kernel accepts while the model is loaded would end the wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from fastapi import FastAPI

from mooncake.connectors.memory import HostMemory
from mooncake.connectors.store_link import StoreLink
from mooncake.errors import MooncakeError
from mooncake.http.connections import Deadlines
from mooncake.http.server import HttpServer, listen
from mooncake.inference.api import Api, create_app
from mooncake.inference.blocks import BlockEvent, PoolBlocksStored
from mooncake.inference.engine import Engine
from mooncake.inference.generator import Generator
from mooncake.inference.kv_events import WorkerKvEventPublisher
from mooncake.inference.request_spans import SERVICE
from mooncake.inference.tokenizer import AnyTokenizer
from mooncake.kv_events import MEDIUM_DEVICE, BlockRemoved, BlockStored, KvEvent
from mooncake.kvlayout import KvIdentity
from mooncake.log import get_logger
from mooncake.security import NODES_AND_ADMINS, HttpAuth, check_address, process_identity
from mooncake.store import AsyncStore, StoreSettings
from mooncake.tracing import process_tracing
from mooncake.tracing.asgi import TracedRequests
from mooncake.transfer import TransferEngine, TransferSettings

log = get_logger(__name__)

DEADLINES = Deadlines(send_s=120.0)
"""A gateway whose client reads slowly reads slowly, too; its own, shorter timeout ends the answer first."""

STORE_PATIENCE_S = 1.0
"""Timeout of a lookup, which then counts as a miss: computing the blocks takes about as long."""


ANSWER_GRACE_S = 0.5
"""Time in which the errors of failed requests are sent before the process ends."""


async def serve(
    running: contextlib.AbstractAsyncContextManager[Api],
    host: str,
    port: int,
    lost: asyncio.Future[MooncakeError] | None = None,
) -> None:
    """Serve an engine's API until cancelled, or until ``lost``, whose error it raises.

    Raises AddressInUse when the port is taken.
    """
    check_address(host)
    with _reserved(host, port) as port:
        async with running as api:
            # The clients of a worker are gateways and conductors: nodes of the cluster.
            app = _traced(create_app(api), f"{host}:{port}")
            app = HttpAuth(app, levels=NODES_AND_ADMINS, open_paths=("/version",))
            tls = process_identity().server_tls
            server = HttpServer(app, listen(host, port), tls=tls, deadlines=DEADLINES)
            try:
                await server.start()
                log.info(
                    "ready",
                    role=api.role,
                    address=f"{'https' if tls else 'http'}://{host}:{server.port}",
                    model=api.model,
                )
                waiting = asyncio.ensure_future(server.wait())
                ends: list[asyncio.Future[Any]] = [waiting] if lost is None else [waiting, lost]
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    if lost is not None and lost.done():
                        await asyncio.sleep(ANSWER_GRACE_S)
                        raise lost.result()
                    waiting.result()
                finally:
                    waiting.cancel()
            finally:
                await server.close()


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Own a port without listening: connections are refused, and no other process gets it as a free one.

    Yields the port. Raises AddressInUse when another process listens there. A second engine that is given the
    same port gets it, too, and fails when it listens: a reservation that excludes it would itself be refused
    while connections of an engine that has just ended are in TIME_WAIT.
    """
    with listen(host, port) as taken:
        family, address = taken.family, taken.getsockname()
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        yield address[1]


def _traced(app: FastAPI, address: str) -> Any:
    """``app``, or a middleware around it where traces are on."""
    tracing = process_tracing()
    if not tracing.is_on:
        return app
    names = dict.fromkeys(("/v1/completions", "/v1/chat/completions"), "worker")
    return TracedRequests(app, tracing, SERVICE, address, names, only_continued=True)


@contextlib.asynccontextmanager
async def connect_store_link(
    master: str,
    transfer_settings: TransferSettings,
    identity: KvIdentity,
    memory: HostMemory,
    make: Callable[..., StoreLink] = StoreLink,
) -> AsyncIterator[StoreLink]:
    """The link between ``memory`` and the store of ``master``; ``make`` is called as ``StoreLink`` is."""
    async with contextlib.AsyncExitStack() as stack:
        check_address(transfer_settings.listen_host)
        transfer = TransferEngine(transfer_settings)
        stack.callback(transfer.close)
        store = AsyncStore(master, transfer, StoreSettings(timeout_s=STORE_PATIENCE_S))
        stack.push_async_callback(store.close)
        link = make(store, transfer, identity, memory, asyncio.get_running_loop())
        stack.push_async_callback(link.close)
        log.info("store_connected", master=master, identity=identity.digest)
        yield link


@contextlib.asynccontextmanager
async def run_api(
    engine: Engine, tokenizer: AnyTokenizer, host: str, kv_events_port: int, **api: Any
) -> AsyncIterator[Api]:
    """``engine`` on its thread, as the ``Api`` of its HTTP server; ``api``: further fields of that."""
    block_tokens = engine.runner.layout.block_tokens
    async with contextlib.AsyncExitStack() as stack:
        publisher = WorkerKvEventPublisher(host)
        stack.push_async_callback(publisher.close)
        source = await publisher.start(kv_events_port)

        def publish(events: Sequence[BlockEvent]) -> None:
            publisher.publish([_as_kv_event(event, block_tokens) for event in events])

        generator = Generator(engine, tokenizer, asyncio.get_running_loop(), publish)
        generator.start()
        # In a thread: the last saves need this loop to finish.
        stack.push_async_callback(asyncio.to_thread, generator.stop)
        yield Api(generator, events=source, **api)


def _as_kv_event(event: BlockEvent, block_tokens: int) -> KvEvent:
    if isinstance(event, PoolBlocksStored):
        return BlockStored(
            block_hashes=list(event.hashes),
            parent_block_hash=event.parent,
            token_ids=list(event.token_ids),
            block_size=block_tokens,
            medium=MEDIUM_DEVICE,
        )
    return BlockRemoved(block_hashes=list(event.hashes), medium=MEDIUM_DEVICE, reason=event.reason)
