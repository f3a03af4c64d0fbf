# SPDX-License-Identifier: Apache-2.0
"""The contract of all ways to find peers: with real services, and without any (``P2PHANDSHAKE``)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    PeerLost,
    ProtocolError,
    Unavailable,
)
from mooncake.transfer import Op, RemoteSegment, Status, TransferEngine, TransferSettings
from mooncake.transfer.descriptor import VERSION, decode_descriptor
from mooncake.transfer.metadata import Backend, make_backend, members_of
from mooncake.transfer.name_service import metadata_key
from tests.contract.metadata_servers import KINDS, MetadataServer, free_port, has_ipv6
from tests.transfer.next_release import use_next_version
from tests.waiting import wait_until

P2P = "P2PHANDSHAKE"


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, MetadataServer]]:
    """The started services, by kind."""
    started: dict[str, MetadataServer] = {}
    yield started
    for server in started.values():
        server.stop()


def started(kind: str, servers: dict[str, MetadataServer]) -> MetadataServer:
    if kind not in servers:
        servers[kind] = MetadataServer(kind)
    return servers[kind]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, servers: dict[str, MetadataServer]) -> MetadataServer:
    return started(request.param, servers)


@pytest.fixture
def backend(server: MetadataServer) -> Iterator[Backend]:
    backend = make_backend(server.url, timeout_s=30)
    for key in backend.list(""):
        backend.remove(key)
    yield backend
    backend.close()


@pytest.fixture(params=[*KINDS, "p2p"])
def metadata(request: pytest.FixtureRequest, servers: dict[str, MetadataServer]) -> str:
    """Value of ``TransferSettings.metadata``."""
    return P2P if request.param == "p2p" else started(request.param, servers).url


# Keys and values -----------------------------------------------------------------------------------


def test_put_get_replace_remove(backend: Backend) -> None:
    assert backend.get("mooncake/ram/a") is None and not backend.remove("mooncake/ram/a")
    backend.put("mooncake/ram/a", b'{"x": 1}')
    assert backend.get("mooncake/ram/a") == b'{"x": 1}'
    backend.put("mooncake/ram/a", b"2")
    assert backend.get("mooncake/ram/a") == b"2"
    assert backend.remove("mooncake/ram/a") and not backend.remove("mooncake/ram/a")
    assert backend.get("mooncake/ram/a") is None


@pytest.mark.parametrize("value", [b"", b"\x00\xff\r\n$-1\r\n", bytes(range(256)) * 4096], ids=len)
def test_values_are_any_bytes(backend: Backend, value: bytes) -> None:
    backend.put("k", value)
    assert backend.get("k") == value


def test_keys_and_lists(backend: Backend) -> None:
    keys = [
        "a b&c=ü",
        "[::1]:15001",
        "node*?",
        "node-1",
        "node-2",
        "[a-z]",
        "back\\slash",
        "^x",
        "\U0010ffff",
    ]
    for key in keys:
        backend.put(f"mooncake/ram/{key}", key.encode())
    backend.put("mooncake/rpc_meta/node-1", b"other")
    backend.put("other", b"")
    assert backend.list("mooncake/ram/") == sorted(f"mooncake/ram/{key}" for key in keys)
    assert backend.list("mooncake/ram/node") == [f"mooncake/ram/node{rest}" for rest in ("*?", "-1", "-2")]
    assert backend.list("mooncake/ram/[") == ["mooncake/ram/[::1]:15001", "mooncake/ram/[a-z]"]
    assert backend.list("mooncake/ram/node*") == ["mooncake/ram/node*?"]
    assert backend.list("mooncake/ram/back\\") == ["mooncake/ram/back\\slash"]
    assert backend.list("nothing") == [] and len(backend.list("")) == len(keys) + 2
    for key in keys:
        assert backend.get(f"mooncake/ram/{key}") == key.encode()


def test_many_keys(server: MetadataServer, backend: Backend) -> None:
    many = 1200 if server.kind == "redis" else 300  # redis lists a thousand at a time
    for number in range(many):
        backend.put(f"many/{number:04}", b"x")
    assert backend.list("many/") == [f"many/{number:04}" for number in range(many)]


def test_entries_expire_unless_they_are_put_again(backend: Backend) -> None:
    backend.put("gone", b"1", ttl_s=1)
    backend.put("kept", b"1", ttl_s=1)
    backend.put("kept", b"2", ttl_s=3600)
    backend.put("freed", b"1", ttl_s=1)
    backend.put("freed", b"2")
    assert backend.get("gone") in (b"1", None)
    wait_until(lambda: backend.get("gone") is None, "expiry")
    assert (backend.get("kept"), backend.get("freed")) == (b"2", b"2")
    assert backend.list("") == ["freed", "kept"]


def test_many_threads(backend: Backend) -> None:
    wrong: list[object] = []

    def use(number: int) -> None:
        for index in range(50):
            backend.put(f"{number}", f"{index}".encode(), ttl_s=60)
            found = backend.get(f"{number}")
            if found != f"{index}".encode():
                wrong.append((number, index, found))

    users = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong


def test_a_forked_child_does_not_speak_on_its_parents_connection(backend: Backend) -> None:
    backend.put("k", b"1")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if backend.get("k") == b"1" and backend.get("none") is None else 1)
        os._exit(2)
    for _ in range(20):
        assert backend.get("k") == b"1"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# Services that fail --------------------------------------------------------------------------------


def test_a_service_that_is_restarted(server: MetadataServer, backend: Backend) -> None:
    backend.put("k", b"1")
    server.stop()
    try:
        with pytest.raises(PeerLost, match="is it running"):
            backend.get("k")
    finally:
        server.start()
    assert backend.get("k") is None
    backend.put("k", b"2")
    assert backend.get("k") == b"2"


@pytest.mark.parametrize("kind", KINDS)
def test_no_service_there(kind: str) -> None:
    url = f"{kind}://127.0.0.1:{free_port()}"
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:\d+.*is it running"):
        make_backend(url).get("k")
    with TransferEngine(TransferSettings(metadata=url, transports=())) as engine:
        with pytest.raises(PeerLost, match="is it running"):
            engine.publish()
        with pytest.raises(PeerLost, match="is it running"):
            engine.open_name("other")
        engine.publish(is_patient=True)
    with pytest.raises((PeerLost, InvalidArgument), match="no such host"):
        make_backend(f"{kind}://no such host:1").get("k")


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_that_does_not_answer(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        backend = make_backend(f"{kind}://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            backend.get("k")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found",
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ok>",
        b"-ERR unknown command\r\n",
        b"$99999999999\r\n",
        b"*99999999999\r\n",
        b"*1\r\n" * 5000,
        b"SSH-2.0-OpenSSH\r\n",
        b"\x00" * 100,
        b"",
    ],
)
def test_another_service_listens_there(kind: str, answer: bytes) -> None:
    """The call ends at once with an error that names the service, or with a miss."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock = other.accept()[0]
                    sock.settimeout(5)
                    with contextlib.suppress(OSError), sock:
                        sock.recv(4096)
                        sock.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        backend = make_backend(f"{kind}://127.0.0.1:{other.getsockname()[1]}", timeout_s=5)
        port = str(other.getsockname()[1])
        if kind == "http" and b" 404 " in answer:
            assert backend.get("k") is None
        elif not (kind == "http" and b" 200 " in answer):
            with pytest.raises((PeerLost, ProtocolError), match=port):
                backend.get("k")
        with pytest.raises((PeerLost, ProtocolError), match=port):
            backend.list("")
        backend.close()
        other.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    "url",
    [
        *["", "x", "ftp://h:1", "p2phandshake", "http://", "http://h:99999/", "redis://", "redis://h:x"],
        *["redis://h/db", "etcd://", "etcd://h:1;", "etcd://h:99999", "etcd://h:1/path", "h:1;"],
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"allowed: .*://"):
        make_backend(url)
    if url:
        with pytest.raises(InvalidArgument, match=r"allowed: .*://"):
            TransferEngine(TransferSettings(metadata=url, transports=()))


