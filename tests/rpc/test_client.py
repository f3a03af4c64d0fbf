# SPDX-License-Identifier: Apache-2.0
"""The server and both clients over real sockets on loopback."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from mooncake.errors import (
    AddressInUse,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    OutOfMemory,
    PeerLost,
    ProtocolError,
)
from mooncake.rpc import AsyncClient, BlockingClient, Call, Connection, RpcServer
from mooncake.rpc.adaptive_spin import WINDOW_S
from mooncake.rpc.client import KEEPALIVE_IDLE_S, split_address
from mooncake.rpc.wire import OLD_PREFACE, OPEN_GREETING, FrameDecoder, encode
from mooncake.security import EVERYBODY, Access, Identity, SecuritySettings
from mooncake.security.keys import format_secret
from tests.waiting import until, wait_until


class Echo(msgspec.Struct, array_like=True, tag="echo"):
    text: str


class Hold(msgspec.Struct, array_like=True, tag="hold"):
    """Answered when the next Release comes."""


class Release(msgspec.Struct, array_like=True, tag="release"):
    pass


class Break(msgspec.Struct, array_like=True, tag="break"):
    how: str


class Unknown(msgspec.Struct, array_like=True, tag="unknown"):
    pass


class Service:
    """A server whose handlers answer at once, later, from a coroutine, or not at all."""

    def __init__(self, has_local_socket: bool = False) -> None:
        self.held: list[Call] = []
        self.lost: list[Connection] = []
        self.rpc = RpcServer(
            {Echo: self.echo, Hold: self.hold, Release: self.release, Break: self.break_},
            self.lost.append,
            has_local_socket=has_local_socket,
        )

    def echo(self, message: Echo, call: Call) -> Echo:
        return message

    def hold(self, message: Hold, call: Call) -> None:
        self.held.append(call)

    def release(self, message: Release, call: Call) -> Echo:
        for held in self.held:
            held.reply(Echo("held"))
        self.held.clear()
        return Echo("released")

    def break_(self, message: Break, call: Call) -> Awaitable[Echo] | None:
        if message.how == "memory":
            raise OutOfMemory("the pool is full")
        if message.how == "bug":
            raise KeyError("a bug")
        if message.how == "connection":
            call.connection.close()
            return None
        return self._slow()

    async def _slow(self) -> Echo:
        await asyncio.sleep(0)
        return Echo("slow")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc.port}"


@pytest.fixture(params=[False, True], ids=["tcp", "local socket"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    service = Service(has_local_socket=request.param)
    await service.rpc.start("127.0.0.1", 0)
    yield service
    await service.rpc.close()


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(service.address, [Echo], "the test's server")
    yield client
    await client.close()


async def test_answers_at_once_and_from_a_coroutine(client: AsyncClient) -> None:
    assert await client.call(Echo("hello"), 5) == Echo("hello")
    assert await client.call(Break("slow"), 5) == Echo("slow")


async def test_calls_are_pipelined_and_may_be_answered_out_of_order(
    client: AsyncClient, service: Service
) -> None:
    held = asyncio.create_task(client.call(Hold(), 5))
    await until(lambda: service.held)
    assert await client.call(Echo("overtakes"), 5) == Echo("overtakes")
    assert not held.done()
    await client.call(Release(), 5)
    assert await held == Echo("held")


async def test_a_message_whose_answer_is_not_awaited_breaks_no_connection() -> None:
    """Not when the server takes no more, either: other threads share the connection.

    Over a local socket, which takes such a message as a whole or not at all.
    """
    service = Service(has_local_socket=True)
    await service.rpc.start("127.0.0.1", 0)
    client = BlockingClient(service.address, [Echo])
    with pytest.raises(PeerLost, match="no connection"):
        client.post(Echo("unsent"), 5)
    await asyncio.to_thread(client.call, Echo("connects"), 5)
    connection = client._socket
    with pytest.raises(PeerLost, match="didn't take Echo"):
        while True:  # on the server's thread, which reads nothing meanwhile
            client.post(Echo("posted" * 20), 0.0)
    answer = await asyncio.to_thread(client.call, Echo("still connected"), 5)
    assert answer == Echo("still connected") and client._socket is connection
    client.close()
    with pytest.raises(PeerLost, match="no connection"):
        client.post(Echo("unsent"), 5)
    await service.rpc.close()


async def test_an_asyncio_message_whose_answer_is_not_awaited(service: Service, client: AsyncClient) -> None:
    with pytest.raises(PeerLost, match="no connection"):
        client.post(Hold())
    assert await client.call(Echo("connects"), 5) == Echo("connects")
    client.post(Hold())
    await until(lambda: service.held)
    assert await client.call(Release(), 5) == Echo("released")


async def test_a_call_may_have_any_time(service: Service) -> None:
    client = BlockingClient(service.address, [Echo])
    assert await asyncio.to_thread(client.call, Echo("in time"), 1e7) == Echo("in time")
    client.close()


async def test_a_large_message_passes(client: AsyncClient) -> None:
    text = "x" * (5 << 20)
    assert (await client.call(Echo(text), 10)).text == text


async def test_errors_of_the_handler_arrive_as_their_class(client: AsyncClient) -> None:
    with pytest.raises(OutOfMemory, match=r"the pool is full \(from the test's server at 127"):
        await client.call(Break("memory"), 5)
    with pytest.raises(MooncakeError, match="KeyError"):
        await client.call(Break("bug"), 5)
    with pytest.raises(ProtocolError, match="can't be decoded"):
        await client.call(Unknown(), 5)
    assert await client.call(Echo("still fine"), 5) == Echo("still fine")


async def test_no_answer_is_a_deadline_that_names_peer_and_operation(client: AsyncClient) -> None:
    await client.connect(10)  # the time is for the answer
    with pytest.raises(DeadlineExceeded, match=r"the test's server at 127.* didn't answer Hold"):
        await client.call(Hold(), 0.02)


async def test_a_lost_connection_fails_the_call_and_the_next_one_reconnects(
    client: AsyncClient, service: Service
) -> None:
    with pytest.raises(PeerLost, match="during Break"):
        await client.call(Break("connection"), 5)
    assert client.lost.is_set()
    assert await client.call(Echo("again"), 5) == Echo("again")
    await until(lambda: len(service.lost) == 1)


async def test_the_server_notices_a_client_that_leaves(client: AsyncClient, service: Service) -> None:
    await client.call(Echo("hello"), 5)
    await client.close()
    await until(lambda: len(service.lost) == 1)
    with pytest.raises(PeerLost, match="closed"):
        await client.call(Echo("late"), 5)


async def test_closing_while_connecting_is_a_loss_and_no_cancellation() -> None:
    client = AsyncClient("127.0.0.1:1", [Echo], "no server")
    calling = asyncio.create_task(client.call(Echo("x"), 5))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(PeerLost, match="closed"):
        await calling


async def test_a_caller_that_is_cancelled_does_not_stop_the_others(service: Service) -> None:
    client = AsyncClient(service.address, [Echo])
    first = asyncio.create_task(client.call(Echo("first"), 5))
    second = asyncio.create_task(client.call(Echo("second"), 5))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == Echo("second")
    assert first.cancelled()
    await client.close()


async def test_a_taken_port_is_named(service: Service) -> None:
    with pytest.raises(AddressInUse, match=str(service.rpc.port)):
        await RpcServer({}).start("127.0.0.1", service.rpc.port)


async def test_a_stranger_is_cut_off(service: Service) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.rpc.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_client_that_takes_no_answers_is_read_no_further(service: Service) -> None:
    """A client floods the server with echo requests and never reads; memory must stay bounded."""
    loop = asyncio.get_running_loop()
    sock = socket.create_connection(("127.0.0.1", service.rpc.port))
    sock.setblocking(False)
    frame = encode(1, Echo("x" * (1 << 20)))
    await loop.sock_sendall(sock, OPEN_GREETING)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            for _ in range(512):
                await loop.sock_sendall(sock, frame)
    sock.close()


async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection as version 2 does: no greeting, and nothing is said to others."""
    frames = FrameDecoder()
    if await reader.readexactly(len(OLD_PREFACE)) == OLD_PREFACE:
        while data := await reader.read(4096):
            for request_id, _ in frames.feed(data):
                writer.write(encode(request_id, Echo("old")))
    writer.close()


