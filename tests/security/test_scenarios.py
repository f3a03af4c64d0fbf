# SPDX-License-Identifier: Apache-2.0
"""An unauthenticated client sends every message to every server.

The messages are taken from the code: every handler of every RPC server. Each is refused as unauthenticated,
no handler is reached, and nothing changes; and each role of a member may send what its table allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
import socket
import ssl
import struct
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import pytest

from mooncake.compat.master import load_http
from mooncake.compat.store import dummy_client
from mooncake.compat.transfer import rpc_interface as compat_rpc
from mooncake.conductor.server import ConductorServer, ConductorService, ConductorSettings
from mooncake.connectors import layer_push, peer_push
from mooncake.errors import AccessDenied, DeadlineExceeded, MooncakeError, ProtocolError, Unavailable
from mooncake.http.server import HttpServer, listen
from mooncake.inference import stage
from mooncake.p2p import messages as p2p
from mooncake.rpc import AsyncClient, Call, RpcServer
from mooncake.rpc.wire import GREETING_ID, OPEN_GREETING, PREFACE, Failure, FrameDecoder, decoder_for, encode
from mooncake.security import HEADER, Identity, Role, SecuritySettings, install_identity
from mooncake.security.greeting import Challenge, Hello, Proof
from mooncake.security.keys import derive, format_credential, format_secret
from mooncake.security.principal import EVERYBODY, NODES_AND_ADMINS, TENANT
from mooncake.store import AsyncStore
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer, running
from mooncake.store.settings import MasterSettings
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.metadata import make_backend
from mooncake.transfer.metadata_server import MetadataEntries, make_app

pytest.importorskip("cryptography", reason="makes the certificates: pip install 'mooncake-serving[tls]'")

from mooncake.cli.certs import CertsSettings, make

SHORT_LEASES = MasterSettings(port=0, metrics_port=0, heartbeat_s=0.1, lease_s=0.5)
PATIENCE_S = 20.0
ROOT = Path(__file__).parent.parent.parent
LEVELS: dict[str, tuple[Role, str]] = {
    "node": (Role.NODE, ""),
    "admin": (Role.ADMIN, ""),
    "client": (Role.CLIENT, ""),
    TENANT: (Role.CLIENT, "acme"),
}
Way = Literal["tls", "key", "both"]


class Cluster:
    """Credentials of one cluster, stored in ``folder``."""

    def __init__(self, folder: Path, way: Way, secret: bytes) -> None:
        self.folder, self.way, self.secret = folder, way, secret
        folder.mkdir()

    def member(self, role: Role = Role.NODE, tenant: str = "") -> Identity:
        name = f"{role}-{tenant}"
        files: dict[str, str] = {}
        if self.way != "key":
            if not (self.folder / f"{name}.pem").exists():
                make(CertsSettings(folder=self.folder, name=name, role=role.value, tenant=tenant))
            files = {
                f"tls_{one}": str(self.folder / f"{name}.{two}")
                for one, two in (("cert", "pem"), ("key", "key"))
            }
            files["tls_ca"] = str(self.folder / "ca.pem")
        if self.way != "tls":
            key = self.folder / f"{name}.cluster"
            # A node has the cluster's own key, others what is derived from it.
            is_own = role is Role.NODE
            text = (
                format_secret(self.secret) if is_own else format_credential(derive(self.secret, role, tenant))
            )
            key.write_text(text)
            key.chmod(0o600)
            files["cluster_key_file"] = str(key)
        return Identity(SecuritySettings(**files))  # type: ignore[arg-type]


@pytest.fixture(params=["tls", "key", "both"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    ours = Cluster(tmp_path / "ours", request.param, b"s" * 32)
    install_identity(ours.member())
    yield ours
    install_identity(None)


@pytest.fixture
def theirs(cluster: Cluster, tmp_path: Path) -> Cluster:
    """Another cluster, with credentials of the same kind."""
    return Cluster(tmp_path / "theirs", cluster.way, b"t" * 32)


# What listens -----------------------------------------------------------------------------------------


def direct_server() -> RpcServer:
    """The RPC server of a prefill engine, without the engine."""
    return RpcServer(
        {peer_push.PushRequest: nothing, peer_push.PushProbe: nothing}, access=peer_push.ACCESS, name="direct"
    )


def push_server() -> RpcServer:
    """The RPC server of a prefill worker that pushes, without the worker."""
    messages = (
        peer_push.PushRequest,
        layer_push.PushProgress,
        layer_push.PushWithdrawal,
        peer_push.PushProbe,
    )
    return RpcServer(dict.fromkeys(messages, nothing), access=layer_push.ACCESS, name="push")


def nothing(message: object, call: Call) -> Failure:
    return Failure("reached", type(message).__name__)


class House:
    """Every RPC server of the code, with handlers that only record that they were reached."""

    def __init__(self) -> None:
        self.master = MasterServer(MasterSettings(port=0))
        self.engine = TransferEngine(TransferSettings(handshake_port=0))
        [listener] = [one for one in self.engine._services if hasattr(one, "port")]
        self.servers: dict[str, RpcServer] = {
            "store/server.py": self.master._rpc,
            "conductor/server.py": ConductorServer(ConductorService(ConductorSettings())).rpc,
            "connectors/layer_push.py": push_server(),
            "connectors/peer_push.py": direct_server(),
            "transfer/handshake.py": listener._server,  # type: ignore[union-attr]
            "compat/transfer/rpc_interface.py": RpcServer(
                {compat_rpc.MessagePart: nothing}, access=compat_rpc.ACCESS
            ),
            "inference/stage.py": RpcServer(
                {stage.JoinGroup: nothing, stage.StageProbe: nothing, stage.MoveBlocks: nothing},
                access=stage.ACCESS,
            ),
            "p2p/store.py": RpcServer(
                {
                    p2p.AskVersions: nothing,
                    p2p.AskManifest: nothing,
                    p2p.AskSegment: nothing,
                    p2p.WatchVersion: nothing,
                    p2p.FetchChunk: nothing,
                    p2p.ReturnSlot: nothing,
                    p2p.AnnounceEnd: nothing,
                    p2p.CommandRegister: nothing,
                    p2p.CommandGet: nothing,
                    p2p.CommandDrop: nothing,
                    p2p.AskProgress: nothing,
                },
                access=p2p.ACCESS,
            ),
            "compat/programs/client.py": RpcServer(
                {dummy_client.ClientInfoRequest: nothing}, access=dummy_client.ACCESS
            ),
        }
        self.reached: list[str] = []
        for server in self.servers.values():
            for kind in server.handlers:
                server.handlers[kind] = self._reached

    def _reached(self, message: object, call: Call) -> Failure:
        self.reached.append(type(message).__name__)
        return nothing(message, call)

    async def __aenter__(self) -> House:
        for server in self.servers.values():
            if not server.port:
                await server.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for name, server in self.servers.items():
            if name != "transfer/handshake.py":
                await server.close()
        await asyncio.to_thread(self.engine.close)

    def messages(self) -> Iterator[tuple[RpcServer, type]]:
        for server in self.servers.values():
            for kind in server.handlers:
                yield server, kind


def sample(kind: Any) -> Any:
    """A value of a type; that of a message can be decoded."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return sample(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return None if type(None) in arguments else sample(arguments[0])
    if origin is Literal:
        return arguments[0]
    if origin is list:
        return []
    if origin is dict:
        return {}
    if origin is tuple:
        return () if arguments[-1] is ... else tuple(sample(one) for one in arguments)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(
            **{
                field.name: sample(hints[field.name])
                for field in msgspec.structs.fields(kind)
                if field.required
            }
        )
    return {int: 1, float: 1.0, str: "x", bytes: b"x", bool: False}[kind]