def test_urls_of_etcd() -> None:
    assert members_of("etcd://a:1;[::1]:2") == [("a", 1), ("::1", 2)]
    assert members_of("etcd://a,b:3/") == [("a", 2379), ("b", 3)]
    assert "etcd://10.0.0.1:2379;10.0.0.2:2379" in repr(make_backend("10.0.0.1:2379;10.0.0.2:2379"))


def test_etcd_with_a_dead_member() -> None:
    server = MetadataServer("etcd")
    try:
        backend = make_backend(f"etcd://127.0.0.1:{free_port()};{server.address}", timeout_s=30)
        backend.put("k", b"1")
        assert backend.get("k") == b"1"
        server.stop()
        with pytest.raises(PeerLost):
            backend.get("k")
        server.start()
        assert backend.get("k") is None
    finally:
        server.stop()


def test_redis_with_a_password_and_databases() -> None:
    server = MetadataServer("redis", flags=["--requirepass", "se:cr@t"])
    try:
        with_password = make_backend(f"redis://:se%3Acr%40t@{server.address}/3")
        with_password.put("k", b"3")
        assert with_password.get("k") == b"3"
        other_way = make_backend(server.url, password="se:cr@t", database=3)
        assert other_way.get("k") == b"3"
        assert make_backend(server.url, password="se:cr@t").get("k") is None
        assert make_backend(f"redis://default:se%3Acr%40t@{server.address}/3").get("k") == b"3"
        for url in (server.url, f"redis://:wrong@{server.address}"):
            with pytest.raises(AccessDenied, match="password"):
                make_backend(url).get("k")
        with pytest.raises(ProtocolError, match="SELECT"):
            make_backend(server.url, password="se:cr@t", database=99).get("k")
        assert "cr" not in repr(with_password).split("redis://")[1]
    finally:
        server.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_services_on_ipv6(kind: str) -> None:
    if not has_ipv6():
        pytest.skip("this machine has no ::1, so metadata over IPv6 was NOT TESTED")
    server = MetadataServer(kind, host="::1")
    try:
        assert "[::1]" in server.url
        settings = TransferSettings(name="six", listen_host="::1", metadata=server.url, transports=("tcp",))
        with TransferEngine(settings) as far, TransferEngine(settings_of(server.url)) as near:
            pool, here = far.allocate(4096), near.allocate(4096)
            far.publish()
            segment = near.open_name("six")
            assert segment is not None and segment.descriptor.endpoints["tcp"].startswith("[::1]:")
            assert near.run(Op.WRITE, segment, [here.address], [pool.address], [9]).status == Status.OK
    finally:
        server.stop()


