# SPDX-License-Identifier: Apache-2.0
"""Queries of other routers over real HTTP about publishers on real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq.asyncio

from mooncake.conductor import query_server
from mooncake.conductor.event_subscriptions import EventReader
from mooncake.conductor.key_translation import Fact, sequence_hashes
from mooncake.conductor.query_server import (
    LARGE_BLOCKS,
    PublisherSubscriptions,
    QueryServer,
    read_registrations,
)
from mooncake.conductor.server import ConductorSettings, serve
from mooncake.errors import InvalidArgument
from mooncake.http import large_json
from mooncake.http.openai import KvEventSource
from mooncake.http.server import listen
from mooncake.inference.kv_events import WorkerKvEventPublisher
from mooncake.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from mooncake.prefix import block_hashes, root_hash
from mooncake.rpc import AsyncClient
from mooncake.store import messages as m
from mooncake.store.master.kv_publisher import MasterKvEventPublisher as StoreEvents
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.conductor.test_event_subscriptions import LossyWire
from tests.waiting import LONG_HEARTBEAT_S, until

KEY = "a key of this test"
TOKENS = list(range(500, 564))
OURS = block_hashes(TOKENS, 16, root_hash())
NAMES = sequence_hashes(TOKENS, 16, 3)
QUERY = {"model": "m", "block_size": 16}


def stored(first: int, end: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(
        block_hashes=[*OURS[first:end]],
        parent_block_hash=OURS[first - 1] if first else root_hash(),
        token_ids=TOKENS[16 * first : 16 * end],
        block_size=16,
        medium=medium,
    )


class Router:
    """A router that uses our index."""

    def __init__(self, server: QueryServer, publishers: PublisherSubscriptions) -> None:
        self.publishers = publishers
        self._url = f"http://127.0.0.1:{server.port}"
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        await self._session.close()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Post with the key, unless another is given."""
        headers = headers or {"X-API-Key": KEY}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(self._url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> str:
        async with self._session.get(self._url + path) as response:
            assert response.status == 200
            return await response.text()

    async def register(self, source: KvEventSource, instance: str = "one", **more: Any) -> None:
        answer = await self.post("/register", registration(source, instance, **more))
        assert answer == (200, {"status": "registered successfully", "instance_id": instance})

    async def query(self, **more: Any) -> dict[str, Any]:
        status, answer = await self.post("/query", {**QUERY, "token_ids": TOKENS, **more})
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def longest(self, instance: str = "one", **more: Any) -> int:
        [found] = (await self.query(**more)).values()
        return int(found.get(instance, {"longest_matched": 0})["longest_matched"])


def registration(source: KvEventSource, instance: str, **more: Any) -> dict[str, Any]:
    return {
        "endpoint": source.endpoint,
        "replay_endpoint": source.replay_endpoint,
        "type": "vLLM",
        "modelname": "m",
        "instance_id": instance,
        "block_size": 16,
        "dp_rank": 0,
        **more,
    }


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    publishers = PublisherSubscriptions(seed=3)
    server = QueryServer(publishers, "127.0.0.1", 0, KEY)
    await server.start()
    router = Router(server, publishers)
    yield router
    publishers.registry.index.check()
    await router.close()
    await server.close()


@contextlib.asynccontextmanager
async def publishing(port: int = 0, replay_port: int = 0) -> AsyncIterator[WorkerKvEventPublisher]:
    publisher = WorkerKvEventPublisher()
    await publisher.start(port, replay_port)
    yield publisher
    await publisher.close()


def source_of(publisher: WorkerKvEventPublisher) -> KvEventSource:
    assert publisher.source is not None
    return publisher.source


async def test_tiers_ranks_and_hashes(router: Router) -> None:
    async with publishing() as first, publishing() as second:
        first.publish([stored(0, 2), stored(1, 3, "cpu"), stored(3, 4, "disk")])
        second.publish([stored(0, 1)])
        await router.register(source_of(first))
        await router.register(source_of(second), dp_rank=1)
        expected = {
            "one": {"longest_matched": 64, "GPU": 32, "CPU": 16, "DISK": 16, "DP": {"0": 64, "1": 16}}
        }

        async def is_known() -> bool:
            return await router.query() == {"default": expected}

        await until(is_known)
        by_hash = {**QUERY, "seq_hashes": NAMES}
        assert await router.post("/query_by_hash", by_hash) == (200, {"default": expected})
        by_hash = {**QUERY, "block_hash": [*NAMES[:1], 5, *NAMES[1:]]}  # the scan stops at the first miss
        _, answer = await router.post("/query_by_hash", by_hash)
        assert answer["default"]["one"]["longest_matched"] == 16
        assert await router.longest(token_ids=TOKENS[:40]) == 32, "a partial block does not count"
        assert await router.longest(token_ids=[1, *TOKENS]) == 0
        assert await router.query(instance_id="two") == {"default": {}}
        assert await router.longest(instance_id="one") == 64

        second.publish([BlockRemoved([*OURS[:1]], "GPU")])
        first.publish([AllBlocksCleared()])

        async def is_gone() -> bool:
            return await router.query() == {"default": {}}

        await until(is_gone)
    page = await router.get("/metrics")
    assert 'mooncake_conductor_queries_total{path="/query",status="200"}' in page
    assert json.loads(await router.get("/health")) == {"status": "ok", "publishers": 2}


async def test_tenants_models_adapters_and_salts_are_separate(router: Router) -> None:
    scopes: list[dict[str, str]] = [
        {},
        {"tenant_id": "t2"},
        {"model": "m2"},
        {"lora_name": "sql"},
        {"cache_salt": "pepper"},
    ]
    names = {"model": "modelname", "cache_salt": "additionalsalt"}
    async with contextlib.AsyncExitStack() as stack:
        for number, scope in enumerate(scopes):
            publisher = await stack.enter_async_context(publishing())
            publisher.publish([stored(0, 1 + number % 4)])
            as_registered = {names.get(name, name): value for name, value in scope.items()}
            await router.register(source_of(publisher), f"i{number}", **as_registered)
        for number, scope in enumerate(scopes):

            async def is_known(number: int = number, scope: dict[str, str] = scope) -> bool:
                return await router.longest(f"i{number}", **scope) == 16 * (1 + number % 4)

            await until(is_known)
            [(tenant, found)] = (await router.query(**scope)).items()
            assert tenant == scope.get("tenant_id", "default") and list(found) == [f"i{number}"]
    assert await router.query(block_size=32) == {"default": {}}


async def test_unregistered_is_forgotten(router: Router) -> None:
    async with publishing() as publisher:
        publisher.publish([stored(0, 4)])
        await router.register(source_of(publisher))
        await router.register(source_of(publisher), additionalsalt="pepper")
        await until(router.longest)
        request = registration(source_of(publisher), "one")
        del request["endpoint"], request["replay_endpoint"]
        answer = await router.post("/unregister", request)
        removed = ["one|default|0", "one|default|0"]
        assert answer == (200, {"status": "unregistered successfully", "removed_instances": removed})
        assert await router.query() == {"default": {}}
        status, answer = await router.post("/unregister", request)
        assert status == 404 and "`instance_id` 'one'" in answer["error"]


async def test_a_restarted_publisher_is_followed_again(router: Router) -> None:
    async with publishing() as publisher:
        source = source_of(publisher)
        ports = [int((one or "").rpartition(":")[2]) for one in (source.endpoint, source.replay_endpoint)]
        publisher.publish([stored(0, 4)])
        await router.register(source)
        await until(router.longest)
    async with publishing(*ports) as publisher:

        async def is_new() -> bool:
            return await router.longest() == 16

        await until(is_new, poke=lambda: publisher.publish([stored(0, 1)]))


async def test_a_publisher_that_starts_later_is_followed(router: Router) -> None:
    """Registered before it listens; the gap since its beginning is replayed."""
    with contextlib.closing(listen("127.0.0.1", 0)) as one, contextlib.closing(listen("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    await router.register(KvEventSource(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", ""))
    assert await router.query() == {"default": {}}
    async with publishing(*ports) as publisher:
        publisher.publish([stored(0, 3)])

        async def is_known() -> bool:
            return await router.longest() == 64

        await until(is_known, poke=lambda: publisher.publish([stored(3, 4)]))


async def test_a_fault_in_reading_events_ends_the_subscription_with_its_blocks(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with publishing() as publisher:
        publisher.publish([stored(0, 2)])
        await router.register(source_of(publisher))
        await until(router.longest)

        def fail(reader: EventReader, sequence: int, payload: bytes) -> list[Fact]:
            raise AssertionError("a fault of the reader itself")

        monkeypatch.setattr(EventReader, "read", fail)

        async def is_unknown() -> bool:
            return await router.query() == {"default": {}}

        await until(is_unknown, poke=lambda: publisher.publish([stored(2, 3)]))


async def test_a_gap_is_replayed(router: Router) -> None:
    context = zmq.asyncio.Context()
    async with publishing() as publisher:
        wire = LossyWire(context, publisher)
        source = KvEventSource(wire.source.endpoint, wire.source.replay_endpoint, "")
        await router.register(source)
        await until(router.longest, poke=lambda: publisher.publish([stored(0, 1)]))
        wire.dropping = True
        publisher.publish([stored(1, 2)])

        async def is_dropped() -> bool:
            return wire.num_dropped > 0

        await until(is_dropped)
        assert await router.longest() == 16
        wire.dropping = False
        publisher.publish([stored(2, 3)])

        async def is_whole() -> bool:
            return await router.longest() == 48

        await until(is_whole)
        wire.task.cancel()
    context.destroy(linger=0)
    assert 'mooncake_conductor_kv_event_gaps_total{outcome="replayed"}' in await router.get("/metrics")


async def test_the_existing_store_s_events(router: Router) -> None:
    settings = MasterSettings(
        port=0,
        kv_events_endpoint="tcp://127.0.0.1:*",
        kv_events_replay_endpoint="tcp://127.0.0.1:*",
        kv_events_legacy=False,
        heartbeat_s=LONG_HEARTBEAT_S,
    )
    server = MasterServer(settings)
    client = AsyncClient(f"127.0.0.1:{await server.start()}", m.REPLIES)
    await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
    await client.call(m.Heartbeat("a", 1), 5)

    async def put(key: str, tenant: str) -> None:
        started = await client.call(m.PutStart(1, "h", [key], [100], [100], tenant=tenant), 5)
        ids = [one.object_id for one in started.reserved]
        await client.call(m.PutEnd([key], ids, [b"crc!"], tenant=tenant), 5)

    events = StoreEvents(server)
    events.start()
    try:
        await put(str(NAMES[0]), "")
        await put(hex(NAMES[0]), "t2")
        await put("no block's", "")
        source = KvEventSource(events.endpoint, events.replay_endpoint, "")
        await router.register(source, "store", type="Mooncake")

        async def is_known(tenant: str = "default", num_tokens: int = 16) -> bool:
            found = (await router.query(tenant_id=tenant))[tenant]
            cpu = found.get("store", {"CPU": 0})["CPU"]
            return bool(cpu == num_tokens)

        await until(is_known)
        await until(lambda: is_known("t2"))
        await put(str(NAMES[1]), "t2")
        await until(lambda: is_known("t2", 32))
        await client.call(m.Remove([str(NAMES[0])], True), 5)
        await until(lambda: is_known("default", 0))
        assert await is_known("t2", 32)
    finally:
        await events.close()
        await client.close()
        await server.close()


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("/query", {"model": None}, "model"),
        ("/query", {"block_size": 0}, "block_size"),
        ("/query", {"block_size": "16"}, "block_size"),
        ("/query", {"token_ids": [1, -1]}, "token_ids"),
        ("/query", {"token_ids": [2**32]}, "token_ids"),
        ("/query", {"tenant_id": 7}, "tenant_id"),
        ("/query", {"token_ids": [1] * 65537, "block_size": 1}, "token_ids"),
        ("/query_by_hash", {"seq_hashes": [2**64]}, "seq_hashes"),
        ("/query_by_hash", {"seq_hashes": [1] * 65537}, "seq_hashes"),
        ("/query_by_hash", {}, "seq_hashes"),
        ("/register", {"type": "TensorRT"}, "type"),
        ("/register", {"endpoint": "tcp://*:5557"}, "endpoint"),
        ("/register", {"endpoint": "10.0.0.1:5557"}, "endpoint"),
        ("/register", {"replay_endpoint": "tcp://h:99999"}, "replay_endpoint"),
        ("/register", {"dp_rank": -1}, "dp_rank"),
        ("/register", {"instance_id": ""}, "instance_id"),
        ("/unregister", {"modelname": None}, "modelname"),
    ],
)
async def test_errors_name_the_field(router: Router, path: str, change: dict[str, Any], named: str) -> None:
    body: dict[str, Any] = registration(KvEventSource("tcp://127.0.0.1:9", None, ""), "one")
    if path.startswith("/query"):
        body = dict(QUERY) if path.endswith("hash") else {**QUERY, "token_ids": TOKENS}
    status, answer = await router.post(path, {**body, **change})
    assert status == 400 and named in answer["error"], answer


