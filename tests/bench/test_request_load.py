# SPDX-License-Identifier: Apache-2.0
"""The load of the bench of many clients: it must notice a wrong reply, or it would time an error."""

from __future__ import annotations

import asyncio

import pytest

from bench.request_load import PutBurst, load, our_queries, redis_exists, resp
from mooncake.errors import Refusal
from mooncake.rpc import RpcServer
from mooncake.rpc.wire import encode
from mooncake.store import messages as m
from mooncake.types import Tier


def frames(*messages: object) -> bytes:
    return b"".join(encode(number, message) for number, message in enumerate(messages, 1))  # type: ignore[arg-type]


def test_replies_in_pieces_are_one_burst() -> None:
    burst = our_queries(m.Exists, [["a"], ["b", "c"]])
    replies = frames(m.Flags(5.0, b"\1"), m.Flags(5.0, b"\1\1"))
    for _ in range(2):  # the second time they are compared as bytes
        assert not burst.take(replies[:10])
        assert burst.take(replies[10:])
    assert burst.num_done == 4
    assert burst.requests() == frames(m.Exists(["a"]), m.Exists(["b", "c"]))


def test_a_wrong_reply_is_noticed() -> None:
    burst = our_queries(m.Exists, [["a"]])
    with pytest.raises(RuntimeError, match="a key was not found"):
        burst.take(frames(m.Flags(5.0, b"\0")))
    lookup = our_queries(m.LookupObjects, [["a"]])
    found = m.Stored(1, 4096, 4096, b"abcd", [m.Replica("s", 1, 0, Tier.MEMORY)])
    assert lookup.take(frames(m.LookupReply(5.0, [found])))
    with pytest.raises(RuntimeError, match="another reply"):
        lookup.take(frames(m.LookupReply(5.0, [None])) + bytes(64))


def test_queries_of_redis() -> None:
    assert resp("EXISTS", "a", b"bc") == b"*3\r\n$6\r\nEXISTS\r\n$1\r\na\r\n$2\r\nbc\r\n"
    burst = redis_exists([["a"], ["b", "c"]])
    assert burst.requests() == resp("EXISTS", "a") + resp("EXISTS", "b", "c")
    assert burst.take(b":1\r\n:2\r\n") and burst.num_done == 2
    with pytest.raises(RuntimeError):
        redis_exists([["a"]]).take(b":0\r\n")


def test_a_put_uses_preallocated_space_and_ends_what_it_began() -> None:
    burst = PutBurst(2)
    burst.requests()
    replicas = [m.Replica("s", 1, at, Tier.MEMORY) for at in (0, 4096)]
    assert burst.take(frames(m.PutStarted(30.0, [], {}, m.PreallocatedSpace(7, 30.0, 4096, replicas))))
    assert burst.num_done == 0
    burst.requests()
    assert burst.take(frames(m.PutsWritten([True, True]))) and burst.num_done == 1
    burst.requests()
    with pytest.raises(RuntimeError, match="refused"):
        burst.take(frames(m.PutsWritten([Refusal("expired", "too late")])))

    steps = PutBurst(1, in_two_steps=True)
    steps.requests()
    assert steps.take(frames(m.PutStarted(30.0, [m.Reserved(5, replicas[:1])], {}))) and steps.num_done == 0
    assert b"put_end" in steps.requests()
    assert steps.take(frames(m.Outcomes([True]))) and steps.num_done == 1


async def test_every_connection_has_its_count() -> None:
    def exists(message: m.Exists, _: object) -> m.Flags:
        return m.Flags(5.0, b"\1" * len(message.keys))

    server = RpcServer({m.Exists: exists})
    port = await server.start("127.0.0.1", 0)
    try:
        bursts = [our_queries(m.Exists, [[f"key {number}"]] * 3) for number in range(4)]
        found = await asyncio.to_thread(load, ("127.0.0.1", port), bursts, 0.05)
    finally:
        await server.close()
    assert len(found.counts) == 4 and all(count > 0 and count % 3 == 0 for count in found.counts)
    assert [len(times) * 3 for times in found.times] == found.counts
    assert found.per_s == sum(found.counts) / found.seconds
