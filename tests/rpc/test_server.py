# SPDX-License-Identifier: Apache-2.0
"""The limits of a server against unauthenticated and faulty clients, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from mooncake.errors import MooncakeError, StorageError
from mooncake.file_limit import default_max_connections
from mooncake.rpc import AsyncClient, Call, Limits, RpcServer
from mooncake.rpc.limits import REFUSED
from mooncake.rpc.wire import OPEN_GREETING, PREFACE, encode, header
from tests.waiting import until

PATIENCE_S = 30.0


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    size: int


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    data: bytes


def answer(message: Ask, call: Call) -> Answer:
    return Answer(bytes(message.size))


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.rpc.server.DEADLINE_CHECK_S", 0.02)


def connected(server: RpcServer, opening: bytes = b"") -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
    opened.sendall(opening)
    return opened


async def is_cut(opened: socket.socket) -> bool:
    """Whether the connection is closed or reset within the test's time limit."""

    def read_to_the_end() -> bool:
        try:
            while opened.recv(1 << 16):
                continue
        except ConnectionResetError:
            pass
        opened.close()
        return True

    return await asyncio.to_thread(read_to_the_end)


async def with_server(limits: Limits, test: Callable[[RpcServer], Awaitable[None]]) -> None:
    """Run ``test``; a client that was connected before it and rests meanwhile is served after it."""
    server = RpcServer({Ask: answer}, limits=limits)
    await server.start("127.0.0.1", 0)
    client = AsyncClient(f"127.0.0.1:{server.port}", [Answer])
    try:
        assert await client.call(Ask(1), PATIENCE_S) == Answer(b"\0")
        resting = next(iter(server.connections))
        await test(server)
        assert resting in server.connections
        assert await client.call(Ask(2), PATIENCE_S) == Answer(b"\0\0")
    finally:
        await client.close()
        await server.close()


@pytest.mark.parametrize(
    "opening", [b"", PREFACE[:-1], OPEN_GREETING[:-1]], ids=["silent", "half a preface", "half a greeting"]
)
async def test_a_client_that_does_not_greet_is_disconnected(opening: bytes) -> None:
    async def test(server: RpcServer) -> None:
        assert await is_cut(connected(server, opening))

    await with_server(Limits(greeting_s=0.05), test)


@pytest.mark.parametrize("part", [1, 7, 8, 9, -1], ids=lambda part: f"cut at {part}")
async def test_half_a_frame_does_not_stay(part: int) -> None:
    async def test(server: RpcServer) -> None:
        frame = bytes(encode(1, Ask(5)))
        assert await is_cut(connected(server, OPEN_GREETING + frame + frame[:part]))
        await until(lambda: len(server.connections) == 1)

    await with_server(Limits(stall_s=0.05), test)


async def test_a_byte_now_and_then_does_not_help() -> None:
    """A slow sender looks busy, but its whole frame has one time limit."""

    async def test(server: RpcServer) -> None:
        slow = connected(server, OPEN_GREETING)
        body = header(100_000, 1, 0)
        slow.sendall(body)
        cut = asyncio.create_task(is_cut(slow))
        while not cut.done():
            try:
                slow.send(b"\0")
            except OSError:
                break
            await asyncio.sleep(0.02)
        assert await cut

    await with_server(Limits(stall_s=0.3), test)


async def test_a_client_that_takes_no_replies_is_cut_off() -> None:
    async def test(server: RpcServer) -> None:
        deaf = connected(server, OPEN_GREETING + b"".join(encode(i, Ask(1 << 20)) for i in range(7)))
        await until(lambda: len(server.connections) == 2)
        await until(lambda: len(server.connections) == 1)
        deaf.close()

    await with_server(Limits(stall_s=0.05), test)


async def test_sizes_and_numbers_are_bounded() -> None:
    async def test(server: RpcServer) -> None:
        assert await is_cut(connected(server, OPEN_GREETING + header(1001, 1, 0)))
        fine = connected(server, OPEN_GREETING + encode(1, Ask(0)) + header(1000, 1, 0))
        assert await asyncio.to_thread(fine.recv, 1 << 10)
        surplus = connected(server)
        assert await is_cut(surplus)
        assert len(server.connections) == 2
        fine.close()
        await until(lambda: len(server.connections) == 1)

    await with_server(Limits(max_body_bytes=1000, max_connections=2), test)


