# SPDX-License-Identifier: Apache-2.0
"""The server's side of the wire, spoken to byte by byte (``native/wire.h``)."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mooncake.errors import InvalidArgument, Unavailable
from mooncake.transfer import (
    Op,
    Region,
    RegionInfo,
    SegmentDescriptor,
    Status,
    TransferEngine,
    TransferSettings,
)
from mooncake.transfer.transports.tcp import TcpTransport

MAGIC = 0x434B4F4D
WRITE, READ, REPLY, FENCE = 1, 2, 3, 4


HELLO_BYTES = 24


def hello(epoch: int, version: int = 2, lane: int = 0) -> bytes:
    return struct.pack("<IBBHQQ", MAGIC, version, 0, 0, epoch, lane)


def frame(
    kind: int, slices: list[tuple[int, int, int]], number: int = 1, payload: int | None = None
) -> bytes:
    total = sum(length for _, length, _ in slices) if payload is None else payload
    head = struct.pack("<IBBHIIQQ", MAGIC, kind, 0, 0, len(slices), 0, number, total)
    return head + b"".join(struct.pack("<QQQ", *part) for part in slices)


class Wire:
    """A connection whose greeting is done."""

    def __init__(self, engine: TransferEngine, greeting: bytes | None = None) -> None:
        host, port = engine.describe().endpoints["tcp"].split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.send(hello(engine.epoch) if greeting is None else greeting)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            part = self.socket.recv(size - len(received))
            if not part:
                break
            received += part
        return received

    def reply(self) -> tuple[int, int, int, int]:
        """(status, failed slice, number, payload bytes)"""
        magic, kind, status, zero, _, failed, number, payload = struct.unpack("<IBBHIIQQ", self.receive(32))
        assert (magic, kind, zero) == (MAGIC, REPLY, 0)
        return status, failed, number, payload

    def is_gone(self) -> bool:
        """Whether the server has closed; unread bytes before that are ignored."""
        state: int = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state != 1  # TCP_ESTABLISHED

    def is_closed(self) -> bool:
        try:
            return self.receive(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(transports=("tcp",))) as engine:
        yield engine


@pytest.fixture
def pool(engine: TransferEngine) -> Region:
    return engine.allocate(8192)


def test_a_conversation_in_small_pieces(engine: TransferEngine, pool: Region) -> None:
    wire = Wire(engine)
    assert wire.receive(HELLO_BYTES) == hello(engine.epoch)
    request = frame(WRITE, [(pool.address, 3, pool.key), (pool.address + 100, 2, pool.key)], 7) + b"abcde"
    request += frame(READ, [(pool.address, 4, pool.key), (pool.address + 100, 2, pool.key)], 8)
    for at in range(len(request)):
        wire.send(request[at : at + 1])
    assert wire.reply() == (Status.OK, 0, 7, 0)
    assert wire.reply() == (Status.OK, 0, 8, 6)
    assert wire.receive(6) == b"abc\0de"
    assert bytes(pool.view()[:4]) == b"abc\0" and bytes(pool.view()[100:102]) == b"de"
    wire.socket.close()


def test_a_refusal_keeps_the_connection(engine: TransferEngine, pool: Region) -> None:
    wire = Wire(engine)
    wire.receive(HELLO_BYTES)
    good = (pool.address, 4, pool.key)
    for bad in (
        (pool.address, 4, pool.key ^ 1),
        (pool.address + 8190, 4, pool.key),
        (pool.address - 1, 4, pool.key),
    ):
        wire.send(frame(WRITE, [good, bad], 3) + b"12345678")
        assert wire.reply() == (Status.ACCESS_DENIED, 1, 3, 0)
        wire.send(frame(READ, [good, bad, good], 4))
        assert wire.reply() == (Status.ACCESS_DENIED, 1, 4, 0)
    assert not any(pool.view()), "a refused frame moves nothing"
    wire.send(frame(WRITE, [good], 5) + b"1234")
    assert wire.reply() == (Status.OK, 0, 5, 0)
    wire.socket.close()


@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda pool: b"\0" * 64,
        lambda pool: frame(REPLY, [(pool.address, 1, pool.key)]),
        lambda pool: frame(9, [(pool.address, 1, pool.key)]),
        lambda pool: frame(WRITE, []),
        lambda pool: frame(FENCE, [(1, 1, 0)]),
        lambda pool: frame(FENCE, [(1, 0, 0)], payload=1),
        lambda pool: frame(WRITE, [(pool.address, 0, pool.key)]),
        lambda pool: frame(WRITE, [(pool.address, 5, pool.key)], payload=4),
        lambda pool: frame(READ, [(pool.address, 5, pool.key)], payload=6),
        lambda pool: frame(READ, [(2**64 - 1, 5, pool.key)]),
        lambda pool: frame(READ, [(pool.address, (64 << 20) + 1, pool.key)]),
        lambda pool: frame(READ, [(pool.address, 2**64 - 1, 1), (pool.address, 2, 1)], payload=1),
        lambda pool: frame(READ, [(pool.address, 1, pool.key)] * 1025),
    ],
)  # fmt: skip
def test_nonsense_ends_the_connection(engine: TransferEngine, pool: Region, bytes_of) -> None:  # type: ignore[no-untyped-def]
    wire = Wire(engine)
    wire.receive(HELLO_BYTES)
    wire.send(bytes_of(pool))
    assert wire.is_closed()
    assert Wire(engine).receive(HELLO_BYTES) == hello(engine.epoch), "the next one is served"


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 16])
def test_another_protocol_is_not_answered(engine: TransferEngine, greeting: bytes) -> None:
    assert Wire(engine, greeting).is_closed()


OTHER_VERSION, WANTS_TLS, HAS_NO_TLS = 2, 3, 4


@pytest.mark.parametrize(
    ("greeting", "refusal"),
    [
        (hello(1, version=1)[:16], OTHER_VERSION),
        (hello(1, version=3), OTHER_VERSION),
        (b"\x16\x03\x01\x02\x00", HAS_NO_TLS),
    ],
)
def test_a_nearly_right_greeting_gets_the_reason(
    engine: TransferEngine, greeting: bytes, refusal: int
) -> None:
    wire = Wire(engine, greeting)
    answer = struct.unpack("<IBBHQQ", wire.receive(HELLO_BYTES))
    assert answer == (MAGIC, 2, refusal, 0, 0, 0)
    assert wire.is_closed(), "from the server's side"
    wire.socket.close()


def test_a_fence_cuts_what_was_given_up(engine: TransferEngine, pool: Region) -> None:
    given_up, later = Wire(engine, hello(engine.epoch, lane=11)), Wire(engine, hello(engine.epoch, lane=12))
    for wire in (given_up, later):
        wire.receive(HELLO_BYTES)
    given_up.send(frame(WRITE, [(pool.address, 8, pool.key)]) + b"1234")
    later.send(frame(FENCE, [(11, 0, 0), (13, 0, 0)], 5))
    assert later.reply() == (Status.OK, 0, 5, 0)
    given_up.send(b"5678")
    assert given_up.is_closed()
    assert bytes(pool.view()[4:8]) == bytes(4)
    later.send(frame(WRITE, [(pool.address, 2, pool.key)], 6) + b"ok")
    assert later.reply() == (Status.OK, 0, 6, 0)
    later.socket.close()


def test_a_stranger_learns_nothing(engine: TransferEngine) -> None:
    wire = Wire(engine, hello(77))
    _, _, status, _, epoch, _ = struct.unpack("<IBBHQQ", wire.receive(HELLO_BYTES))
    assert status == Status.PEER_LOST and epoch == 77
    wire.socket.close()


def test_a_silent_client_is_disconnected() -> None:
    with TransferEngine(TransferSettings(transports=("tcp",), greeting_timeout_s=0.5)) as engine:
        greeted = Wire(engine)
        greeted.receive(HELLO_BYTES)
        for beginning in (b"", hello(engine.epoch)[:23]):
            assert Wire(engine, beginning).is_closed()
        greeted.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            greeted.receive(1)  # an idle connection that has said hello stays
        greeted.socket.close()


@pytest.fixture
def strict() -> Iterator[TransferEngine]:
    """An engine that soon disconnects clients that stall."""
    with TransferEngine(TransferSettings(transports=("tcp",), stall_timeout_s=0.2)) as engine:
        yield engine


def stalls(pool: Region) -> dict[str, bytes]:
    """Requests that stop part-way, by name."""
    write = frame(WRITE, [(pool.address, 4096, pool.key)])
    refused = frame(WRITE, [(pool.address, 4096, 1)])
    return {
        "a byte of a frame": write[:1],
        "half a frame": write[:20],
        "half a table": write[:40],
        "no payload": write,
        "half a payload": write + bytes(2000),
        "half of what is refused": refused + bytes(100),
        "a whole one and a half": write + bytes(4096) + write + bytes(17),
    }


def test_half_a_frame_does_not_stay(strict: TransferEngine) -> None:
    pool, resting = strict.allocate(8192), Wire(strict)
    resting.receive(HELLO_BYTES)
    stalled = {}
    for name, sent in stalls(pool).items():
        wire = stalled[name] = Wire(strict)
        wire.receive(HELLO_BYTES)
        wire.send(sent)
    stalled["a whole one and a half"].reply()
    for name, wire in stalled.items():
        assert wire.is_closed(), name
    resting.send(frame(READ, [(pool.address, 4, pool.key)], 9))
    assert resting.reply() == (Status.OK, 0, 9, 4), "a client that rests between frames stays"
    resting.socket.close()


def test_a_byte_now_and_then_does_not_help(strict: TransferEngine) -> None:
    """A frame has one time for all of it, so none holds a region forever."""
    pool = strict.allocate(1 << 20, huge_pages=False)
    slow = Wire(strict)
    slow.receive(HELLO_BYTES)
    slow.send(frame(WRITE, [(pool.address, 1 << 20, pool.key)]))
    deadline = time.monotonic() + 60
    while not slow.is_gone():
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            slow.send(b"x")
        time.sleep(0.02)
    slow.socket.close()


def test_a_peer_that_takes_no_replies_is_cut_off(strict: TransferEngine) -> None:
    pool = strict.allocate(1 << 20, huge_pages=False)
    deaf = Wire(strict)
    deaf.receive(HELLO_BYTES)
    for number in range(30):
        deaf.send(frame(READ, [(pool.address, 1 << 20, pool.key)], number))
    deadline = time.monotonic() + 60
    while not deaf.is_gone():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    deaf.socket.close()


def test_closing_a_region_does_not_wait_for_a_stalled_peer(engine: TransferEngine) -> None:
    """It returns long before the peer is cut off."""
    pool = engine.allocate(8192)
    stalled = [Wire(engine) for _ in range(3)]
    for wire, sent in zip(stalled, list(stalls(pool).values())[3:6], strict=True):
        wire.receive(HELLO_BYTES)
        wire.send(sent)
    address, key = pool.address, pool.key
    engine.unregister(pool)
    probe = Wire(engine)
    probe.receive(HELLO_BYTES)
    probe.send(frame(READ, [(address, 1, key)], 2))
    assert probe.reply()[0] == Status.ACCESS_DENIED
    for wire in [*stalled, probe]:
        wire.socket.close()


def test_a_thousand_idle_strangers() -> None:
    """They take no threads, and being many, soon make room for clients that greet."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    small = TransferSettings(transports=("tcp",), max_connections=100, greeting_timeout_s=1)
    with TransferEngine(small) as far:
        pool = far.allocate(4096)
        with TransferEngine(TransferSettings(transports=("tcp",))) as near:
            here, segment = near.allocate(4096), near.open(far.describe())
            num_threads = len(os.listdir("/proc/self/task"))
            silent = [Wire(far, b"") for _ in range(min(1000, room - 300))]
            assert len(os.listdir("/proc/self/task")) == num_threads
            deadline = time.monotonic() + 60
            while near.run(Op.WRITE, segment, [here.address], [pool.address], [99]).status != Status.OK:
                assert time.monotonic() < deadline
            for wire in silent:
                assert wire.is_closed()
                wire.socket.close()