# Peers by name -------------------------------------------------------------------------------------


def settings_of(metadata: str, name: str = "", **more: object) -> TransferSettings:
    return TransferSettings(
        name=name,
        metadata=metadata,
        transports=("tcp",),
        metadata_timeout_s=30,
        **more,  # type: ignore[arg-type]
    )


def name_for(metadata: str, name: str) -> str:
    return "" if metadata == P2P else name


def found(engine: TransferEngine, name: str) -> RemoteSegment:
    segment = engine.open_name(name)
    assert segment is not None, f"{name} is not found"
    return segment


def test_probes(metadata: str) -> None:
    settings = settings_of(metadata, name_for(metadata, "far"), handshake_port=0)
    with TransferEngine(settings) as far, TransferEngine(settings_of(metadata)) as near:
        far.publish()
        for peer in (far.name, far.handshake):
            alive = near.probe(peer, 30)
            assert alive is not None and (alive.name, alive.epoch) == (far.name, far.epoch)
        if metadata == P2P:
            with pytest.raises(InvalidArgument, match="host:port"):
                near.probe("missing")
        else:
            assert near.probe("missing") is None
            near.publish()
            with pytest.raises(Unavailable, match="handshake_port=0"):
                far.probe(near.name)
        with pytest.raises(PeerLost, match="is it running"):
            near.probe(f"127.0.0.1:{free_port()}")


def test_peers_find_each_other(metadata: str) -> None:
    with (
        TransferEngine(settings_of(metadata, name_for(metadata, "far"))) as far,
        TransferEngine(settings_of(metadata)) as near,
    ):
        if metadata != P2P:
            assert near.open_name("far") is None
        pool, here = far.allocate(4096), near.allocate(4096)
        far.publish()
        segment = found(near, far.name)
        assert segment.name == far.name and near.open_name(far.name) is segment
        assert near.run(Op.WRITE, segment, [here.address], [pool.address], [10]).status == Status.OK
        near.publish()
        assert found(far, near.name).name == near.name
        assert found(near, near.name).name == near.name, "one finds oneself"
        name = far.name
    with TransferEngine(settings_of(metadata)) as near:
        if metadata == P2P:
            with pytest.raises(PeerLost, match="is it running"):
                near.open_name(name)
        else:
            assert near.open_name(name) is None, "a closed engine takes its entry back"


