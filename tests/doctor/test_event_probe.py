# SPDX-License-Identifier: Apache-2.0
"""The probe of a publisher, against our publisher of KV events over ZeroMQ, healthy and with faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import pytest
import zmq
import zmq.asyncio

from mooncake.doctor.event_probe import MAX_TOPICS, EventProbe
from mooncake.doctor.facts import PublisherFacts
from mooncake.kv_events import BlockStored, EventBatch, encode_batch
from mooncake.kv_events.publisher import KvEventPublisher
from tests.conductor.test_event_subscriptions import free_endpoint
from tests.contract.metadata_servers import has_ipv6
from tests.waiting import until

PROMPT = [*range(40, 112)]


def stored(tokens: list[int], *hashes: bytes | int) -> bytes:
    event = BlockStored(block_hashes=[*hashes], token_ids=tokens, block_size=32)
    return encode_batch(EventBatch(1.0, [event]))


@dataclass
class Sockets:
    """A publisher's sockets, driven by hand."""

    context: zmq.asyncio.Context
    pub: zmq.asyncio.Socket
    router: zmq.asyncio.Socket
    facts: PublisherFacts

    async def publish(self, payload: bytes, sequence: int = 0, topic: str = "kv") -> None:
        await self.pub.send_multipart([topic.encode(), sequence.to_bytes(8, "big"), payload])

    async def replay(self, batches: Iterable[tuple[int, bytes]], is_ended: bool = True) -> int:
        """Answer one request; returns the sequence number that it names."""
        peer, _, first = await self.router.recv_multipart()
        for number, payload in batches:
            await self.router.send_multipart([peer, b"", b"kv", number.to_bytes(8, "big"), payload])
        if is_ended:
            end = (-1).to_bytes(8, "big", signed=True)
            await self.router.send_multipart([peer, b"", b"kv", end, b""])
        return int.from_bytes(first, "big")


@pytest.fixture
async def sockets() -> AsyncIterator[Sockets]:
    context = zmq.asyncio.Context()
    endpoint, replay_endpoint = free_endpoint(), free_endpoint()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.bind(endpoint)
    router.bind(replay_endpoint)
    yield Sockets(context, pub, router, PublisherFacts(endpoint, replay_endpoint, "kv"))
    context.destroy(linger=0)


async def test_the_prompt_s_blocks_are_found(sockets: Sockets) -> None:
    probe = EventProbe(sockets.context, sockets.facts, PROMPT)
    await probe.start()

    async def is_seen() -> bool:
        await sockets.publish(stored([7] * 64, b"other", b"prompt"), 4)
        await sockets.publish(stored(PROMPT[:64], b"\x01\x02", -1), 5)
        return sockets.facts.is_canary_seen

    await until(is_seen)
    replied = asyncio.ensure_future(sockets.replay([(5, stored(PROMPT[:64], b"\x01"))]))
    await probe.finish(1.0)
    assert await replied == 5, "from the latest batch on"
    assert sockets.facts.replay_answers is True
    assert sockets.facts.canary_hashes == ("0102", "f" * 16)
    assert sockets.facts.topics == ("kv",) and not sockets.facts.problem


async def test_a_sequence_number_that_has_not_8_bytes(sockets: Sockets) -> None:
    probe = EventProbe(sockets.context, sockets.facts, PROMPT)
    await probe.start()

    async def is_seen() -> bool:
        await sockets.pub.send_multipart([b"kv", b"\1" * 9, stored(PROMPT[:64], b"a")])
        return sockets.facts.num_unreadable > 0

    await until(is_seen)
    assert sockets.facts.num_batches == 0
    assert sockets.facts.problem == "a message's sequence number has 9 bytes, not 8"
    await probe.finish(1.0)


async def test_a_replay_whose_sequence_numbers_have_not_8_bytes(sockets: Sockets) -> None:
    probe = EventProbe(sockets.context, sockets.facts, PROMPT)
    await probe.start()
    probe.take("kv", 5, stored(PROMPT[:64], b"a", b"b"))

    async def answer() -> None:
        peer, _, _ = await sockets.router.recv_multipart()
        await sockets.router.send_multipart([peer, b"", b"kv", (5).to_bytes(8, "big"), stored([1], b"a")])
        await sockets.router.send_multipart([peer, b"", b"kv", b"\xff", b""])

    answered = asyncio.ensure_future(answer())
    await probe.finish(1.0)
    await answered
    assert sockets.facts.replay_answers is False


async def test_no_events_and_no_replay(sockets: Sockets) -> None:
    probe = EventProbe(sockets.context, sockets.facts, PROMPT)
    await probe.start()
    await probe.finish(0.01)
    assert (sockets.facts.num_batches, sockets.facts.is_canary_seen) == (0, False)
    assert sockets.facts.replay_answers is None, "unknown while nothing was published"


async def test_a_replay_that_does_not_end(sockets: Sockets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.doctor.event_probe.REPLAY_S", 0.2)
    probe = EventProbe(sockets.context, sockets.facts, PROMPT)
    await probe.start()
    probe.take("kv", 5, stored(PROMPT[:64], b"a", b"b"))
    await probe.finish(1.0)
    assert sockets.facts.replay_answers is False


async def test_without_a_replay_endpoint(sockets: Sockets) -> None:
    sockets.facts.replay_endpoint = ""
    probe = EventProbe(sockets.context, sockets.facts, PROMPT)
    await probe.start()
    probe.take("kv", 5, stored(PROMPT[:64], b"a", b"b"))
    await probe.finish(1.0)
    assert sockets.facts.replay_answers is False


async def test_a_publisher_with_an_address_of_ipv6() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no ::1, so KV events over IPv6 were NOT TESTED")
    publisher = KvEventPublisher("kv", lambda first: [(first, stored(PROMPT[:64], b"a"))])
    endpoint = publisher.listen("the endpoint", "tcp://[::1]:*")
    facts = PublisherFacts(endpoint, publisher.serve_replay("the endpoint", "tcp://[::1]:*"))
    context = zmq.asyncio.Context()
    probe = EventProbe(context, facts, PROMPT)
    await probe.start()
    probe.take("kv", 5, stored(PROMPT[:64], b"a"))
    await probe.finish(1.0)
    assert not facts.problem and facts.replay_answers
    context.destroy(linger=0)
    await publisher.close()


async def test_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.doctor.event_probe.CONNECT_S", 0.05)
    context = zmq.asyncio.Context()
    for endpoint in (free_endpoint(), "tcp://no host:1"):
        facts = PublisherFacts(endpoint)
        probe = EventProbe(context, facts, PROMPT)
        await probe.start()
        await probe.finish(5.0)
        assert facts.problem and not facts.num_batches
    context.destroy(linger=0)


async def test_what_is_not_an_event_and_many_topics(sockets: Sockets) -> None:
    probe = EventProbe(sockets.context, sockets.facts, PROMPT)
    await probe.start()
    probe.take("kv", 1, b"\xc1 not msgpack")
    assert sockets.facts.num_unreadable == 1 and sockets.facts.problem
    for number in range(2 * MAX_TOPICS):
        probe.take(f"kv-{number}", number, stored([1] * 32, b"a"))
    assert len(sockets.facts.topics) == MAX_TOPICS and not sockets.facts.is_canary_seen
    probe.close()