@pytest.mark.parametrize("transports", [("tcp",), TransferSettings.transports], ids=["tcp", "all"])
def test_an_engine_without_descriptors_says_so(transports: tuple[str, ...]) -> None:
    """It is not made without tcp instead, nor with a server that does not serve."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)
    TransferEngine(TransferSettings(transports=transports)).close()  # what is loaded only once is loaded
    refusals: list[str] = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as filled:  # unused numbers below used ones would count as free
        while (unused := os.dup(0)) <= highest:
            filled.callback(os.close, unused)
        os.close(unused)
        for num_free in range(16):
            resource.setrlimit(resource.RLIMIT_NOFILE, (unused + num_free, room[1]))
            try:
                TransferEngine(TransferSettings(transports=transports, num_streams=1)).close()
                break
            except Unavailable as error:
                refusals.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, room)
    steps = ("socket", "eventfd", "epoll_create")
    assert all(any(step in refusal for refusal in refusals) for step in steps), refusals
    assert all("ulimit -n" in refusal for refusal in refusals)
    assert not TransferSettings().may_lack("tcp") and TransferSettings().may_lack("cuda")


def test_idle_peers_are_as_many_as_the_limit(engine: TransferEngine) -> None:
    with TransferEngine(TransferSettings(transports=("tcp",), max_connections=8)) as small:
        peers = [Wire(small) for _ in range(8)]
        for wire in peers:
            assert wire.receive(HELLO_BYTES) == hello(small.epoch)
        with contextlib.suppress(OSError):
            assert Wire(small).is_closed()
        peers.pop().socket.close()
        deadline = time.monotonic() + 60
        is_in = False
        while not is_in:
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):  # refused ones are reset
                is_in = Wire(small).receive(HELLO_BYTES) == hello(small.epoch)
        for wire in peers:
            wire.socket.close()


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (
            hello(7, version=3),
            Status.PROTOCOL_ERROR,
            "the peer speaks version 3 .* and we 2; install the same",
        ),
        (
            hello(7, version=1)[:16],
            Status.PROTOCOL_ERROR,
            "the peer speaks version 1 .* and we 2; install the same",
        ),
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            Status.PROTOCOL_ERROR,
            "something other than a transfer engine",
        ),
        (
            struct.pack("<IBBHQQ", MAGIC, 2, 9, 0, 7, 0),
            Status.PROTOCOL_ERROR,
            r"unknown to this version \(9\)",
        ),
        (
            struct.pack("<IBBHQQ", MAGIC, 2, 1, 0, 7, 0),
            Status.PEER_LOST,
            "open the peer's current descriptor",
        ),
        (b"", Status.PEER_LOST, "closed the connection during the greeting"),
    ],
    ids=["newer", "older", "not one of us", "a refusal of the future", "restarted", "silent"],
)
def test_what_is_said_of_an_odd_server(
    engine: TransferEngine, answer: bytes, status: Status, reason: str
) -> None:
    """It fails at once, long before the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            opened, _ = listener.accept()
            with opened, contextlib.suppress(OSError):  # the client may be gone at any moment
                opened.sendall(answer)
                opened.shutdown(socket.SHUT_WR)
                while opened.recv(1000):
                    continue

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        here = engine.allocate(4096)
        port = listener.getsockname()[1]
        region = RegionInfo(4096, 4096, 3, False)
        peer = SegmentDescriptor("odd", "elsewhere", 7, {"tcp": f"127.0.0.1:{port}"}, [region])
        done = engine.run(Op.READ, engine.open(peer), [here.address], [4096], [9], timeout_s=200)
        assert done.status == status
        assert re.search(reason, done.reason), done.reason
        server.join(30)