async def test_every_server_of_the_code_is_scanned(cluster: Cluster) -> None:
    """A new RPC server has to be added to ``House``, and its messages to its table."""
    found = {
        str(path.relative_to(ROOT / "mooncake"))
        for path in (ROOT / "mooncake").rglob("*.py")
        if re.search(r"\bRpcServer\(", path.read_text()) and path.parent != ROOT / "mooncake" / "rpc"
    }
    house = House()
    try:
        assert found == set(house.servers)
        for name, server in house.servers.items():
            assert set(server.handlers) == set(server.access.table), name
            assert all(levels <= EVERYBODY for levels in server.access.table.values()), name
    finally:
        await asyncio.to_thread(house.engine.close)


# What an unauthenticated client can do --------------------------------------------------------------


async def replies_to(port: int, *pieces: bytes) -> bytes:
    """Everything that a server sends in reply to these bytes before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while data := await reader.read(1 << 16):
                received += data
    except ConnectionError:
        pass
    finally:
        writer.close()
    return received


def is_refusal(received: bytes) -> bool:
    """Whether a reply is empty, a TLS alert, or a refusal as unauthenticated."""
    if not received or received[0] == 21:
        return True
    replies = decoder_for([Challenge])
    frames = FrameDecoder().feed(received)
    assert [request_id for request_id, _ in frames] == [GREETING_ID]
    answer = replies.decode(frames[0][1])
    return isinstance(answer, Failure) and answer.code in ("access_denied", "protocol_error")


async def test_an_unauthenticated_client_is_always_refused(cluster: Cluster, theirs: Cluster) -> None:
    async with House() as house:
        received = await asyncio.gather(
            *(
                replies_to(server.port, opening + bytes(encode(1, sample(kind))))
                for server, kind in house.messages()
                for opening in (OPEN_GREETING, PREFACE)
            )
        )
        assert len(received) >= 80 and all(is_refusal(one) for one in received)
        assert not house.reached
        for server in house.servers.values():
            for outsider in (Identity(), theirs.member(), theirs.member(Role.ADMIN)):
                for kind in server.handlers:
                    client = AsyncClient(
                        f"127.0.0.1:{server.port}", [], is_patient=False, identity=outsider, servers=EVERYBODY
                    )
                    with pytest.raises((AccessDenied, ProtocolError, Unavailable)) as caught:
                        await client.call(sample(kind), PATIENCE_S)
                    assert not isinstance(caught.value, DeadlineExceeded)
                    await client.close()
        assert not house.reached


async def test_another_key_gets_no_further_with_its_own_proof(tmp_path: Path) -> None:
    """The client knows the greeting, and even the id of the key."""
    ours = Cluster(tmp_path / "ours", "key", b"s" * 32)
    install_identity(ours.member())
    try:
        async with House() as house:
            right, wrong = derive(b"s" * 32, Role.ADMIN), derive(b"t" * 32, Role.ADMIN)

            async def ask(server: RpcServer, key_id: bytes) -> None:
                hello = bytes(PREFACE + encode(GREETING_ID, Hello("admin", "", key_id, b"n" * 32)))
                proof = bytes(encode(GREETING_ID, Proof(b"p" * 32)))
                request = bytes(encode(1, sample(next(iter(server.handlers)))))
                frames = FrameDecoder().feed(await replies_to(server.port, hello + proof + request))
                replies = [decoder_for([Challenge]).decode(body) for _, body in frames]
                assert all(request_id == GREETING_ID for request_id, _ in frames)
                assert isinstance(replies[-1], Failure)
                assert len(replies) <= (2 if key_id == right.key_id else 1)

            key_ids = (right.key_id, wrong.key_id, b"", b"x" * 300)
            servers = house.servers.values()
            await asyncio.gather(*(ask(server, key_id) for server in servers for key_id in key_ids))
            assert not house.reached
    finally:
        install_identity(None)


@pytest.mark.parametrize("level", LEVELS)
async def test_a_member_may_say_what_its_role_allows(cluster: Cluster, level: str) -> None:
    role, tenant = LEVELS[level]
    async with House() as house:
        for server in house.servers.values():
            client = AsyncClient(
                f"127.0.0.1:{server.port}",
                [],
                identity=cluster.member(role, tenant),
                servers=EVERYBODY if server.binding.startswith(b"peer") else NODES_AND_ADMINS,
            )
            for kind in server.handlers:
                message = sample(kind)
                if tenant and hasattr(message, "tenant"):
                    message = msgspec.structs.replace(message, tenant=tenant)
                allowed = server.access.table[kind]
                if kind in server.access.special:
                    allowed &= server.access.special[kind](message)
                with pytest.raises(MooncakeError) as caught:
                    await client.call(message, PATIENCE_S)
                is_denied = isinstance(caught.value, AccessDenied)
                assert is_denied == (level not in allowed), (level, kind)
                if tenant and hasattr(message, "tenant"):
                    for other in ("", "other"):
                        with pytest.raises(AccessDenied, match=r"names tenant|may be sent by"):
                            await client.call(msgspec.structs.replace(message, tenant=other), PATIENCE_S)
            await client.close()


async def test_force_and_cancel_are_for_administrators(cluster: Cluster) -> None:
    from mooncake.store import messages as m

    async with House() as house:
        server = house.servers["store/server.py"]
        for level, (role, tenant) in LEVELS.items():
            client = AsyncClient(f"127.0.0.1:{server.port}", [], identity=cluster.member(role, tenant))
            for message, levels in (
                (m.RemoveMatching("", True, tenant), {"admin"}),
                (m.AskJob(1, cancel=True), {"admin", "node"}),
            ):
                with pytest.raises(MooncakeError) as caught:
                    await client.call(message, PATIENCE_S)
                assert isinstance(caught.value, AccessDenied) == (level not in levels), (level, message)
            await client.close()


# A real store, real memory ----------------------------------------------------------------------------


async def test_nothing_of_a_store_is_seen_or_changed(cluster: Cluster, theirs: Cluster) -> None:
    """Descriptors and keys of a node's memory are given to members only, by the master and by the node."""
    async with running(SHORT_LEASES, load_http) as master:
        address = f"127.0.0.1:{master.port}"
        engine = await asyncio.to_thread(
            TransferEngine, TransferSettings(name="node", handshake_port=0, transports=("tcp",))
        )
        node = Node(NodeSettings(address, pool_size_bytes=8 << 20, huge_pages=False), engine)
        await node.start()
        async with asyncio.timeout(PATIENCE_S):
            await node.mounted.wait()
        member = AsyncStore(address, identity=cluster.member())
        assert await member.put("key", b"value") is None
        before = master.master.snapshot()
        for outsider in (Identity(), theirs.member(Role.ADMIN)):
            with contextlib.closing(
                TransferEngine(TransferSettings(transports=("tcp",)), identity=outsider)
            ) as other:
                with pytest.raises((AccessDenied, ProtocolError, Unavailable)):
                    await asyncio.to_thread(other._client.describe, engine.handshake, PATIENCE_S)
                their_store = AsyncStore(address, other, identity=outsider)
                with pytest.raises((AccessDenied, ProtocolError, Unavailable)):
                    await their_store.get("key")
                await their_store.close()
        assert bytes(await member.get("key") or b"") == b"value"
        assert master.master.snapshot() == before
        for path in (
            "/metrics",
            "/get_all_keys",
            "/query_key?key=key",
            "/get_all_segments",
            "/api/v1/quotas",
        ):
            assert await web_status(master, path) in (0, 401), path
        await member.close()
        await node.close()
        await asyncio.to_thread(engine.close)