async def test_memory_registered_later_is_found(metadata: str) -> None:
    """A region is published before ``register`` returns; peers that opened the segment refresh it once."""
    with (
        TransferEngine(settings_of(metadata, name_for(metadata, "far"))) as far,
        TransferEngine(settings_of(metadata, metadata_cache_s=3600)) as near,
    ):
        far.publish()
        here = near.allocate(4096)
        segment = found(near, far.name)
        assert segment.descriptor.regions == []
        first = far.register(np.zeros(4096, dtype=np.uint8))
        assert near.run(Op.WRITE, segment, [here.address], [first.address], [10]).status == Status.OK
        with far.deferred_publication():
            second, third = far.allocate(4096), far.allocate(4096)
        for region in (second, third):
            done = await near.transfer(Op.WRITE, segment, [here.address], [region.address], [10])
            assert done.status == Status.OK
        assert near.open_name(far.name) is segment
        beyond = third.address + 4096 - 5
        assert near.run(Op.READ, segment, [here.address], [beyond], [10]).status == Status.ACCESS_DENIED
        far.unregister(first)
        denied = near.run(Op.READ, segment, [here.address], [first.address], [10])
        assert denied.status == Status.ACCESS_DENIED
        assert len(segment.descriptor.regions) == 2


def restarted(
    metadata: str, buffer: npt.NDArray[np.uint8], at: TransferEngine | None = None
) -> TransferEngine:
    """Start an engine that registers ``buffer``, ``at`` the ports of another, which is closed before."""
    ports = {"tcp_port": 0, "handshake_port": 0}
    if at is not None:
        ports = {
            "tcp_port": int(at.describe().endpoints["tcp"].rpartition(":")[2]),
            "handshake_port": int(at.handshake.rpartition(":")[2]),
        }
        at.close()
    engine = TransferEngine(settings_of(metadata, name_for(metadata, "far"), **ports))
    engine.register(buffer)
    engine.publish()
    return engine


async def test_a_restarted_peer_is_never_written_to_by_mistake(metadata: str) -> None:
    """A process restarts with the same name, ports and addresses: its memory is another's."""
    memory = np.zeros(4096, dtype=np.uint8)
    address = int(memory.ctypes.data)
    for way in ("run", "transfer", "submit", "write"):
        with TransferEngine(settings_of(metadata, metadata_cache_s=3600)) as near:
            here = near.allocate(4096)
            here.view()[:] = b"x" * 4096
            first = restarted(metadata, memory)
            name = first.name
            segment = found(near, name)
            assert near.run(Op.WRITE, segment, [here.address], [address], [16]).status == Status.OK
            second = restarted(metadata, memory, at=first)
            assert second.name == name
            memory[:] = 7
            columns = [here.address], [address], [4096]
            if way == "run":
                assert near.run(Op.WRITE, segment, *columns).status == Status.PEER_LOST
            elif way == "transfer":
                assert (await near.transfer(Op.WRITE, segment, *columns)).status == Status.PEER_LOST
            elif way == "write":
                with pytest.raises(PeerLost, match=r"write to .* was restarted.*open it again"):
                    await near.write(name, *columns)
            else:
                queue = near.new_queue()
                near.submit(queue, 1, Op.WRITE, segment, *columns)
                assert [done.status for done in queue.drain(timeout_s=60)] == [Status.PEER_LOST]
                assert not near.refresh(segment)
            assert "was restarted" in segment.reason and "open it again" in segment.reason
            assert near.run(Op.WRITE, segment, *columns).status == Status.PEER_LOST, "and it stays so"
            assert (memory == 7).all(), "bytes for the first process landed in the second one's memory"
            again = found(near, name)
            assert again is not segment
            assert near.run(Op.WRITE, again, *columns).status == Status.OK and (memory == ord("x")).all()
            second.close()