async def test_idle_clients_stay_and_hinder_no_other() -> None:
    async def test(server: RpcServer) -> None:
        idle = await asyncio.to_thread(lambda: [connected(server, OPEN_GREETING) for _ in range(200)])
        await until(lambda: len(server.connections) == 201)
        client = AsyncClient(f"127.0.0.1:{server.port}", [Answer])
        assert await client.call(Ask(3), PATIENCE_S) == Answer(bytes(3))
        await client.close()
        for opened in idle:
            opened.close()
        await until(lambda: len(server.connections) == 1)

    await with_server(Limits(), test)


async def test_an_unauthenticated_client_makes_room_and_others_do_not() -> None:
    """Connections without a valid greeting are dropped first, the oldest of them first."""

    async def test(server: RpcServer) -> None:
        outsiders = [connected(server, opening) for opening in (b"", OPEN_GREETING)]
        await until(lambda: len(server.connections) == 3)
        client = AsyncClient(f"127.0.0.1:{server.port}", [Answer])
        assert await client.call(Ask(3), PATIENCE_S) == Answer(bytes(3))
        assert await is_cut(outsiders[0])
        other = AsyncClient(f"127.0.0.1:{server.port}", [Answer])
        assert await other.call(Ask(3), PATIENCE_S) == Answer(bytes(3))
        assert await is_cut(outsiders[1])
        assert await is_cut(connected(server, OPEN_GREETING)), "all three are clients now"
        assert await client.call(Ask(4), PATIENCE_S) == Answer(bytes(4))
        await client.close()
        await other.close()

    await with_server(Limits(max_connections=3), test)


async def test_unfinished_requests_of_all_peers_have_one_bound() -> None:
    """Six peers send most of a large request each: the server keeps no more than its limit for all."""

    async def test(server: RpcServer) -> None:
        kept = []
        part = encode(1, Ask(5))[:7]
        honest = connected(server, OPEN_GREETING + encode(1, Ask(0)) + part)
        assert await asyncio.to_thread(honest.recv, 1 << 10)
        for _ in range(6):
            outsider = connected(server, OPEN_GREETING)
            kept.append(asyncio.create_task(asyncio.to_thread(send_all, outsider, header(900_000, 1, 0))))
            await asyncio.sleep(0)
        await asyncio.gather(*kept)
        most = 0

        def has_settled() -> bool:
            nonlocal most
            most = max(most, server.pending_bytes)
            return len(server.connections) <= 4

        await until(has_settled)
        assert most <= 2_000_000
        honest.sendall(encode(1, Ask(5))[7:])
        assert await asyncio.to_thread(honest.recv, 1 << 10), "who has asked before is not cut for them"
        honest.close()

    await with_server(Limits(max_body_bytes=1_000_000, max_pending_bytes=2_000_000), test)


def send_all(opened: socket.socket, head: bytes) -> None:
    try:
        opened.sendall(head + bytes(800_000))
    except OSError:
        return


async def test_more_connections_than_files_are_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.file_limit.resource.getrlimit", lambda which: (256, 256))
    assert default_max_connections() == 96

    async def test(server: RpcServer) -> None:
        idle = [connected(server, OPEN_GREETING) for _ in range(300)]
        for number in range(3):
            client = AsyncClient(f"127.0.0.1:{server.port}", [Answer])
            assert await client.call(Ask(number), PATIENCE_S) == Answer(bytes(number))
            assert len(server.connections) <= 96
            await client.close()
        for opened in idle:
            opened.close()

    await with_server(Limits(), test)


async def test_what_is_refused_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    def count() -> float:
        value: float = REFUSED.labels("rpc", "protocol")._value.get()
        return value

    before = count()

    async def test(server: RpcServer) -> None:
        for _ in range(5):
            assert await is_cut(connected(server, b"GET / HTTP/1.1\r\n\r\n"))

    await with_server(Limits(), test)
    assert count() == before + 5
    assert len([one for one in caplog.records if one.getMessage() == "connection_refused"]) == 1


