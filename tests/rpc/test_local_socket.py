# SPDX-License-Identifier: Apache-2.0
"""Clients on the server's host use its Unix socket if they may trust it, else TCP.

That calls, deadlines and losses are the same over it is tested in ``test_client.py``.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from mooncake.errors import AccessDenied, PeerLost
from mooncake.rpc import AsyncClient, BlockingClient, Call, RpcServer
from mooncake.rpc.local_socket import abstract_name, connect_beside, listen_beside, peer_credentials
from mooncake.security import EVERYBODY, Access, Identity, SecuritySettings
from mooncake.security.keys import format_secret


class WhoAmI(msgspec.Struct, array_like=True, tag="who_am_i"):
    pass


class You(msgspec.Struct, array_like=True, tag="you"):
    peer: str


def local(*numbers: int) -> list[str]:
    """The names of this process's connections, each with its number."""
    return [f"127.0.0.1:pid-{os.getpid()}.{number}" for number in numbers]


@asynccontextmanager
async def serving(
    host: str = "127.0.0.1", *, is_local: bool = True, identity: Identity | None = None
) -> AsyncIterator[RpcServer]:
    def who(message: WhoAmI, call: Call) -> You:
        return You(call.connection.peer)

    access = Access({WhoAmI: EVERYBODY})
    server = RpcServer({WhoAmI: who}, access=access, identity=identity, has_local_socket=is_local)
    await server.start(host, 0)
    try:
        yield server
    finally:
        await server.close()


async def peers(port: int, host: str = "127.0.0.1", identity: Identity | None = None) -> list[str]:
    """What the server calls a blocking client and one on a loop."""
    blocking = BlockingClient(f"{host}:{port}", [You], is_patient=False, identity=identity)
    waiting = AsyncClient(f"{host}:{port}", [You], is_patient=False, identity=identity)
    try:
        answers = [await asyncio.to_thread(blocking.call, WhoAmI(), 10.0), await waiting.call(WhoAmI(), 10.0)]
    finally:
        blocking.close()
        await waiting.close()
    return [answer.peer for answer in answers]


def with_key(name: str, folder: Path) -> Identity:
    (folder / name).write_text(format_secret(name.encode().ljust(32, b"-")))
    (folder / name).chmod(0o600)
    return Identity(SecuritySettings(cluster_key_file=str(folder / name)))


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", "127.0.0.1:7"),
        ("127.0.0.9", "127.0.0.9:7"),
        ("0.0.0.0", "127.0.0.1:7"),
        ("::", "::1:7"),
        ("10.0.0.1", ""),
        ("example.org", ""),
    ],
)
def test_only_loopback_addresses_have_one(host: str, name: str) -> None:
    assert abstract_name(host, 7) == (f"\0mooncake-rpc/{name}" if name else "")


@pytest.mark.parametrize("listens", ["127.0.0.1", "0.0.0.0"])
async def test_clients_of_the_loopback_address_use_it(listens: str) -> None:
    async with serving(listens) as server:
        assert await peers(server.port) == local(1, 2)
        assert await peers(server.port, "localhost") == local(3, 4)
        over_tcp = await peers(server.port, "127.0.0.2") if listens == "0.0.0.0" else []
        assert all(peer.startswith("127.0.0.1:") for peer in over_tcp), "another address, another server"


async def test_without_one_clients_use_tcp() -> None:
    async with serving(is_local=False) as server:
        assert all(peer.startswith("127.0.0.1:") for peer in await peers(server.port))


async def test_a_socket_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        monkeypatch.setattr("mooncake.rpc.local_socket.peer_credentials", lambda sock: (1, 4711, 4711))
        monkeypatch.setattr("os.geteuid", lambda: 4712)
        assert all(peer.startswith("127.0.0.1:") for peer in await peers(server.port))


async def test_a_server_whose_name_is_taken_serves_over_tcp(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(abstract_name("127.0.0.1", port))
        server = RpcServer({}, has_local_socket=True)
        await server.start("127.0.0.1", port)
        assert [one.getMessage() for one in caplog.records] == ["local_socket_taken"]
        assert connect_beside("127.0.0.1", port) is None, "nothing listens there"
        await server.close()


async def test_the_name_is_free_again_after_close() -> None:
    async with serving() as server:
        port = server.port
        assert len(server.descriptors()) == 2, "a forked child has to close both"
    assert connect_beside("127.0.0.1", port) is None
    with socket.create_server(("127.0.0.1", port)) as listening:
        beside = listen_beside(listening, 1)
        assert beside is not None
        beside.close()


async def test_a_key_is_asked_for_there_too(tmp_path: Path) -> None:
    ours, theirs = with_key("ours", tmp_path), with_key("theirs", tmp_path)
    async with serving(identity=ours) as server:
        assert await peers(server.port, identity=ours) == local(1, 2)
        for identity in (theirs, Identity(SecuritySettings())):
            with pytest.raises(AccessDenied):
                await peers(server.port, identity=identity)


async def test_a_peer_that_dies_in_the_middle_of_an_answer_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        beside = listen_beside(listening, 1)
        assert beside is not None
        beside.setblocking(True)
        client = BlockingClient(f"127.0.0.1:{port}", [You], is_patient=False)
        calling = asyncio.create_task(asyncio.to_thread(client.call, WhoAmI(), 10.0))
        accepted, _ = await asyncio.to_thread(beside.accept)
        assert peer_credentials(accepted)[0] == os.getpid()
        await asyncio.to_thread(accepted.recv, 1000)
        accepted.send(b"\1\0\0\0")
        accepted.close()
        with pytest.raises(PeerLost):
            await calling
        beside.close()
        client.close()