PEER = """
import sys
from mooncake.transfer import TransferEngine, TransferSettings
metadata, name, tcp, handshake = sys.argv[1:]
engine = TransferEngine(TransferSettings(
    name=name, metadata=metadata, tcp_port=int(tcp), handshake_port=int(handshake)))
region = engine.allocate(4096)
engine.publish()
print(engine.name, region.address, flush=True)
sys.stdin.read()
print(sum(region.view()), flush=True)
"""


class PeerProcess:
    def __init__(self, metadata: str, tcp: int, handshake: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, metadata, name_for(metadata, "far"), str(tcp), str(handshake)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert len(line) == 2, "the peer did not start"
        self.name, self.address = line[0], int(line[1])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def sum_of_its_bytes(self) -> int:
        return int(self.process.communicate(timeout=60)[0])


def test_a_killed_process_that_comes_back(metadata: str) -> None:
    kill_and_come_back(metadata, ("tcp",))


def test_a_killed_process_that_comes_back_in_shared_memory() -> None:
    kill_and_come_back(P2P, ("shm", "tcp"))


def kill_and_come_back(metadata: str, transports: tuple[str, ...]) -> None:
    tcp, handshake = free_port(), free_port()
    first = PeerProcess(metadata, tcp, handshake)
    settings = TransferSettings(metadata=metadata, transports=transports, metadata_cache_s=3600)
    with TransferEngine(settings) as near:
        here = near.allocate(4096)
        here.view()[:] = b"x" * 4096
        segment = found(near, first.name)
        assert near.run(Op.WRITE, segment, [here.address], [first.address], [4096]).status == Status.OK
        first.kill()

        def is_lost() -> bool:
            done = near.run(Op.WRITE, segment, [here.address], [first.address], [4096])
            assert done.status in (Status.PEER_LOST, Status.OK)  # a dead one's memory, while we have it
            return done.status == Status.PEER_LOST

        wait_until(is_lost, "noticing that the peer is gone")
        second = PeerProcess(metadata, tcp, handshake)
        try:
            for address in (first.address, second.address):
                done = near.run(Op.WRITE, segment, [here.address], [address], [4096])
                assert done.status == Status.PEER_LOST
            assert "was restarted" in segment.reason
            again = found(near, second.name)
            assert near.run(Op.WRITE, again, [here.address], [second.address], [16]).status == Status.OK
            assert second.sum_of_its_bytes() == 16 * ord("x")
        finally:
            second.kill()


def test_a_peer_that_is_gone(metadata: str) -> None:
    with TransferEngine(settings_of(metadata, metadata_cache_s=3600)) as near:
        far = TransferEngine(settings_of(metadata, name_for(metadata, "far")))
        region = far.allocate(4096)
        far.publish()
        here = near.allocate(4096)
        segment = found(near, far.name)
        far.close()
        done = near.run(Op.WRITE, segment, [here.address], [region.address], [16])
        assert done.status == Status.PEER_LOST
        assert segment.reason and not segment.is_replaced
        if metadata == P2P:
            with pytest.raises(PeerLost, match="is it running"):
                near.open_name(far.name)
        else:
            assert near.open_name(far.name) is None


def test_a_peer_of_another_version(metadata: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with TransferEngine(settings_of(metadata, name_for(metadata, "newer"))) as far:
        use_next_version(monkeypatch)
        if metadata != P2P:
            described = msgspec.structs.replace(far.describe(), version=VERSION + 1)
            make_backend(metadata).put(metadata_key("newer"), described.encode(), ttl_s=60)
        wanted = r"speaks version \d.* version \d; install the same release"
        with TransferEngine(settings_of(metadata)) as near, pytest.raises(ProtocolError, match=wanted):
            near.open_name(far.name)


# Names in a service --------------------------------------------------------------------------------


def test_a_service_that_restarts_empty_fills_again(server: MetadataServer) -> None:
    settings = settings_of(server.url, "far", metadata_ttl_s=2.0)
    with TransferEngine(settings) as far, TransferEngine(settings_of(server.url)) as near:
        far.allocate(4096)
        far.publish()
        segment = found(near, "far")
        server.stop()
        try:
            assert near.open_name("far") is segment, "a peer that is known needs no service"
            with pytest.raises(PeerLost):
                near.open_name("unknown")
            late = far.allocate(4096)  # cannot be published now, and does not fail
        finally:
            server.start()
        asker = make_backend(server.url, timeout_s=30)

        def is_back() -> bool:
            encoded = asker.get(metadata_key("far"))
            return encoded is not None and len(decode_descriptor(encoded).regions) == 2

        wait_until(is_back, "the descriptor to be put again")
        here = near.allocate(4096)
        assert near.run(Op.WRITE, segment, [here.address], [late.address], [9]).status == Status.OK
        asker.close()


def test_an_entry_outlives_its_ttl_and_not_its_process(servers: dict[str, MetadataServer]) -> None:
    """A descriptor is put again while its process lives; that of a killed one is gone a little later."""
    server = started("http", servers)
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER.replace("publish()", "publish(1.2)"), server.url, "mortal", "0", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    backend = make_backend(server.url, timeout_s=30)
    try:
        assert peer.stdout is not None and peer.stdout.readline()
        wait_until(lambda: backend.get(metadata_key("mortal")) is not None, "publishing")
        backend.put("marker", b"", ttl_s=2.5)
        wait_until(lambda: backend.get("marker") is None, "the time of more than one life to pass")
        wait_until(
            lambda: backend.get(metadata_key("mortal")) is not None, "being there after its first life", 20
        )
    finally:
        peer.kill()
        peer.communicate()
    wait_until(lambda: backend.get(metadata_key("mortal")) is None, "expiry")
    backend.close()


def test_an_engine_does_not_take_its_successors_entry_back(server: MetadataServer) -> None:
    first, second = (TransferEngine(settings_of(server.url, "one")) for _ in range(2))
    with TransferEngine(settings_of(server.url)) as near:
        first.publish()
        second.publish()
        first.close()
        assert found(near, "one").descriptor.epoch == second.epoch
        second.close()


def test_something_else_lies_under_a_name(server: MetadataServer, backend: Backend) -> None:
    backend.put(metadata_key("odd"), b'{"name": "odd", "protocol": "tcp", "buffers": []}')
    wanted = "the entry of odd is not a segment descriptor"
    with TransferEngine(settings_of(server.url)) as near, pytest.raises(ProtocolError, match=wanted):
        near.open_name("odd")


def test_clusters_do_not_see_each_other(server: MetadataServer, backend: Backend) -> None:
    with (
        TransferEngine(settings_of(server.url, "n", metadata_cluster="blue")) as blue,
        TransferEngine(settings_of(server.url, "n")) as plain,
    ):
        blue.publish()
        assert backend.list("mooncake/") == ["mooncake/blue/ram/n"]
        assert plain.open_name("n") is None
        plain.publish()
        assert found(blue, "n").descriptor.epoch == blue.epoch
        assert found(plain, "n").descriptor.epoch == plain.epoch
    assert backend.list("mooncake/") == []


# Without a service ---------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_names_are_addresses(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no ::1, so handshakes over IPv6 were NOT TESTED")
    settings = TransferSettings(metadata=P2P, listen_host=host, transports=("tcp",))
    with TransferEngine(settings) as far, TransferEngine(settings) as near:
        assert far.name == far.handshake and far.name.startswith("[::1]:" if host == "::1" else "127.0.0.1:")
        assert far.describe().endpoints["tcp"].startswith(far.name.rpartition(":")[0])
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = found(near, far.name)
        assert near.run(Op.WRITE, segment, [here.address], [pool.address], [9]).status == Status.OK
        near.notify(segment, "hello")
        assert [note.sender for note in far.notifications()] == [near.name]


def test_names_that_are_no_addresses() -> None:
    with TransferEngine(TransferSettings(metadata=P2P, transports=())) as engine:
        for name in ("", "node-1", "127.0.0.1", "127.0.0.1:http"):
            with pytest.raises(InvalidArgument, match="host:port of the peer's handshake"):
                engine.open_name(name)
        with pytest.raises(PeerLost, match="can't be reached"):
            engine.open_name("no such host:1")
    with TransferEngine(TransferSettings(transports=())) as engine:
        with pytest.raises(InvalidArgument, match="P2PHANDSHAKE or the URL"):
            engine.open_name("node-1")
        with pytest.raises(InvalidArgument, match="P2PHANDSHAKE or the URL"):
            engine.publish()
    with pytest.raises(MooncakeError, match="knows all names"):
        make_backend(P2P).list("")