async def test_clients_reach_a_server_of_version_2_at_their_second_connection() -> None:
    server = await asyncio.start_server(old_server, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        first = AsyncClient(address, [Echo], is_patient=False)
        with pytest.raises(PeerLost):
            await first.call(Echo("new"), 5)
        await first.close()
        another = AsyncClient(address, [Echo])  # as a node does, whose clients live for one connection
        assert await another.call(Echo("new"), 5) == Echo("old")
        await another.close()
        blocking = BlockingClient(address, [Echo])
        assert await asyncio.to_thread(blocking.call, Echo("new"), 5) == Echo("old")
        blocking.close()


async def test_a_server_serves_clients_of_version_2_where_no_key_is_required(
    service: Service, tmp_path: Path
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.rpc.port)
    writer.write(OLD_PREFACE + encode(7, Echo("old")))
    ((request_id, body),) = FrameDecoder().feed(await reader.read(4096))
    assert request_id == 7 and msgspec.msgpack.decode(body, type=Echo) == Echo("old")
    writer.close()
    identity = with_key(tmp_path)
    keyed = RpcServer({Echo: service.echo}, access=Access({Echo: EVERYBODY}), identity=identity)
    await keyed.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", keyed.port)
    writer.write(OLD_PREFACE + encode(7, Echo("old")))
    answered = await reader.read()
    assert b"not authenticated" in answered and b"old" not in answered
    writer.close()
    await keyed.close()


async def test_blocking_calls_from_many_threads_share_a_connection(service: Service) -> None:
    client = BlockingClient(service.address, [Echo], "the test's server")

    def work(thread: int) -> list[str]:
        return [client.call(Echo(f"{thread}.{i}"), 10).text for i in range(50)]

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(8) as pool:
        results = await asyncio.gather(*(loop.run_in_executor(pool, work, n) for n in range(8)))
    assert results == [[f"{n}.{i}" for i in range(50)] for n in range(8)]
    assert len(service.rpc.connections) == 1
    client.close()


async def test_spins_for_large_requests_do_not_decide_about_small_ones(service: Service) -> None:
    client = BlockingClient(service.address, [Echo], "the test's server")
    for text in ("small", "large" * 1000):
        await asyncio.to_thread(client.call, Echo(text), 10)
    small, large = (client._spins[kind] for kind in sorted(client._spins, key=lambda kind: kind[1]))
    while large.is_worthwhile:
        large.spun(WINDOW_S, wasted_s=1.0)
    assert small.is_worthwhile
    client.close()


async def test_a_blocked_thread_does_not_block_the_others(service: Service) -> None:
    client = BlockingClient(service.address, [Echo])
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        held = loop.run_in_executor(pool, client.call, Hold(), 10)
        await until(lambda: service.held)
        echo = await loop.run_in_executor(pool, client.call, Echo("overtakes"), 10)
        assert echo == Echo("overtakes")
        await loop.run_in_executor(pool, client.call, Release(), 10)
        assert await held == Echo("held")
    client.close()


async def test_blocking_deadlines_and_losses(service: Service) -> None:
    client = BlockingClient(service.address, [Echo], "the test's server")
    assert await asyncio.to_thread(client.call, Echo("connected"), 10) == Echo("connected")
    with pytest.raises(DeadlineExceeded, match="didn't answer Hold"):
        await asyncio.to_thread(client.call, Hold(), 0.02)
    with pytest.raises(PeerLost, match="during Break"):
        await asyncio.to_thread(client.call, Break("connection"), 5)
    assert await asyncio.to_thread(client.call, Echo("again"), 5) == Echo("again")
    with pytest.raises(OutOfMemory):
        await asyncio.to_thread(client.call, Break("memory"), 5)
    await service.rpc.close()
    with pytest.raises((PeerLost, DeadlineExceeded)):
        await asyncio.to_thread(client.call, Echo("too late"), 0.05)
    client.close()


async def test_a_loss_reaches_every_waiting_thread(service: Service) -> None:
    client = BlockingClient(service.address, [Echo])
    errors: list[Exception] = []

    def work() -> None:
        try:
            client.call(Hold(), 10)
        except PeerLost as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    await until(lambda: len(service.held) == 4)
    for connection in list(service.rpc.connections):
        connection.close()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert len(errors) == 4
    client.close()


async def test_a_connection_that_ends_leaves_no_open_socket(service: Service) -> None:
    """Else each one is a ResourceWarning when the garbage collector finds it."""
    client = BlockingClient(service.address, [Echo], "the test's server")
    await asyncio.to_thread(client.call, Echo("connected"), 10)
    lost = client._socket
    with pytest.raises(PeerLost):
        await asyncio.to_thread(client.call, Break("connection"), 10)
    await asyncio.to_thread(client.call, Echo("again"), 10)
    closed = client._socket
    assert lost is not None and closed is not None and closed is not lost
    assert lost.sock.fileno() == -1 and closed.sock.fileno() >= 0
    client.close()
    assert closed.sock.fileno() == -1
    with pytest.raises(PeerLost):
        await asyncio.to_thread(client.call, Echo("late"), 10)


async def test_the_last_of_the_waiting_calls_closes_the_socket(service: Service) -> None:
    client = BlockingClient(service.address, [Echo], "the test's server")
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        calls = [loop.run_in_executor(pool, client.call, Hold(), 10) for _ in range(2)]
        await until(lambda: len(service.held) == 2)
        connection = client._socket
        assert connection is not None and len(connection.waiting) == 2
        client.close()
        for call in calls:
            with pytest.raises(PeerLost):
                await call
    assert connection.sock.fileno() == -1


class Interrupt(BaseException):
    """As a handler of a signal may raise it."""


@pytest.mark.parametrize("method", ["_send", "_read_until", "_await_reply", "_hand_over"])
async def test_an_interrupted_call_leaves_no_other_without_a_reader(
    service: Service, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    client = BlockingClient(service.address, [Echo], "the test's server")
    assert await asyncio.to_thread(client.call, Echo("before"), 10) == Echo("before")

    def interrupted(*_: object) -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(client, method, interrupted)
        with pytest.raises(Interrupt):
            await asyncio.to_thread(client.call, Echo("interrupted"), 10)
    assert await asyncio.to_thread(client.call, Echo("after"), 10) == Echo("after")
    client.close()


def test_no_process_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(DeadlineExceeded, match=f"{port} can't be reached within .* s: Connection refused"):
        BlockingClient(f"127.0.0.1:{port}", [Echo]).call(Echo("x"), 0.05)


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".a", "\udc80x"], ids=ascii)
async def test_a_name_that_no_host_can_have_is_an_unreachable_peer(host: str) -> None:
    blocking = BlockingClient(f"{host}:80", [Echo], is_patient=False)
    client = AsyncClient(f"{host}:80", [Echo], is_patient=False)
    with pytest.raises(PeerLost, match=r"can't be reached: .*codec.*; is it running") as lost:
        await asyncio.to_thread(blocking.call, Echo("x"), 60)
    assert str(lost.value).encode(), "it can be logged"
    with pytest.raises(PeerLost, match=r"can't be reached: .*codec.*; is it running") as lost:
        await client.call(Echo("x"), 60)
    assert str(lost.value).encode()
    with pytest.raises(DeadlineExceeded, match=r"within .* s: .*codec"):
        await asyncio.to_thread(BlockingClient(f"{host}:80", [Echo]).call, Echo("x"), 0.05)
    patient = AsyncClient(f"{host}:80", [Echo])
    with pytest.raises(DeadlineExceeded, match=r"within .* s: .*codec"):
        await patient.call(Echo("x"), 0.2)
    await patient.close()
    with pytest.raises(InvalidArgument, match="one to listen on"):
        await RpcServer({}).start(host, 0)


