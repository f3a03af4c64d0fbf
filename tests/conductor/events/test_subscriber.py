# SPDX-License-Identifier: Apache-2.0
"""A real publisher, real sockets, and a wire between them that loses the batches a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from mooncake.conductor.events.key_translation import EngineKeys, Fact
from mooncake.conductor.events.subscriber import EventReader, EventSource, subscribe
from mooncake.conductor.index.prefix_index import PrefixIndex
from mooncake.conductor.messages import BlocksCleared, BlocksRemoved, BlocksStored
from mooncake.inference.kv_events import WorkerKvEventPublisher
from mooncake.kv_events import BlockRemoved, BlockStored, KvEvent
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.rpc import AsyncClient
from mooncake.store import messages as m
from mooncake.store.master.kv_publisher import MasterKvEventPublisher as StoreEvents
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from mooncake.types import Tier
from tests.waiting import LONG_HEARTBEAT_S, until

HASHES = block_hashes(range(64), 16, root_hash())
KEYS = [short_key(one) for one in HASHES]
END = b"e" * 32


def stored(*hashes: bytes, medium: str = "GPU") -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes), parent_block_hash=None, token_ids=[], block_size=16, medium=medium
    )


class Follower:
    """Applies a source's events to an index, as the conductor does."""

    def __init__(self, context: zmq.asyncio.Context, source: EventSource) -> None:
        self.index = PrefixIndex()
        self.num_clears = 0
        self.task = asyncio.get_running_loop().create_task(
            subscribe(context, EventReader("w"), source, self.take)
        )

    def take(self, fact: Fact) -> None:
        if isinstance(fact, BlocksStored):
            self.index.store(fact.instance, fact.keys, fact.tier, fact.scope)
        elif isinstance(fact, BlocksRemoved):
            self.index.remove(fact.instance, fact.keys, fact.tier, fact.scope, fact.reason)
        else:
            self.num_clears += 1
            self.index.clear(fact.instance)

    def has(self, *hashes: bytes, scope: str = "") -> bool:
        return all(self.index.matches([short_key(one)], scope) for one in hashes)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[WorkerKvEventPublisher]:
    publisher = WorkerKvEventPublisher()
    await publisher.start()
    yield publisher
    await publisher.close()


class LossyWire:
    """Forwards a publisher's live batches, except those that the test drops."""

    def __init__(self, context: zmq.asyncio.Context, publisher: WorkerKvEventPublisher) -> None:
        assert publisher.source is not None
        self.dropping = False
        self.num_forwarded = 0
        self.num_dropped = 0
        self._sub, self._pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._sub.subscribe("")
        self._sub.connect(publisher.source.endpoint)
        port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.source = EventSource(f"tcp://127.0.0.1:{port}", publisher.source.replay_endpoint, "kv-events")
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            frames = await self._sub.recv_multipart()
            if self.dropping:
                self.num_dropped += 1
            else:
                self.num_forwarded += 1
                await self._pub.send_multipart(frames)


