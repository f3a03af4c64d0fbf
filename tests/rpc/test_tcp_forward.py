# SPDX-License-Identifier: Apache-2.0
"""One port shared by two protocols."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from mooncake.rpc import AsyncClient, Call, Limits, RpcServer
from tests.waiting import until

BIG = 8 << 20


class Question(msgspec.Struct, array_like=True, tag="question"):
    text: str


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    text: str


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")  # some servers speak first
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write(b"bye")
    writer.close()


def answer(question: Question, _: Call) -> Reply:
    return Reply(question.text.upper())


async def test_both_are_served_at_once_and_neither_notices(tmp_path: Path) -> None:
    path = str(tmp_path / "other")
    other = await asyncio.start_unix_server(echo, path)
    server = RpcServer({Question: answer}, other=path)
    port = await server.start("127.0.0.1", 0)
    client = AsyncClient(f"127.0.0.1:{port}", (Reply,))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        writer.write(b"P")
        await writer.drain()
        writer.write(b"RI" + bytes(BIG))
        writer.write_eof()
        await writer.drain()

    sending = asyncio.create_task(send())
    assert (await client.call(Question("hello"), 10)).text == "HELLO"
    assert await reader.readexactly(8) == b"helloPRI"
    assert not any(await reader.readexactly(BIG))
    assert await reader.read() == b"bye"
    await sending
    assert (await client.call(Question("again"), 10)).text == "AGAIN"
    writer.close()
    await client.close()
    await server.close()
    other.close()


@pytest.mark.parametrize("other", ["", "/nowhere/at/all"])
async def test_without_the_other_server_the_connection_ends(other: str) -> None:
    server = RpcServer({Question: answer}, other=other)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    await server.close()


async def test_closing_the_server_ends_what_was_handed_on(tmp_path: Path) -> None:
    path = str(tmp_path / "other")
    other = await asyncio.start_unix_server(echo, path)
    server = RpcServer({Question: answer}, other=path)
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI")
    assert await reader.readexactly(8) == b"helloPRI"
    await server.close()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    other.close()


async def test_strangers_that_are_handed_on_leave_room_for_clients(tmp_path: Path) -> None:
    path = str(tmp_path / "other")
    other = await asyncio.start_unix_server(echo, path)
    server = RpcServer({Question: answer}, other=path, limits=Limits(max_connections=4))
    port = await server.start("127.0.0.1", 0)
    outsiders = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    for reader, writer in outsiders:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert await reader.readexactly(5) == b"hello"
    client = AsyncClient(f"127.0.0.1:{port}", (Reply,))
    assert (await client.call(Question("hello"), 20)).text == "HELLO"
    assert server.other is not None and server.other.num_open == 3
    await client.close()
    for _, writer in outsiders:
        writer.close()
    await server.close()
    other.close()


async def test_a_connection_whose_ends_have_both_ended_is_closed(tmp_path: Path) -> None:
    """Each of two programs closes when the other has, and neither is there to close the rest."""
    path = str(tmp_path / "other")
    other = await asyncio.start_unix_server(echo, path)
    server = RpcServer({Question: answer}, other=path)
    port = await server.start("127.0.0.1", 0)
    assert server.other is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI" + bytes(BIG))
    writer.write_eof()
    assert await reader.read() == b"helloPRI" + bytes(BIG) + b"bye"
    await until(lambda: server.other is not None and server.other.num_open == 0, "the end of the connection")
    writer.close()
    await server.close()
    other.close()