async def web_status(master: MasterServer, path: str) -> int:
    """Status of the master's HTTP answer to an unauthenticated request; 0 when it does not answer."""
    address = master.web_address
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"http://{address}{path}") as answer:
                return answer.status
        except aiohttp.ClientError:
            return 0


async def test_a_tenants_client_sees_its_own_tenant(cluster: Cluster) -> None:
    async with running(SHORT_LEASES, load_http) as master:
        address = f"127.0.0.1:{master.port}"
        node = Node(NodeSettings(address, pool_size_bytes=8 << 20, huge_pages=False))
        await node.start()
        async with asyncio.timeout(PATIENCE_S):
            await node.mounted.wait()
        bank = AsyncStore(address, identity=cluster.member(Role.CLIENT, "bank"))
        acme = AsyncStore(address, identity=cluster.member(Role.CLIENT, "acme"))
        if cluster.way == "tls":  # a certificate says it to the server only
            from mooncake.store import StoreSettings

            await bank.close()
            await acme.close()
            bank = AsyncStore(
                address, settings=StoreSettings(tenant="bank"), identity=cluster.member(Role.CLIENT, "bank")
            )
            acme = AsyncStore(
                address, settings=StoreSettings(tenant="acme"), identity=cluster.member(Role.CLIENT, "acme")
            )
        assert await bank.put("key", b"the bank's") is None
        assert await acme.get("key") is None
        assert bytes(await bank.get("key") or b"") == b"the bank's"
        from mooncake.store import StoreSettings

        their_store = AsyncStore(
            address, settings=StoreSettings(tenant="bank"), identity=cluster.member(Role.CLIENT, "acme")
        )
        with pytest.raises(AccessDenied, match="names tenant 'bank'"):
            await their_store.get("key")
        for one in (bank, acme, their_store):
            await one.close()
        await node.close()


