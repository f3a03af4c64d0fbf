# SPDX-License-Identifier: Apache-2.0
"""The publisher's frames, byte by byte, and its replay service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio

from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.kv_events.publisher import END_OF_REPLAY, Batch, KvEventPublisher

ANY = "tcp://127.0.0.1:*"


def history(start: int) -> Iterator[Batch]:
    yield from ((number, b"batch %d" % number) for number in range(start, 3))


@pytest.fixture
async def publisher() -> AsyncIterator[KvEventPublisher]:
    publisher = KvEventPublisher("topic", history)
    yield publisher
    await publisher.close()
    assert publisher.is_closed


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big", signed=True)


async def test_a_batch_is_three_frames(publisher: KvEventPublisher, context: zmq.asyncio.Context) -> None:
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe("topic")
    subscriber.connect(publisher.listen("the endpoint", ANY))
    async with asyncio.timeout(10):
        while not await subscriber.poll(20):  # the subscription takes a moment to arrive
            publisher.send(258, b"payload")
        assert await subscriber.recv_multipart() == [b"topic", b"\0\0\0\0\0\0\1\2", b"payload"]


async def test_a_replay_ends_with_a_number_of_its_own(
    publisher: KvEventPublisher, context: zmq.asyncio.Context
) -> None:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.serve_replay("the endpoint", ANY))
    for malformed in ([b"alone"], [b"", b"not eight bytes"]):
        await dealer.send_multipart(malformed)
    await dealer.send_multipart([b"", number(1)])
    async with asyncio.timeout(10):
        for sequence in (1, 2):
            frames = [b"", b"topic", number(sequence), b"batch %d" % sequence]
            assert await dealer.recv_multipart() == frames
        assert await dealer.recv_multipart() == [b"", b"topic", number(END_OF_REPLAY), b""]


async def test_endpoints_that_are_invalid_or_taken_are_named(publisher: KvEventPublisher) -> None:
    taken = publisher.listen("events", ANY)
    with pytest.raises(AddressInUse, match=f"{taken} is in use; choose another replays"):
        publisher.serve_replay("replays", taken)
    with pytest.raises(InvalidArgument, match="replays is 'nonsense'"):
        publisher.serve_replay("replays", "nonsense")
