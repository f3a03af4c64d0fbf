# SPDX-License-Identifier: Apache-2.0
"""The publisher's frames, byte by byte, and its replay service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
import zmq.asyncio

from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.kv_events.publisher import END_OF_REPLAY, Batch, KvEventPublisher, allow_ipv6
from tests.contract.metadata_servers import has_ipv6
from tests.waiting import until

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


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://[::1]:*", "tcp://[::1]:"),
        ("tcp://::1:*", "tcp://[::1]:"),
        ("tcp://[::]:*", "tcp://[::]:"),
        ("tcp://*:*", "tcp://0.0.0.0:"),
        ("tcp://localhost:*", "tcp://127.0.0.1:"),
    ],
)
async def test_addresses_of_both_kinds(
    publisher: KvEventPublisher, context: zmq.asyncio.Context, endpoint: str, address: str
) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no ::1, so KV events over IPv6 were NOT TESTED")
    publisher.listen("the endpoint", endpoint)
    bound = publisher.serve_replay("the endpoint", endpoint)
    assert bound.startswith(address)
    dealer = context.socket(zmq.DEALER)
    there = bound.replace("[::]", "127.0.0.1")  # it listens on all addresses of both kinds
    allow_ipv6(dealer, there)
    dealer.connect(there)
    await dealer.send_multipart([b"", number(2)])
    async with asyncio.timeout(10):
        assert (await dealer.recv_multipart())[3] == b"batch 2"


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


async def test_malformed_requests_do_not_fill_the_log(
    publisher: KvEventPublisher,
    context: zmq.asyncio.Context,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake.kv_events.publisher.LOG_EVERY_S", 3600.0)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.serve_replay("the endpoint", ANY))
    for _ in range(100):
        await dealer.send_multipart([b"alone"])
    await dealer.send_multipart([b"", number(3)])
    async with asyncio.timeout(10):
        await dealer.recv_multipart()
    assert [one.getMessage() for one in caplog.records].count("replay_request_malformed") == 1


@pytest.mark.timeout(60)
async def test_a_replay_longer_than_all_queues_is_whole(context: zmq.asyncio.Context) -> None:
    """The receiver has room for few batches, and others' replays are answered while it does not read."""
    num_batches, payload = 3000, bytes(8192)
    publisher = KvEventPublisher("topic", lambda start: ((one, payload) for one in range(start, num_batches)))
    endpoint = publisher.serve_replay("the endpoint", ANY)
    slow, other = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for dealer, first in (slow, 0), (other, num_batches - 1):
        dealer.setsockopt(zmq.RCVHWM, 10)
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", number(first)])
    found: dict[zmq.asyncio.Socket, list[int]] = {}
    for dealer in other, slow:
        found[dealer] = []
        while not found[dealer] or found[dealer][-1] != END_OF_REPLAY:
            async with asyncio.timeout(20):
                frames = await dealer.recv_multipart()
            found[dealer].append(int.from_bytes(frames[2], "big", signed=True))
    assert found[other] == [num_batches - 1, END_OF_REPLAY]
    assert found[slow] == [*range(num_batches), END_OF_REPLAY]
    await publisher.close()


async def test_a_receiver_that_is_gone_ends_its_replay(context: zmq.asyncio.Context) -> None:
    num_read = 0

    def history(start: int) -> Iterator[Batch]:
        nonlocal num_read
        while True:
            num_read += 1
            yield num_read, bytes(8192)

    publisher = KvEventPublisher("topic", history)
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(publisher.serve_replay("the endpoint", ANY))
    await dealer.send_multipart([b"", number(0)])
    async with asyncio.timeout(10):
        await dealer.recv_multipart()
    assert len(publisher._replays) == 1
    dealer.close()
    await until(lambda: not publisher._replays)
    await publisher.close()


async def test_endpoints_that_are_invalid_or_taken_are_named(publisher: KvEventPublisher) -> None:
    taken = publisher.listen("events", ANY)
    with pytest.raises(AddressInUse, match=f"{taken} is in use; choose another replays"):
        publisher.serve_replay("replays", taken)
    with pytest.raises(InvalidArgument, match="replays is 'nonsense'"):
        publisher.serve_replay("replays", "nonsense")
