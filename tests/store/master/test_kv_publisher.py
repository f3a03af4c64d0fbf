# SPDX-License-Identifier: Apache-2.0
"""The master's events over real sockets, and the conductor as their subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from mooncake.compat.master import load_http
from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.rpc import AsyncClient
from mooncake.store import messages as m
from mooncake.store.master.kv_publisher import MasterKvEventPublisher
from mooncake.store.server import MasterServer, running
from mooncake.store.settings import MasterSettings
from tests.waiting import LONG_HEARTBEAT_S

SETTINGS = MasterSettings(
    port=0,
    kv_events_endpoint="tcp://127.0.0.1:*",
    kv_events_replay_endpoint="tcp://127.0.0.1:*",
    heartbeat_s=LONG_HEARTBEAT_S,
)


class House:
    def __init__(self, server: MasterServer, publisher: MasterKvEventPublisher, client: AsyncClient) -> None:
        self.server, self.publisher, self.client = server, publisher, client

    async def put(self, *keys: str) -> None:
        sizes = [100] * len(keys)
        started = await self.client.call(m.PutStart(1, "h", list(keys), sizes, sizes), 5)
        ids = [one.object_id for one in started.reserved]
        await self.client.call(m.PutEnd(list(keys), ids, [b"crc!"] * len(keys)), 5)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    server = MasterServer(SETTINGS)
    port = await server.start()
    publisher = MasterKvEventPublisher(server)
    publisher.start()
    client = AsyncClient(f"127.0.0.1:{port}", m.REPLIES)
    await client.call(m.Mount("a", 1, "h", 0, 1 << 20, b"", 0.0), 5)
    await client.call(m.Heartbeat("a", 1), 5)
    yield House(server, publisher, client)
    await client.close()
    await publisher.close()
    await server.close()


async def subscriber(house: House, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    """A connected subscriber: it has received an event of an object put for that purpose."""
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.subscribe(b"")
    socket.connect(house.publisher.endpoint)
    async with asyncio.timeout(20):
        number = 0
        while not await socket.poll(20):
            await house.put(f"hello {number}")
            number += 1
        while await socket.poll(50):
            await socket.recv_multipart()
    return socket


async def test_frames_and_replay(house: House) -> None:
    context = zmq.asyncio.Context()
    socket = await subscriber(house, context)
    await house.put("17")
    async with asyncio.timeout(10):
        topic, sequence, payload = await socket.recv_multipart()
    assert topic == b"" and len(sequence) == 8
    stamp, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0 and stamp > 1e12
    assert [(event["seq_hashes"], event["medium"]) for event in events] == [([17], "cpu")]
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(house.publisher.replay_endpoint)
    await dealer.send_multipart([b"", b"nonsense, and too long"])
    await dealer.send_multipart([b"", sequence])
    async with asyncio.timeout(10):
        assert await dealer.recv_multipart() == [b"", b"", sequence, payload]
        assert (await dealer.recv_multipart())[2] == (-1).to_bytes(8, "big", signed=True)
    status = house.publisher.status()
    assert status["enabled"] and status["next_sequence"] == int.from_bytes(sequence, "big") + 1
    dealer.close()
    socket.close()
    context.term()


async def test_a_replay_after_dropped_events_has_no_hole(house: House) -> None:
    """What was kept before them would end the replay there, and a subscriber would know old content only."""
    await house.put("1")
    await asyncio.sleep(0)  # it is published
    house.publisher.events._capacity = 2
    await house.put("2", "3", "4", "5")
    await house.put("6")
    assert house.publisher.events.num_dropped == 2
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(house.publisher.replay_endpoint)
    await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    numbers, hashes = list[int](), set[int]()
    async with asyncio.timeout(10):
        while (
            number := int.from_bytes((frames := await dealer.recv_multipart())[2], "big", signed=True)
        ) >= 0:
            numbers.append(number)
            for event in msgspec.msgpack.decode(frames[3])[1]:
                hashes.update(event.get("seq_hashes", ()))
    assert numbers == list(range(numbers[0], house.publisher.events.next_sequence))
    assert hashes == {1, 2, 3, 4, 5, 6}
    dealer.close()
    context.term()


async def test_another_masters_state_is_followed_and_published(house: House) -> None:
    context = zmq.asyncio.Context()
    socket = await subscriber(house, context)
    before = house.publisher.events
    fresh = MasterServer(MasterSettings(port=0)).master
    house.server._role.master = fresh
    async with asyncio.timeout(10):
        while house.publisher.events is before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert house.publisher.events.next_sequence > before.next_sequence
    socket.close()
    context.term()


async def test_endpoints_that_are_none_or_taken(house: House) -> None:
    server = MasterServer(MasterSettings(port=0, kv_events_endpoint="nonsense"))
    publisher = MasterKvEventPublisher(server)
    with pytest.raises(InvalidArgument, match="kv_events_endpoint"):
        publisher.start()
    await publisher.close()
    server = MasterServer(MasterSettings(port=0, kv_events_endpoint=house.publisher.endpoint))
    publisher = MasterKvEventPublisher(server)
    with pytest.raises(AddressInUse, match="kv_events_endpoint"):
        publisher.start()
    await publisher.close()


async def test_a_running_master_publishes_when_configured() -> None:
    async with running(SETTINGS, load_http) as server:
        assert server.publisher is not None
        assert server.publisher.status()["endpoint"].startswith("tcp://127.0.0.1:")
    async with running(MasterSettings(port=0), load_http) as server:
        assert server.publisher is None
