# SPDX-License-Identifier: Apache-2.0
"""vLLM's own publisher of KV events, listening and connecting, is followed into the conductor's index."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from mooncake.conductor.messages import AddInstance
from mooncake.conductor.server import ConductorService
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.types import WorkerRole
from tests.conductor.test_event_subscriptions import free_endpoint
from tests.conductor.test_server import SETTINGS
from tests.waiting import until

TOKENS = [*range(1000, 1256)]
KEYS = [short_key(one) for one in block_hashes(TOKENS, 16, root_hash())]


@dataclass
class Instance:
    """The publisher's description, as an engine serves it."""

    publisher: Any
    address: str

    def store(self, first: int, last: int) -> None:
        """Blocks of 128 tokens, as vLLM has them on CPU."""
        from vllm.distributed.kv_events import BlockStored, EventBatch

        event = BlockStored(
            block_hashes=[7 + number for number in range(first, last)],
            parent_block_hash=7 + first - 1 if first else None,
            token_ids=TOKENS[first * 128 : last * 128],
            block_size=128,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        self.publisher.publish(EventBatch(ts=time.time(), events=[event]))

    def remove(self, block: int) -> None:
        from vllm.distributed.kv_events import BlockRemoved, EventBatch

        self.publisher.publish(EventBatch(ts=time.time(), events=[BlockRemoved([7 + block], medium="GPU")]))


@pytest.fixture
def make_publisher() -> Iterator[Callable[[str], Any]]:
    made: list[Any] = []

    def make(endpoint: str) -> Any:
        from vllm.distributed.kv_events import ZmqEventPublisher

        replay = free_endpoint().replace("127.0.0.1", "*")
        made.append(ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay, topic="kv@one@model"))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.fixture(params=["listens", "connects"])
async def instance(
    request: pytest.FixtureRequest, make_publisher: Callable[[str], Any]
) -> AsyncIterator[Instance]:
    from fastapi.encoders import jsonable_encoder

    endpoint = free_endpoint()
    publisher = make_publisher(
        endpoint if request.param == "connects" else endpoint.replace("127.0.0.1", "*")
    )

    async def sources(http: web.Request) -> web.Response:
        return web.json_response(jsonable_encoder({0: publisher.get_publisher_config()}))

    async def health(http: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/kv_event_sources", sources)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield Instance(publisher, f"127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


async def test_its_blocks_are_known(instance: Instance) -> None:
    service = ConductorService(SETTINGS)
    await service.start()

    async def has(num_blocks: int) -> bool:
        instance.publisher.publish(_nothing())  # one that connects may not be connected yet
        return service.core.index.matches(KEYS).get(instance.address, 0) == num_blocks

    try:
        instance.store(0, 1)
        service.post(AddInstance(instance.address, WorkerRole.DECODE))
        await until(lambda: has(8))
        instance.store(1, 2)
        await until(lambda: has(16))
        instance.remove(1)
        await until(lambda: has(8))
        assert service.core.instances[instance.address].is_engine
    finally:
        await service.close()


def _nothing() -> Any:
    from vllm.distributed.kv_events import EventBatch

    return EventBatch(ts=time.time(), events=[])
