# SPDX-License-Identifier: Apache-2.0
"""KV events in vLLM's dialect reach the index, from sockets that listen and sockets that connect."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from mooncake.conductor.messages import AddInstance, RemoveInstance
from mooncake.conductor.server import ConductorService
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.types import WorkerRole
from tests.conductor.test_server import SETTINGS
from tests.waiting import until

TOKENS = [*range(500, 564)]
KEYS = [short_key(one) for one in block_hashes(TOKENS, 16, root_hash())]


@dataclass
class Engine:
    """The part of a vLLM server that a conductor uses. Its blocks have 32 tokens, ours 16."""

    topic: str = "kv@a"
    can_replay: bool = True
    names_sources: bool = True
    address: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _runner: web.AppRunner | None = None

    async def start(self, connect_to: str = "") -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        if self.names_sources:
            app.router.add_get("/kv_event_sources", self._sources)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        self._pub = self.context.socket(zmq.PUB)
        self._replay = self.context.socket(zmq.ROUTER)
        if connect_to:
            self._pub.connect(connect_to)
            endpoint = connect_to
        else:
            endpoint = f"tcp://*:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        port = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self._task = asyncio.get_running_loop().create_task(self._answer())
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": f"tcp://*:{port}" if self.can_replay else None,
            "buffer_steps": 10_000,
            "topic": self.topic,
        }

    async def stop(self) -> None:
        self._task.cancel()
        self.context.destroy(linger=0)
        assert self._runner is not None
        await self._runner.cleanup()

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        sequence = len(self.sent)
        self.sent.append((sequence, payload))
        if not lost:
            await self._pub.send_multipart([self.topic.encode(), sequence.to_bytes(8, "big"), payload])

    async def store(self, block: int, lost: bool = False) -> None:
        """Publish that the engine's block of that number is stored; its hash is 100 plus the number."""
        parent = 100 + block - 1 if block else None
        tokens = TOKENS[block * 32 : block * 32 + 32]
        event = {"type": "BlockStored", "block_hashes": [100 + block], "parent_block_hash": parent}
        await self.publish({**event, "token_ids": tokens, "block_size": 32, "medium": "GPU"}, lost=lost)

    async def _answer(self) -> None:
        while True:
            who, _, start = await self._replay.recv_multipart()
            for sequence, payload in self.sent[int.from_bytes(start, "big") :]:
                await self._replay.send_multipart(
                    [who, b"", self.topic.encode(), sequence.to_bytes(8, "big"), payload]
                )
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replay.send_multipart([who, b"", self.topic.encode(), end, b""])

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _sources(self, request: web.Request) -> web.Response:
        return web.json_response({"0": self.config})


@contextlib.asynccontextmanager
async def service_of(*engines: Engine, **settings: Any) -> AsyncIterator[ConductorService]:
    service = ConductorService(replace(SETTINGS, **settings))
    await service.start()
    try:
        for engine in engines:
            service.post(AddInstance(engine.address, WorkerRole.DECODE))
        yield service
        service.core.check()
    finally:
        await service.close()
        for engine in engines:
            await engine.stop()


async def has(service: ConductorService, engine: Engine, num_blocks: int) -> bool:
    return service.core.index.matches(KEYS).get(engine.address, 0) == num_blocks


def free_endpoint() -> str:
    context = zmq.Context()
    with context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
    context.destroy()
    return f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("way", ["listens", "connects", "connects as set"])
async def test_blocks_of_an_engine_are_known_whichever_side_connects(way: str) -> None:
    endpoint = free_endpoint()
    engine = Engine()
    await engine.start("" if way == "listens" else endpoint)
    settings = {"kv_events_listen": endpoint} if way == "connects as set" else {}
    if settings:  # the engine knows the conductor by another name
        engine.config["endpoint"] = "tcp://conductor.example:5557"
    await engine.store(0)  # before any subscriber: comes by replay
    async with service_of(engine, **settings) as service:
        await until(lambda: has(service, engine, 2))
        await engine.store(1)

        async def all_arrived() -> bool:
            await engine.publish()  # one that connects may not be connected yet, and then loses its messages
            return await has(service, engine, 4)

        await until(all_arrived)
        await engine.publish({"type": "BlockRemoved", "block_hashes": [101], "medium": "GPU"})
        await until(lambda: has(service, engine, 2))
        await engine.store(1, lost=True)
        await engine.publish()  # the gap is seen, and filled
        await until(lambda: has(service, engine, 4))
        await engine.publish({"type": "AllBlocksCleared"})
        await until(lambda: has(service, engine, 0))


async def test_two_engines_that_connect_are_distinguished_by_their_topics() -> None:
    endpoint = free_endpoint()
    engines = [Engine("kv@a"), Engine("kv@b"), Engine("kv@b")]
    for engine in engines:
        await engine.start(endpoint)
    first, second, third = engines
    await first.store(0)
    await second.store(0)
    await second.store(1)
    await third.store(0)
    async with service_of(first, second) as service:
        await until(lambda: has(service, first, 2))
        await until(lambda: has(service, second, 4))
        service.post(AddInstance(third.address, WorkerRole.DECODE))  # it has the second's topic: not followed
        instance = service.core.instances[third.address]

        async def is_silent() -> bool:
            return instance.is_silent

        await until(is_silent)
        assert await has(service, third, 0)
        service.post(RemoveInstance(first.address))
        await second.publish({"type": "AllBlocksCleared"})

        async def has_cleared() -> bool:
            await second.publish()
            return await has(service, second, 0)

        await until(has_cleared)
    await third.stop()


async def test_an_engine_without_events_is_known_to_be_silent() -> None:
    dumb, off = Engine(names_sources=False), Engine()
    await dumb.start()
    await off.start()
    off.config |= {"enable_kv_cache_events": False, "publisher": "null"}
    async with service_of(dumb, off) as service:

        async def are_silent() -> bool:
            return all(one.is_silent and one.is_engine for one in service.core.instances.values())

        await until(are_silent)


async def test_where_an_engine_publishes_can_be_set() -> None:
    engine = Engine(names_sources=False)
    await engine.start()
    endpoint, replay = (
        engine.config[name].replace("*", "127.0.0.1") for name in ("endpoint", "replay_endpoint")
    )
    await engine.store(0)
    async with service_of(engine, event_sources=(f"{engine.address}={endpoint}={replay}",)) as service:
        await until(lambda: has(service, engine, 2))


@pytest.mark.parametrize("given", ["tcp://a:1", "a=tcp://a:1", "a:1", "a:1=5557"])
def test_a_source_that_can_t_be_read_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument, match="event_sources"):
        SchedulingSettings(event_sources=(given,))