class Mark(msgspec.Struct, array_like=True, tag="mark"):
    """A request that says who sent it."""

    name: str


async def test_many_requests_of_one_client_do_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients whose requests have arrived take turns; the requests of each keep their order."""
    monkeypatch.setattr("mooncake.rpc.server.TURN_S", 0.0)
    handled: list[str] = []

    def mark(message: Mark, call: Call) -> Answer:
        handled.append(message.name)
        return Answer(message.name.encode())

    server = RpcServer({Mark: mark})
    await server.start("127.0.0.1", 0)
    many, few = connected(server, OPEN_GREETING), connected(server, OPEN_GREETING)
    try:
        await until(lambda: len(server.connections) == 2)
        # The loop does not run between these two, so it finds both.
        many.sendall(b"".join(encode(i, Mark(f"many {i}")) for i in range(1, 301)))
        few.sendall(encode(1, Mark("few")))
        await until(lambda: len(handled) == 301)
        assert [name for name in handled if name != "few"] == [f"many {i}" for i in range(1, 301)]
        assert handled.index("few") < 10, handled[:20]
        assert server.deferred_bytes == 0
        expected = b"".join(encode(i, Answer(f"many {i}".encode())) for i in range(1, 301))
        assert await asyncio.to_thread(received, many, len(expected)) == expected
    finally:
        many.close()
        few.close()
        await server.close()


def received(opened: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := opened.recv(1 << 16)):
        data += piece
    return data


async def test_requests_that_wait_for_their_turn_have_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would exceed the bound is handled at once, without turns."""
    monkeypatch.setattr("mooncake.rpc.server.TURN_S", 0.0)
    monkeypatch.setattr("mooncake.rpc.server.MAX_DEFERRED_BYTES", 0)
    handled: list[str] = []

    def mark(message: Mark, call: Call) -> Answer:
        handled.append(message.name)
        return Answer(b"")

    server = RpcServer({Mark: mark})
    await server.start("127.0.0.1", 0)
    clients = {name: connected(server, OPEN_GREETING) for name in "ab"}
    try:
        await until(lambda: len(server.connections) == 2)
        for name, opened in clients.items():
            opened.sendall(b"".join(encode(i, Mark(name)) for i in range(1, 101)))
        await until(lambda: len(handled) == 200)
        assert handled in (["a"] * 100 + ["b"] * 100, ["b"] * 100 + ["a"] * 100)
        assert server.deferred_bytes == 0
    finally:
        for opened in clients.values():
            opened.close()
        await server.close()


async def test_a_small_request_does_not_wait_for_many_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a node's heartbeat beside the batches of many clients."""
    monkeypatch.setattr("mooncake.rpc.server.TURN_S", 0.0)
    handled: list[int] = []

    def mark(message: Mark, call: Call) -> Answer:
        handled.append(len(message.name))
        return Answer(b"")

    server = RpcServer({Mark: mark})
    await server.start("127.0.0.1", 0)
    large = [connected(server, OPEN_GREETING) for _ in range(30)]
    small = connected(server, OPEN_GREETING)
    try:
        await until(lambda: len(server.connections) == 31)
        for opened in large:
            opened.sendall(encode(1, Mark("x" * 5000)))
        small.sendall(encode(1, Mark("y")))
        await until(lambda: len(handled) == 31)
        assert handled.index(1) < 5, handled
        assert server.deferred_bytes == 0
    finally:
        for opened in (*large, small):
            opened.close()
        await server.close()


