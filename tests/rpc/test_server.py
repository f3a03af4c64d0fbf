"""What strangers and sick clients can cost a server: its limits, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from mooncake.rpc import AsyncClient, Call, Limits, RpcServer
from mooncake.rpc.wire import PREFACE, encode, header

PATIENCE_S = 30.0


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    size: int


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    data: bytes


def answer(message: Ask, call: Call) -> Answer:
    return Answer(bytes(message.size))


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.rpc.server.LOOK_S", 0.02)


def connected(server: RpcServer, opening: bytes = b"") -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
    opened.sendall(opening)
    return opened


async def is_cut(opened: socket.socket) -> bool:
    """It ends, by being closed or reset, within our patience."""

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
    """Runs ``test``; a client that was there before it and rests meanwhile is served after it."""
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


@pytest.mark.parametrize("opening", [b"", PREFACE[:-1]], ids=["silent", "half a greeting"])
async def test_whoever_does_not_greet_is_shown_out(opening: bytes) -> None:
    async def test(server: RpcServer) -> None:
        assert await is_cut(connected(server, opening))

    await with_server(Limits(greeting_s=0.05), test)


@pytest.mark.parametrize("part", [1, 7, 8, 9, -1], ids=lambda part: f"cut at {part}")
async def test_half_a_frame_does_not_stay(part: int) -> None:
    async def test(server: RpcServer) -> None:
        frame = bytes(encode(1, Ask(5)))
        assert await is_cut(connected(server, PREFACE + frame + frame[:part]))
        await until(lambda: len(server.connections) == 1)

    await with_server(Limits(stall_s=0.05), test)


async def test_a_byte_now_and_then_does_not_help() -> None:
    """A slow sender looks busy, but its frame has one time for all of it."""

    async def test(server: RpcServer) -> None:
        slow = connected(server, PREFACE)
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


async def test_whoever_takes_no_replies_is_cut_off() -> None:
    async def test(server: RpcServer) -> None:
        deaf = connected(server, PREFACE + b"".join(encode(i, Ask(1 << 20)) for i in range(7)))
        await until(lambda: len(server.connections) == 2)
        await until(lambda: len(server.connections) == 1)
        deaf.close()

    await with_server(Limits(stall_s=0.05), test)


async def test_sizes_and_numbers_are_bounded() -> None:
    async def test(server: RpcServer) -> None:
        assert await is_cut(connected(server, PREFACE + header(1001, 1, 0)))
        fine = connected(server, PREFACE + header(1000, 1, 0))
        await until(lambda: len(server.connections) == 2)
        surplus = connected(server)
        assert await is_cut(surplus)
        assert len(server.connections) == 2
        fine.close()
        await until(lambda: len(server.connections) == 1)

    await with_server(Limits(max_body_bytes=1000, max_connections=2), test)


async def test_idle_clients_stay_and_hinder_nobody() -> None:
    async def test(server: RpcServer) -> None:
        idle = await asyncio.to_thread(lambda: [connected(server, PREFACE) for _ in range(200)])
        await until(lambda: len(server.connections) == 201)
        client = AsyncClient(f"127.0.0.1:{server.port}", [Answer])
        assert await client.call(Ask(3), PATIENCE_S) == Answer(bytes(3))
        await client.close()
        for opened in idle:
            opened.close()
        await until(lambda: len(server.connections) == 1)

    await with_server(Limits(), test)