async def test_a_dropped_sequence_is_replayed(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    publisher.publish([stored(HASHES[0])])  # before any subscriber: comes by the first replay
    wire = LossyWire(context, publisher)
    follower = Follower(context, wire.source)
    await until(lambda: follower.has(HASHES[0]))
    await until(lambda: follower.has(END), poke=lambda: publisher.publish([stored(END)]))  # live now

    wire.dropping = True
    publisher.publish([stored(HASHES[1]), BlockRemoved([HASHES[0]], "GPU")])
    await until(lambda: wire.num_dropped >= 1)
    assert not follower.has(HASHES[1])
    wire.dropping = False
    publisher.publish([stored(HASHES[2])])
    await until(lambda: follower.has(HASHES[2]))
    assert follower.has(HASHES[1]) and not follower.has(HASHES[0])
    assert follower.num_clears == 1  # only the one at the beginning
    await follower.stop()
    wire.task.cancel()


async def test_a_gap_that_cannot_be_filled_clears_the_hints(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    wire = LossyWire(context, publisher)
    follower = Follower(context, EventSource(wire.source.endpoint, None, "kv-events"))
    await until(lambda: follower.has(END), poke=lambda: publisher.publish([stored(END)]))
    wire.dropping = True
    publisher.publish([stored(HASHES[1])])
    await until(lambda: wire.num_dropped >= 1)
    wire.dropping = False
    publisher.publish([stored(HASHES[2])])
    await until(lambda: follower.has(HASHES[2]))
    assert not follower.has(END)
    await follower.stop()
    wire.task.cancel()


async def test_a_restarted_publisher_starts_over(context: zmq.asyncio.Context) -> None:
    first = WorkerKvEventPublisher()
    source = await first.start()
    ports = [
        int((endpoint or "").rpartition(":")[2]) for endpoint in (source.endpoint, source.replay_endpoint)
    ]
    follower = Follower(context, EventSource(source.endpoint, source.replay_endpoint, source.topic))
    for _ in range(5):
        first.publish([stored(HASHES[0])])
    await until(lambda: follower.has(END), poke=lambda: first.publish([stored(END)]))
    await first.close()
    second = WorkerKvEventPublisher()
    await second.start(*ports)
    second.publish([stored(HASHES[1])])
    await until(lambda: follower.has(HASHES[2]), poke=lambda: second.publish([stored(HASHES[2])]))
    assert follower.has(HASHES[1]) and not follower.has(HASHES[0])
    await follower.stop()
    await second.close()


# --- the reader alone


def batch(*tagged: dict[str, object], ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(tagged), 0])


def test_a_worker_on_all_addresses_is_reached_at_its_own() -> None:
    source = EventSource("tcp://0.0.0.0:5557", "tcp://*:5558", "t")
    assert source.with_host_of("10.0.0.7:8100") == EventSource(
        "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "t"
    )
    plain = EventSource("tcp://10.0.0.9:5557")
    assert plain.with_host_of("10.0.0.7:8100") == plain


def test_duplicates_are_read_once() -> None:
    reader = EventReader("w")
    payload = batch({"type": "BlockStored", "block_hashes": [HASHES[0]], "medium": "cpu"})
    assert reader.read(0, payload) == [BlocksStored("w", KEYS[:1], Tier.MEMORY)]
    assert reader.read(0, payload) == []
    assert not reader.is_restart(0, payload)
    assert reader.is_restart(0, batch(ts=2.0))


def test_foreign_hashes_are_translated_by_their_tokens() -> None:
    reader = EventReader("w", EngineKeys(16))
    fields: dict[str, object] = {"type": "BlockStored", "block_size": 16, "group_idx": 0, "lora_id": None}
    first = {**fields, "block_hashes": [11, 22], "parent_block_hash": None, "token_ids": [*range(32)]}
    then = {**fields, "block_hashes": [33], "parent_block_hash": 22, "token_ids": [*range(32, 48)]}
    orphan = {**fields, "block_hashes": [44], "parent_block_hash": 99, "token_ids": [*range(16)]}
    facts = reader.read(0, batch(first, then, orphan, {"type": "BlockRemoved", "block_hashes": [22, 77]}))
    assert facts == [BlocksStored("w", KEYS[:3]), BlocksRemoved("w", KEYS[1:2])]
    salted = {**first, "block_hashes": [55, 66], "extra_keys": [["salt"], None]}
    keys = [short_key(one) for one in block_hashes(range(32), 16, root_hash("salt"))]
    assert reader.read(1, batch(salted)) == [BlocksStored("w", keys)]


def test_cleared_clears() -> None:
    assert EventReader("w").read(0, batch({"type": "AllBlocksCleared"})) == [BlocksCleared("w")]


def test_a_payload_that_is_not_a_batch_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        EventReader("w").read(0, b"\xc1")
    with pytest.raises(msgspec.MsgspecError):
        EventReader("w").read(0, batch({"type": "Unheard"}))


def test_the_publisher_and_the_reader_agree() -> None:
    sent: list[KvEvent] = [stored(HASHES[0], medium="disk"), BlockRemoved([HASHES[1]], "GPU")]
    payload = msgspec.msgpack.encode([1.0, sent, None])
    assert EventReader("w").read(0, payload) == [
        BlocksStored("w", KEYS[:1], Tier.SSD),
        BlocksRemoved("w", KEYS[1:2]),
    ]


async def test_a_master_of_the_store_is_followed_like_a_worker(context: zmq.asyncio.Context) -> None:
    settings = MasterSettings(
        port=0,
        kv_events_endpoint="tcp://127.0.0.1:*",
        kv_events_replay_endpoint="tcp://127.0.0.1:*",
        heartbeat_s=LONG_HEARTBEAT_S,
    )
    server = MasterServer(settings)
    client = AsyncClient(f"127.0.0.1:{await server.start()}", m.REPLIES)
    await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
    await client.call(m.Heartbeat("a", 1), 5)

    async def put(*keys: str) -> None:
        sizes = [100] * len(keys)
        started = await client.call(m.PutStart(1, "h", list(keys), sizes, sizes), 5)
        ids = [one.object_id for one in started.reserved]
        await client.call(m.PutEnd(list(keys), ids, [b"crc!"] * len(keys)), 5)

    scope = "kv/0123456789abcdef"
    before, live = f"{scope}/{HASHES[0].hex()}", f"{scope}/{HASHES[1].hex()}"
    await put(before, "17", "no block's", "kv/0123456789abcdef/no hash")
    events = StoreEvents(server)
    events.start()
    follower = Follower(context, EventSource(events.endpoint, events.replay_endpoint))
    try:
        await until(
            lambda: follower.has(HASHES[0], scope=scope)
        )  # from the replay: it was there before the first event
        await put(live)
        await until(lambda: follower.has(HASHES[0], HASHES[1], scope=scope))
        await client.call(m.Remove([live], True), 5)
        await until(lambda: not follower.has(HASHES[1], scope=scope))
        assert follower.has(HASHES[0], scope=scope)
    finally:
        await follower.stop()
        await events.close()
        await client.close()
        await server.close()