async def test_requests_of_a_client_that_has_gone_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived whole is handled, before the loss of the connection is reported."""
    monkeypatch.setattr("mooncake.rpc.server.TURN_S", 0.0)
    handled: list[str] = []

    def mark(message: Mark, call: Call) -> Answer:
        handled.append(message.name)
        if message.name == "1":
            call.connection.close()
        return Answer(b"")

    server = RpcServer({Mark: mark}, lambda _: handled.append("lost"))
    await server.start("127.0.0.1", 0)
    opened = connected(server, OPEN_GREETING)
    try:
        await until(lambda: len(server.connections) == 1)
        opened.sendall(b"".join(encode(i, Mark(str(i))) for i in range(1, 51)))
        await until(lambda: "lost" in handled)
        assert handled == [*map(str, range(1, 51)), "lost"]
        assert server.deferred_bytes == 0
    finally:
        opened.close()
        await server.close()


async def test_a_part_of_a_request_does_not_keep_the_loop_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning for the next request pays after a request, not for clients that send a byte now and then."""
    server = RpcServer({Ask: answer})
    calls: list[int] = []
    monkeypatch.setattr(server, "stay_awake", lambda: calls.append(server.pending_bytes))
    await server.start("127.0.0.1", 0)
    frame = encode(1, Ask(1))
    opened = connected(server, OPEN_GREETING)
    try:
        opened.sendall(frame)
        await until(lambda: len(calls) == 1)
        opened.sendall(frame[:7])
        await until(lambda: server.pending_bytes == 7)
        assert len(calls) == 1
        opened.sendall(frame[7:])
        await until(lambda: len(calls) == 2)
    finally:
        opened.close()
        await server.close()


async def test_a_connection_that_rested_has_a_deadline_again() -> None:
    async def test(server: RpcServer) -> None:
        frame = bytes(encode(1, Ask(5)))
        late = connected(server, OPEN_GREETING + frame)
        await until(lambda: len(server.connections) == 2 and not server.watched)
        late.sendall(frame[:7])
        assert await is_cut(late)

    await with_server(Limits(stall_s=0.05), test)


class Number(msgspec.Struct, array_like=True, tag="number"):
    value: int


@pytest.mark.parametrize("padding", ["", "x" * 5000], ids=["at once", "in a turn"])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
async def test_a_reply_that_cannot_be_encoded_is_a_failure(padding: str, is_async: bool) -> None:
    """A number above 64 bits, and a file's name that is not UTF-8. The requests after it are answered."""

    def handle(message: Mark, call: Call) -> Number | Awaitable[Number]:
        return later(message) if is_async else reply_to(message)

    def reply_to(message: Mark) -> Number:
        if message.name.startswith("file"):
            raise StorageError("/models/caf\udce9: Permission denied")
        return Number(1 << 64 if message.name.startswith("number") else 1)

    async def later(message: Mark) -> Number:
        return reply_to(message)

    server = RpcServer({Mark: handle})
    await server.start("127.0.0.1", 0)
    client = AsyncClient(f"127.0.0.1:{server.port}", [Number])
    try:
        for _ in range(2):
            with pytest.raises(StorageError, match=r"^/models/caf\\udce9: Permission denied \(from peer"):
                await client.call(Mark("file" + padding), PATIENCE_S)
            with pytest.raises(MooncakeError, match=r"^the reply Number can't be encoded \(OverflowError\)"):
                await client.call(Mark("number" + padding), PATIENCE_S)
            assert await client.call(Mark(padding), PATIENCE_S) == Number(1)
        assert len(server.connections) == 1, "the connection was never lost"
    finally:
        await client.close()
        await server.close()


@pytest.mark.parametrize("num_turns", [0, 1])
async def test_a_connection_whose_turn_fails_does_not_end_the_turns(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """The connection is closed, in its first turn and in a later one: it gets no other."""
    turns = iter([True] * num_turns)

    def fail(until: float) -> bool:
        if next(turns, False):
            return True
        raise RuntimeError("a defect")

    server = RpcServer({Ask: answer, Mark: lambda message, call: Answer(b"")})
    await server.start("127.0.0.1", 0)
    broken, fine = (AsyncClient(f"127.0.0.1:{server.port}", [Answer]) for _ in range(2))
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    try:
        assert await broken.call(Ask(1), PATIENCE_S) == Answer(bytes(1))
        monkeypatch.setattr(next(iter(server.connections)), "take_turn", fail)
        lost = asyncio.create_task(broken.call(Mark("x" * 5000), PATIENCE_S))
        with pytest.raises(MooncakeError):
            await lost
        assert await fine.call(Mark("x" * 5000), PATIENCE_S) == Answer(b"")
    finally:
        await broken.close()
        await fine.close()
        await server.close()
