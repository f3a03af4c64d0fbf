# SPDX-License-Identifier: Apache-2.0
"""A worker's batches as another engine's subscriber receives them, and their replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from mooncake.errors import AddressInUse
from mooncake.inference import kv_events
from mooncake.inference.kv_events import WorkerKvEventPublisher
from mooncake.kv_events import MEDIUM_DEVICE, AllBlocksCleared, BlockRemoved, BlockStored

A, B = b"a" * 32, b"b" * 32


def stored(block_hash: bytes, parent: bytes | None = None) -> BlockStored:
    return BlockStored([block_hash], parent, [1, 2], 2, MEDIUM_DEVICE)


@pytest.fixture
async def publisher() -> AsyncIterator[WorkerKvEventPublisher]:
    publisher = WorkerKvEventPublisher()
    await publisher.start()
    yield publisher
    await publisher.close()


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def replay(
    context: zmq.asyncio.Context, publisher: WorkerKvEventPublisher, start: int
) -> list[list[bytes]]:
    assert publisher.source is not None and publisher.source.replay_endpoint is not None
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.source.replay_endpoint)
    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
    answers: list[list[bytes]] = []
    async with asyncio.timeout(10):
        while True:
            empty, topic, sequence, payload = await dealer.recv_multipart()
            assert (empty, topic) == (b"", b"kv-events")
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert payload == b""
                dealer.close()
                return answers
            answers.append([sequence, payload])


async def test_frames_of_a_live_batch(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    assert publisher.source is not None
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe("kv-events")
    subscriber.connect(publisher.source.endpoint)
    async with asyncio.timeout(10):
        while not await subscriber.poll(20):  # the subscription takes a moment to arrive
            publisher.publish([AllBlocksCleared()])
        topic, sequence, payload = await subscriber.recv_multipart()
    assert topic == b"kv-events"
    assert len(sequence) == 8
    _ts, events, rank = msgspec.msgpack.decode(payload)
    assert (events, rank) == ([{"type": "AllBlocksCleared"}], None)


async def test_replay_gives_what_was_missed(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    publisher.publish([stored(A)])
    publisher.publish([])
    publisher.publish([stored(B, A), BlockRemoved([A], MEDIUM_DEVICE)])
    [(sequence, payload)] = await replay(context, publisher, 1)
    assert int.from_bytes(sequence, "big") == 1
    _ts, events, _rank = msgspec.msgpack.decode(payload)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [B],
            "parent_block_hash": A,
            "token_ids": [1, 2],
            "block_size": 2,
            "medium": "GPU",
        },
        {"type": "BlockRemoved", "block_hashes": [A], "medium": "GPU"},
    ]
    assert len(await replay(context, publisher, 0)) == 2
    assert await replay(context, publisher, 2) == []


async def test_what_is_no_longer_kept_is_summed_up(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_KEPT_BATCHES", 2)
    publisher.publish([stored(A)])
    publisher.publish([stored(B, A)])
    publisher.publish([BlockRemoved([A], MEDIUM_DEVICE)])
    for _ in range(2):
        publisher.publish([stored(A)])
    answers = await replay(context, publisher, 0)
    assert [int.from_bytes(sequence, "big") for sequence, _ in answers] == [2, 3, 4]
    _ts, events, _rank = msgspec.msgpack.decode(answers[0][1])
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]
    assert events[1]["block_hashes"] == [B]


async def test_a_malformed_replay_request_does_not_end_the_replay_service(
    publisher: WorkerKvEventPublisher, context: zmq.asyncio.Context
) -> None:
    assert publisher.source is not None and publisher.source.replay_endpoint is not None
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.source.replay_endpoint)
    await dealer.send_multipart([b"what?"])
    publisher.publish([stored(A)])
    assert len(await replay(context, publisher, 0)) == 1
    dealer.close()


async def test_a_taken_port_is_named(publisher: WorkerKvEventPublisher) -> None:
    assert publisher.source is not None
    port = int(publisher.source.endpoint.rpartition(":")[2])
    other = WorkerKvEventPublisher()
    with pytest.raises(AddressInUse, match=str(port)):
        await other.start(port)
    await other.close()