TWO_ADDRESSES = TransferSettings(transports=("tcp",), listen_host="127.0.0.1,127.0.0.2")


def test_several_addresses_are_several_rails() -> None:
    with TransferEngine(TWO_ADDRESSES) as far, TransferEngine(TWO_ADDRESSES) as near:
        segment = near.open(far.describe())
        assert segment.paths == ("tcp@127.0.0.1>127.0.0.1", "tcp@127.0.0.2>127.0.0.2")
        assert far.describe().endpoints["tcp"].count(",") == 1
    with TransferEngine(TWO_ADDRESSES) as far, TransferEngine(TransferSettings(transports=("tcp",))) as near:
        segment = near.open(far.describe())
        assert segment.paths == ("tcp@127.0.0.1>127.0.0.1", "tcp@127.0.0.1>127.0.0.2")
        assert far.open(near.describe()).paths == ("tcp@127.0.0.1>127.0.0.1", "tcp@127.0.0.2>127.0.0.1")


def test_a_rail_to_another_host_does_not_begin_at_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel refuses that; so it chooses the source, as it does for a peer with a single address. Names
    of peers are not looked up for that, because other threads wait until the segment is opened."""
    with TransferEngine(TransferSettings(transports=("tcp",))) as near:
        transport = near._transports["tcp"]
        assert isinstance(transport, TcpTransport)
        assert transport.rails("10.0.0.1:7,10.0.1.1:7") == ["*>10.0.0.1", "*>10.0.1.1"]
        monkeypatch.setattr(socket, "getaddrinfo", None)
        assert transport.rails("node-7:7,127.0.0.3:7") == ["*>node-7", "127.0.0.1>127.0.0.3"]


@pytest.mark.parametrize("rail", [0, 1])
def test_each_rail_leads_there(rail: int) -> None:
    with TransferEngine(TWO_ADDRESSES) as far, TransferEngine(TWO_ADDRESSES) as near:
        pool, here = far.allocate(4096), near.allocate(4096)
        here.view()[:] = b"r" * 4096
        segment = near.open(far.describe())
        connection = segment.connection(segment.paths[rail], 10)
        assert connection is not None
        columns = [np.array([value], dtype=np.uint64) for value in (here.address, pool.address, 4096)]
        done = connection.run(Op.WRITE, columns[0], columns[1], columns[2], 10, False)
        assert done.status == Status.OK and bytes(pool.view()) == b"r" * 4096


def test_a_name_that_only_here_leads_to_loopback_is_published_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the own name of a host in Debian's table of hosts; other hosts would connect to themselves."""
    resolve = socket.getaddrinfo
    addresses = {"node-1": "127.0.1.1", "node-2": "192.0.2.1", "localhost.localdomain": "127.0.0.1"}

    def lookup(host: str, *arguments: Any, **options: Any) -> Any:
        return resolve(addresses.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    published = {}
    for name in ("node-1", "node-2", "localhost", "localhost.localdomain", "127.0.0.1", "[::1]"):
        settings = TransferSettings(transports=("tcp",), listen_host="0.0.0.0", advertise_host=name)
        with TransferEngine(settings) as far, TransferEngine(TransferSettings(transports=("tcp",))) as near:
            published[name] = far.describe().endpoints["tcp"].rpartition(":")[0]
            pool, here = far.allocate(4096), near.allocate(4096)
            if name == "node-1":
                done = near.run(Op.WRITE, near.open(far.describe()), [here.address], [pool.address], [4096])
                assert done.status == Status.OK
    assert published == {
        "node-1": "node-1",
        "node-2": "192.0.2.1",
        "localhost": published["localhost"],
        "localhost.localdomain": "127.0.0.1",
        "127.0.0.1": "127.0.0.1",
        "[::1]": "[::1]",
    }
    assert published["localhost"] in ("127.0.0.1", "[::1]")


@pytest.mark.parametrize(
    ("listen", "advertise", "names"),
    [
        ("127.0.0.1,192.0.2.7", "", "listen_host"),
        ("127.0.0.1,127.0.0.2", "127.0.0.1", "advertise_host"),
        ("127.0.0.1,", "", "listen_host"),
    ],
)
def test_bad_lists_of_addresses(listen: str, advertise: str, names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        TransferEngine(
            TransferSettings(transports=("tcp",), listen_host=listen, advertise_host=advertise or listen)
        )
