# SPDX-License-Identifier: Apache-2.0
"""Requests over TLS from many threads, and the reason that each side gets when the other has none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from mooncake.errors import AccessDenied, DeadlineExceeded, PeerLost, ProtocolError
from mooncake.rpc import AsyncClient, BlockingClient, Call, Limits, RpcServer
from mooncake.security import EVERYBODY, Access, Identity, Role, SecuritySettings
from mooncake.security.keys import derive, format_credential, format_secret

pytest.importorskip("cryptography", reason="makes the certificates: pip install 'mooncake-serving[tls]'")

from mooncake.cli.certs import CertsSettings, make


class Echo(msgspec.Struct, array_like=True, tag="echo"):
    data: bytes


def identity_of(folder: Path) -> Identity:
    """A member of the cluster whose authority is made in ``folder``."""
    make(CertsSettings(folder=folder))
    cert, key, ca = (str(folder / name) for name in ("node.pem", "node.key", "ca.pem"))
    return Identity(SecuritySettings(cert, key, ca))


def echo(message: Echo, call: Call) -> Echo:
    return message


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return identity_of(tmp_path_factory.mktemp("ours"))


@pytest.fixture
async def server(ours: Identity) -> AsyncIterator[RpcServer]:
    server = RpcServer(
        {Echo: echo}, access=Access({Echo: EVERYBODY}), identity=ours, limits=Limits(greeting_s=5)
    )
    await server.start("127.0.0.1", 0)
    yield server
    await server.close()


def client_of(server: RpcServer, identity: Identity) -> BlockingClient:
    return BlockingClient(
        f"127.0.0.1:{server.port}", [Echo], "the test's server", is_patient=False, identity=identity
    )


async def test_threads_share_a_session(server: RpcServer, ours: Identity) -> None:
    client = client_of(server, ours)

    def work(number: int) -> bool:
        for i in range(40):
            sent = Echo(os.urandom(1 + (number * 7919 + i * 104_729) % 200_000))
            if client.call(sent, 30) != sent:
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        loop = asyncio.get_running_loop()
        assert all(await asyncio.gather(*(loop.run_in_executor(pool, work, n) for n in range(6))))
    assert len(server.connections) == 1
    client.close()
    with pytest.raises(PeerLost):
        await asyncio.to_thread(client.call, Echo(b"late"), 5)


async def test_the_deadline_of_a_thread_is_not_that_of_another(ours: Identity) -> None:
    """Calls that wait for an answer a moment only, beside large ones that have a minute."""

    def echo_large(message: Echo, call: Call) -> Echo | None:
        return message if message.data else None

    server = RpcServer({Echo: echo_large}, access=Access({Echo: EVERYBODY}), identity=ours)
    await server.start("127.0.0.1", 0)
    client = client_of(server, ours)

    def unanswered() -> None:
        for _ in range(20):
            with pytest.raises(DeadlineExceeded):
                client.call(Echo(b""), 0.002)

    def large() -> bool:
        sent = Echo(os.urandom(4 << 20))
        return all(client.call(sent, 60) == sent for _ in range(4))

    try:
        assert await asyncio.to_thread(client.call, Echo(b"first"), 60) == Echo(b"first")
        await asyncio.gather(
            *(asyncio.to_thread(unanswered) for _ in range(2)),
            *(asyncio.to_thread(large) for _ in range(2)),
        )
        assert client._socket is not None and client._socket.sock.gettimeout() == 0
        assert len(server.connections) == 1, "no call has lost the connection of all"
    finally:
        client.close()
        await server.close()


async def test_a_plain_client_gets_the_reason(server: RpcServer) -> None:
    client = client_of(server, Identity())
    with pytest.raises(PeerLost, match=r"the test's server at .* if it wants TLS, use the same `tls`"):
        await asyncio.to_thread(client.call, Echo(b"hello"), 20)
    client.close()


async def test_a_client_that_wants_tls_gets_the_reason(ours: Identity) -> None:
    server = RpcServer({Echo: echo}, identity=Identity())
    await server.start("127.0.0.1", 0)
    client = client_of(server, ours)
    with pytest.raises(ProtocolError, match=r"TLS.*use the same `tls`"):
        await asyncio.to_thread(client.call, Echo(b"hello"), 20)
    client.close()
    await server.close()


async def test_strangers_are_not_talked_to(server: RpcServer, ours: Identity, tmp_path: Path) -> None:
    theirs = identity_of(tmp_path)
    without = Identity()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ours.settings.tls_ca)
    without.__dict__["client_tls"], without.has_tls = context, True  # speaks TLS, shows no certificate
    for identity, reason in ((theirs, "verify failed|self.signed|issuer"), (without, "certificate required")):
        client = client_of(server, identity)
        # A reset may overtake the server's alert; then only the advice is left.
        with pytest.raises((ProtocolError, PeerLost), match=f"({reason}|answered nothing).*`tls_ca`"):
            await asyncio.to_thread(client.call, Echo(b"hello"), 20)
        client.close()
    good = client_of(server, ours)
    assert await asyncio.to_thread(good.call, Echo(b"hello"), 20) == Echo(b"hello")
    good.close()


async def test_a_silent_server_costs_no_more_than_the_deadline(
    ours: Identity,
) -> None:
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    client = BlockingClient(f"127.0.0.1:{port}", [Echo], identity=ours, is_patient=False)
    with pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(client.call, Echo(b"hello"), 0.2)
    client.close()
    silent.close()


async def test_a_member_cannot_stand_between_a_node_and_its_master(
    tmp_path: Path, server: RpcServer, ours: Identity
) -> None:
    """With a key too, certificates need no role; but a proof is valid for one server only."""
    authority = Path(ours.settings.tls_ca).parent
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(format_secret(b"k" * 32))

    def member(name: str) -> Identity:
        make(CertsSettings(folder=authority, name=name, role="client"))
        cert, key = (str(authority / f"{name}.{ending}") for ending in ("pem", "key"))
        return Identity(SecuritySettings(cert, key, ours.settings.tls_ca, cluster_key_file=str(file)))

    honest, false = member("honest"), member("false")
    access = Access({Echo: EVERYBODY})
    master = RpcServer({Echo: echo}, access=access, identity=honest)
    port = await master.start("127.0.0.1", 0)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection(
            "127.0.0.1", port, ssl=false.client_tls, server_hostname="x"
        )

        async def copy(one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await one.read(1 << 16):
                    other.write(data)
            other.close()

        await asyncio.gather(copy(reader, onward), copy(there, writer))

    between = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=false.server_tls)
    direct = client_of(master, honest)
    assert (await asyncio.to_thread(direct.call, Echo(b"x"), 20)).data == b"x"
    direct.close()
    address = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
    for kind in (BlockingClient, AsyncClient):
        victim = kind(address, [Echo], "the false master", is_patient=False, identity=honest)
        with pytest.raises(AccessDenied, match="is it the right server"):
            if isinstance(victim, AsyncClient):
                await victim.call(Echo(b"x"), 20)
            else:
                await asyncio.to_thread(victim.call, Echo(b"x"), 20)
        if isinstance(victim, AsyncClient):
            await victim.close()
    between.close()
    await master.close()


async def test_a_client_with_the_key_of_a_client_is_no_server(tmp_path: Path, ours: Identity) -> None:
    """All clients of a tenant have its key, so the certificate has to prove the server's role."""
    authority = Path(ours.settings.tls_ca).parent

    def member(name: str, role: Literal["node", "client"], tenant: str = "") -> Identity:
        make(CertsSettings(folder=authority, name=name, role=role, tenant=tenant))
        file, secret = tmp_path / name, b"k" * 32
        file.touch(0o600)
        derived = format_credential(derive(secret, Role(role), tenant))
        file.write_text(derived if tenant else format_secret(secret))
        cert, key = (str(authority / f"{name}.{ending}") for ending in ("pem", "key"))
        return Identity(SecuritySettings(cert, key, ours.settings.tls_ca, cluster_key_file=str(file)))

    honest, master, false = (
        member("acme-1", "client", "acme"),
        member("master", "node"),
        member("acme-2", "client", "acme"),
    )

    async def ask(server: RpcServer) -> None:
        """Call it with both kinds of clients."""
        address = f"127.0.0.1:{server.port}"
        blocking = BlockingClient(address, [Echo], "the master", is_patient=False, identity=honest)
        client = AsyncClient(address, [Echo], "the master", is_patient=False, identity=honest)

        def in_a_thread(message: Echo, timeout_s: float) -> Awaitable[Any]:
            return asyncio.to_thread(blocking.call, message, timeout_s)

        for call in (in_a_thread, client.call):
            if server.identity is master:
                assert await call(Echo(b"x"), 20) == Echo(b"x")
            else:
                with pytest.raises(AccessDenied, match="the certificate of a client of tenant acme"):
                    await call(Echo(b"x"), 20)
        blocking.close()
        await client.close()

    for identity in (master, false):
        server = RpcServer({Echo: echo}, access=Access({Echo: EVERYBODY}), identity=identity)
        await server.start("127.0.0.1", 0)
        await ask(server)
        await server.close()