async def test_bodies_that_are_not_requests(router: Router) -> None:
    status, answer = await router.post("/query", b"{")
    assert status == 400 and "not JSON" in answer["error"]
    status, answer = await router.post("/query", [1])
    assert status == 400 and "object" in answer["error"]
    status, answer = await router.post("/nowhere", {})
    assert status == 404 and "/nowhere" in answer["error"]


@pytest.mark.parametrize("stage", ["decoded", "named"])
async def test_a_large_query_does_not_stop_the_others(
    router: Router, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Its decoding, or the naming of its blocks, ends only when another request was answered."""
    registry = router.publishers.registry
    has_begun, may_end = asyncio.Event(), Future[None]()
    loop = asyncio.get_running_loop()
    of, name = (large_json, "decode") if stage == "decoded" else (registry, "keys_of")
    work = getattr(of, name)

    def slow(*given: Any) -> Any:
        loop.call_soon_threadsafe(has_begun.set)
        may_end.result(10)
        return work(*given)

    monkeypatch.setattr(of, name, slow)
    tokens = [70_000] * (16 * LARGE_BLOCKS if stage == "named" else large_json.LARGE_BYTES // 4)
    asking = asyncio.ensure_future(router.query(token_ids=tokens))
    await has_begun.wait()
    assert json.loads(await router.get("/health"))["status"] == "ok"
    may_end.set_result(None)
    assert await asking == {"default": {}}


async def test_a_query_s_size_is_bounded(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    assert query_server.MAX_BODY_BYTES == 16 << 20
    monkeypatch.setattr(query_server, "MAX_BODY_BYTES", 1 << 20)
    status, answer = await router.post("/query", b" " * ((1 << 20) + 1))
    assert status == 413 and "bytes" in answer["error"]
    assert await router.query(token_ids=[1] * 65536, block_size=1) == {"default": {}}


async def test_changes_need_the_key() -> None:
    publishers = PublisherSubscriptions(0)
    server = QueryServer(publishers, "127.0.0.1", 0, KEY)
    await server.start()
    router = Router(server, publishers)
    body = registration(KvEventSource("tcp://127.0.0.1:9", None, ""), "one")
    assert (await router.post("/register", body, **{"X-API-Key": ""}))[0] == 401
    assert (await router.post("/unregister", body, **{"X-API-Key": "wrong"}))[0] == 401
    assert (await router.post("/register", body, **{"X-API-Key": KEY}))[0] == 200
    assert await router.query() == {"default": {}}, "queries need none"
    await router.close()
    await server.close()


async def test_without_a_key_set_registrations_are_refused() -> None:
    publishers = PublisherSubscriptions(0)
    server = QueryServer(publishers, "127.0.0.1", 0)
    await server.start()
    router = Router(server, publishers)
    body = registration(KvEventSource("tcp://127.0.0.1:9", None, ""), "one")
    for path in ("/register", "/unregister"):
        status, answer = await router.post(path, body)
        assert status == 403 and "ADMIN_API_KEY" in answer["error"]
    assert not publishers.registry.registered
    await router.close()
    await server.close()


async def test_a_conductor_follows_the_publishers_in_its_file(tmp_path: Path) -> None:
    async with publishing() as publisher:
        publisher.publish([stored(0, 4)])
        with contextlib.closing(listen("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        fields = registration(source_of(publisher), "ignored")
        del fields["instance_id"]
        path = tmp_path / "conductor_config.json"
        path.write_text(json.dumps({"http_server_port": port, "kvevent_instance": {"one": fields}}))
        settings = ConductorSettings(port=0, registrations=str(path), hash_seed=3)
        task = asyncio.get_running_loop().create_task(serve(settings))
        async with aiohttp.ClientSession() as session:

            async def is_known() -> bool:
                body = {**QUERY, "seq_hashes": NAMES}
                try:
                    url = f"http://127.0.0.1:{port}/query_by_hash"
                    async with session.post(url, json=body) as response:
                        answer = await response.json()
                except aiohttp.ClientError:
                    return False
                return bool(answer["default"])

            await until(is_known)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    "text", ["", "{", '{"http_server_port": "x"}', '{"kvevent_instance": {"one": {"type": "vLLM"}}}']
)
def test_a_file_that_can_t_be_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="registrations"):
        read_registrations(str(path))
    with pytest.raises(InvalidArgument, match="registrations"):
        read_registrations(str(tmp_path / "nowhere.json"))