async def test_a_node_ends_only_what_it_mounted(cluster: Cluster) -> None:
    from mooncake.store import messages as m

    async with running(SHORT_LEASES, load_http) as master:
        address = f"127.0.0.1:{master.port}"
        node = Node(NodeSettings(address, name="one", pool_size_bytes=8 << 20, huge_pages=False))
        await node.start()
        async with asyncio.timeout(PATIENCE_S):
            await node.mounted.wait()
        epoch = master.master.catalog.segments.mounted["one"].epoch
        other = AsyncClient(address, m.REPLIES, identity=cluster.member())
        for message in (m.Unmount("one", epoch), m.DrainSegments(["one"], [])):
            with pytest.raises(AccessDenied, match="another node"):
                await other.call(message, PATIENCE_S)
        assert "one" in master.master.catalog.segments.mounted
        admin = AsyncClient(address, m.REPLIES, identity=cluster.member(Role.ADMIN))
        assert isinstance(await admin.call(m.DrainSegments(["one"], []), PATIENCE_S), m.JobReply)
        await other.close()
        await admin.close()
        await node.close()
        assert "one" not in master.master.catalog.segments.mounted, "its own node may"


# HTTP and gRPC ----------------------------------------------------------------------------------------


async def test_the_metadata_service_asks_who_one_is(cluster: Cluster, theirs: Cluster) -> None:
    ours = cluster.member()
    entries = MetadataEntries()
    entries.put("mooncake/ram/node", b"descriptor", None, 0.0)
    server = HttpServer(make_app(entries, ours), listen("127.0.0.1", 0), tls=ours.server_tls)
    await server.start()
    scheme = "https" if ours.has_tls else "http"
    url = f"{scheme}://127.0.0.1:{server.port}/metadata"
    member = make_backend(url, tls=ours.client_tls, signer=ours.signer())
    assert await asyncio.to_thread(member.get, "mooncake/ram/node") == b"descriptor"
    await asyncio.to_thread(member.put, "mooncake/ram/other", b"more", 30.0)
    for outsider in (Identity(), theirs.member()):
        other = make_backend(url, tls=outsider.client_tls or open_tls(), signer=outsider.signer())
        for ask in (
            lambda one=other: one.get("mooncake/ram/node"),
            lambda one=other: one.put("mooncake/ram/node", b"mine"),
            lambda one=other: one.remove("mooncake/ram/node"),
            lambda one=other: one.list(""),
        ):
            with pytest.raises((AccessDenied, ProtocolError, Unavailable)):
                await asyncio.to_thread(ask)
    client = cluster.member(Role.CLIENT, "acme")
    theirs_of_us = make_backend(url, tls=client.client_tls, signer=client.signer())
    await asyncio.to_thread(theirs_of_us.put, "acme/own", b"1")
    with pytest.raises((AccessDenied, ProtocolError), match="another client"):
        await asyncio.to_thread(theirs_of_us.put, "mooncake/ram/node", b"mine")
    assert entries.get("mooncake/ram/node", 0.0) == b"descriptor"
    for one in (member, theirs_of_us):
        one.close()
    await server.close()