@pytest.mark.parametrize("address", ["localhost", "host:", ":80", "host:http", "host:70000", "host:0"])
def test_a_bad_address_is_named(address: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        split_address(address)


def test_good_addresses() -> None:
    assert split_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert split_address("[::1]:80") == ("::1", 80)


class Deaf:
    """A peer that accepts connections and reads nothing until the test does."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(10.0)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"

    def accepted(self) -> socket.socket:
        """The next connection; raises TimeoutError when none comes."""
        connection, _ = self._listening.accept()
        connection.settimeout(10.0)
        return connection

    def close(self) -> None:
        self._listening.close()


def test_a_request_that_went_out_in_part_is_the_last_on_its_connection() -> None:
    """Half a frame is on the wire: whatever followed would be read as the rest of it."""
    peer = Deaf()
    client = BlockingClient(peer.address, [Echo], "a deaf peer")
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(client.call, Echo("x" * (32 << 20)), 1.0)
        with peer.accepted() as first:
            with pytest.raises(DeadlineExceeded, match="didn't answer Echo"):
                large.result(30)
            assert client.is_cut_off
            small = pool.submit(client.call, Echo("small"), 5.0)
            with peer.accepted():  # the next call is on a connection of its own
                num_bytes = 0
                while data := first.recv(1 << 20):
                    num_bytes += len(data)
            assert 0 < num_bytes < 32 << 20, "the first connection ended in the middle of the frame"
        with pytest.raises(PeerLost):
            small.result(30)
    client.close()
    peer.close()


async def test_unanswered_calls_leave_nothing_behind(client: AsyncClient) -> None:
    """A peer that is there and does not answer may be called for hours."""

    def num_futures() -> int:
        gc.collect()
        return sum(type(one) is asyncio.Future for one in gc.get_objects())

    await client.connect(10)
    before = num_futures()
    for _ in range(50):
        with pytest.raises(DeadlineExceeded):
            await client.call(Hold(), 0.001)
    assert num_futures() < before + 10
    assert await client.call(Echo("still fine"), 10) == Echo("still fine")


DOUBLING_S = [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]


async def test_attempts_to_connect_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand clients of a master that is away must not ask for connections all the time."""
    waited_s: list[float] = []
    really = asyncio.sleep

    async def wait(seconds: float) -> None:
        waited_s.append(seconds)
        await really(0)

    monkeypatch.setattr("mooncake.rpc.client.asyncio.sleep", wait)
    client = AsyncClient("127.0.0.1:1", [Echo], "no server")
    connecting = asyncio.create_task(client.connect(30))
    async with asyncio.timeout(20):
        while len(waited_s) < len(DOUBLING_S):
            await really(0.001)
    await client.close()
    with pytest.raises(PeerLost, match="closed"):
        await connecting
    assert waited_s[: len(DOUBLING_S)] == pytest.approx(DOUBLING_S)


def test_attempts_of_threads_to_connect_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s: list[float] = []
    client = BlockingClient("127.0.0.1:1", [Echo], "no server")

    def wait(seconds: float) -> None:
        waited_s.append(seconds)
        if len(waited_s) == len(DOUBLING_S):
            client.close()

    monkeypatch.setattr("mooncake.rpc.client.time.sleep", wait)
    with pytest.raises(PeerLost, match="closed"):
        client.call(Echo("x"), 60.0)
    assert waited_s == pytest.approx(DOUBLING_S)


def test_a_call_waits_for_no_other_threads_connecting_beyond_its_deadline() -> None:
    client = BlockingClient("127.0.0.1:1", [Echo], "no server")
    with ThreadPoolExecutor(1) as pool:
        patient = pool.submit(client.call, Echo("patient"), 30.0)
        wait_until(client._connect_lock.locked)
        with pytest.raises(DeadlineExceeded, match=r"can't be reached within 0\.01 s"):
            client.call(Echo("urgent"), 0.01)
        assert not patient.done()
        client.close()
        with pytest.raises(PeerLost, match="closed"):
            patient.result(60)


def test_a_call_waits_for_no_other_threads_sending_beyond_its_deadline() -> None:
    peer = Deaf()
    client = BlockingClient(peer.address, [Echo], "a deaf peer")
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(client.call, Echo("x" * (32 << 20)), 30.0)
        with peer.accepted():
            wait_until(lambda: client._socket is not None and client._socket.send_lock.locked())
            with pytest.raises(DeadlineExceeded, match=r"didn't answer Echo within 0\.01 s"):
                client.call(Echo("small"), 0.01)
            assert not large.done() and not client.is_cut_off, "nothing of the small one was sent"
        with pytest.raises(PeerLost):
            large.result(60)
    client.close()
    peer.close()


def with_key(folder: Path) -> Identity:
    path = folder / "key"
    path.write_text(format_secret(b"s" * 32))
    path.chmod(0o600)
    return Identity(SecuritySettings(cluster_key_file=str(path)))


async def test_a_host_that_fails_during_the_greeting_is_left(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays, and nothing ever comes over it."""
    monkeypatch.setattr("mooncake.rpc.client.ATTEMPT_S", 0.05)
    identity = with_key(tmp_path)
    failed = Deaf()
    client = AsyncClient(failed.address, [Echo], "the server", identity=identity)
    calling = asyncio.create_task(client.call(Echo("x"), 60))
    connection = await asyncio.to_thread(failed.accepted)
    failed.close()
    again = RpcServer({Echo: service.echo}, access=Access({Echo: EVERYBODY}), identity=identity)
    await again.start("127.0.0.1", int(failed.address.rpartition(":")[2]))
    assert await calling == Echo("x")
    await client.close()
    hasty = AsyncClient(failed.address, [Echo], "the server", identity=identity, is_patient=False)
    await again.close()
    silent = socket.create_server(("127.0.0.1", int(failed.address.rpartition(":")[2])))
    with pytest.raises(PeerLost, match="did not complete the greeting within"):
        await hasty.call(Echo("x"), 60)
    await hasty.close()
    silent.close()
    connection.close()


async def test_both_sides_notice_a_host_that_has_failed(client: AsyncClient, service: Service) -> None:
    """The kernel asks it, so that a connection without traffic ends after a minute."""
    blocking = BlockingClient(service.address, [Echo])
    assert await client.call(Echo("x"), 60) == await asyncio.to_thread(blocking.call, Echo("x"), 60)
    assert client._wire is not None and client._wire.transport is not None
    assert blocking._socket is not None
    served = [one._transport for one in service.rpc.connections]
    watched = [one.get_extra_info("socket") for one in (client._wire.transport, *served) if one is not None]
    assert len(watched) == 3
    for sock in (*watched, blocking._socket.sock):
        is_watched = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert is_watched == (sock.family != socket.AF_UNIX)
        if is_watched:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_IDLE_S
    blocking.close()