def open_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def test_a_changed_body_is_not_taken(tmp_path: Path) -> None:
    ours = Cluster(tmp_path / "ours", "key", b"s" * 32).member()
    entries, signer = MetadataEntries(), ours.signer()
    assert signer is not None
    server = HttpServer(make_app(entries, ours), listen("127.0.0.1", 0))
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with aiohttp.ClientSession() as session:
        headers = signer.headers("PUT", "/metadata?key=a", b"signed")
        with contextlib.suppress(aiohttp.ClientError):
            async with session.put(f"{url}/metadata?key=a", data=b"changed", headers=headers) as answer:
                assert answer.status >= 400
        assert entries.get("a", 0.0) is None
        async with session.put(f"{url}/metadata?key=a", data=b"signed", headers=headers) as answer:
            assert answer.status == 401, "and a signature serves once"
    await server.close()


async def test_grpc_is_answered_to_members(cluster: Cluster) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra grpc)")
    from mooncake.store.grpc_status import StatusService

    path = str(cluster.folder / "grpc")
    method = "/mooncake.MooncakeStoreService/GetPoolStatus"
    async with running(MasterSettings(port=0, metrics_port=0), load_http, path) as master:
        service = StatusService(master.ask)
        service.start(f"unix:{path}")
        try:

            def ask(identity: Identity, name: str = method) -> bytes:
                target = f"127.0.0.1:{master.port}"
                if identity.has_tls:
                    files = [
                        Path(getattr(identity.settings, f"tls_{one}")).read_bytes()
                        for one in ("ca", "key", "cert")
                    ]
                    options = [("grpc.ssl_target_name_override", "localhost")]
                    channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*files), options)
                else:
                    channel = grpc.insecure_channel(target)
                signer = identity.signer()
                metadata = [(HEADER.lower(), signer.headers("POST", name)[HEADER])] if signer else []
                with channel:
                    call = channel.unary_unary(name)
                    answer: bytes = call(b"", timeout=5, metadata=metadata)
                    return answer

            assert isinstance(await asyncio.to_thread(ask, cluster.member()), bytes)
            other = Cluster(cluster.folder.parent / "third", cluster.way, b"u" * 32)
            tenant = cluster.member(Role.CLIENT, "acme")
            for outsider in (Identity(), other.member(), tenant):
                for name in (method, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
                    with pytest.raises(grpc.RpcError) as caught:
                        await asyncio.to_thread(ask, outsider, name)
                    assert caught.value.code() in (
                        grpc.StatusCode.UNAUTHENTICATED,
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                    )
        finally:
            await service.close()


# Bytes ------------------------------------------------------------------------------------------------


async def test_a_stranger_with_a_descriptor_gets_no_memory_without_its_keys(cluster: Cluster) -> None:
    """The tcp data path takes no slice without the epoch of the process, which only members get."""
    engine = await asyncio.to_thread(TransferEngine, TransferSettings(transports=("tcp",)))
    region = engine.allocate(4096)
    host, _, port = engine.describe().endpoints["tcp"].rpartition(":")
    greeting = struct.pack("<4sIQQ", b"MOKC", 2, 12345, 1)
    with socket.create_connection((host, int(port)), PATIENCE_S) as opened:
        opened.settimeout(PATIENCE_S)
        opened.sendall(greeting + bytes(256))
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := opened.recv(4096):
                received += data
    assert len(received) <= 64, "a refusal, and no memory"
    assert region.size_bytes == 4096
    await asyncio.to_thread(engine.close)
