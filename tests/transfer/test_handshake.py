# SPDX-License-Identifier: Apache-2.0
"""Messages between engines: descriptors, probes, notifications, connection set-up; and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mooncake.errors import (
    AccessDenied,
    AddressInUse,
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
    ProtocolError,
    Unavailable,
)
from mooncake.rpc import BlockingClient
from mooncake.security import NODES_AND_ADMINS, Identity, Role, SecuritySettings
from mooncake.security.keys import format_secret
from mooncake.transfer import Op, Status, TransferEngine, TransferSettings
from mooncake.transfer import handshake as messages
from mooncake.transfer.descriptor import VERSION, decode_descriptor
from mooncake.transfer.handshake import MAX_PAYLOAD_BYTES, HandshakeClient


@pytest.fixture
def near() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(name="near")) as engine:
        yield engine


@pytest.fixture
def far() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(name="far", handshake_port=0)) as engine:
        yield engine


@pytest.fixture
def client() -> Iterator[HandshakeClient]:
    client = HandshakeClient()
    yield client
    client.close()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mooncake")]


def test_no_engine_listens_unless_requested(near: TransferEngine) -> None:
    assert near.handshake == "" and near.describe().handshake == ""
    assert not threads()


def test_an_engine_describes_itself(far: TransferEngine, client: HandshakeClient) -> None:
    region = far.allocate(4096)
    assert client.describe(far.handshake, 5) == far.describe()
    far.unregister(region)
    assert client.describe(far.handshake, 5).regions == []
    alive = client.probe(far.handshake, 5)
    assert (alive.name, alive.epoch) == ("far", far.epoch)


def test_peers_get_the_address_that_the_user_gave(near: TransferEngine) -> None:
    settings = TransferSettings(listen_host="0.0.0.0", advertise_host="127.0.0.2", handshake_port=0)
    with TransferEngine(settings) as far:
        described = far.describe()
        assert described.handshake.startswith("127.0.0.2:")
        assert described.endpoints["tcp"].startswith("127.0.0.2:")
        assert near.probe(described.handshake) is not None
    with TransferEngine(TransferSettings(listen_host="[::1]", handshake_port=0)) as far:
        assert far.handshake.startswith("[::1]:") and far.describe().endpoints["tcp"].startswith("[::1]:")
        assert near.probe(far.handshake) is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::"])
def test_addresses(host: str, near: TransferEngine) -> None:
    settings = TransferSettings(name="there", listen_host=host, handshake_port=0)
    with TransferEngine(settings) as there:
        alive = near.probe(there.handshake)
        assert alive is not None and alive.name == "there"
        advertised = there.handshake.rpartition(":")[0]
        if host not in ("0.0.0.0", "::"):
            assert advertised == (f"[{host}]" if ":" in host else host)


def test_notifications_come_after_the_data(near: TransferEngine, far: TransferEngine) -> None:
    pool, here = far.allocate(4096), near.allocate(4096)
    here.view()[:5] = b"hello"
    segment = near.open(far.describe())
    assert near.run(Op.WRITE, segment, [here.address], [pool.address], [5]).status == Status.OK
    near.notify(segment, "block", "17")
    near.notify(segment, "raw", b"\x00\xff")
    first, second = far.notifications()
    assert (first.sender, first.name, first.text) == ("near", "block", "17")
    assert (second.name, second.message) == ("raw", b"\x00\xff")
    assert bytes(pool.view()[:5]) == b"hello"
    assert far.notifications() == []


def test_waiting_for_a_notification(near: TransferEngine, far: TransferEngine) -> None:
    segment = near.open(far.describe())
    asker = threading.Timer(0.05, lambda: near.notify(segment, "now"))
    asker.start()
    assert [notification.name for notification in far.notifications(timeout_s=30)] == ["now"]
    asker.join()


def test_many_threads_notify(near: TransferEngine, far: TransferEngine) -> None:
    segment = near.open(far.describe())

    def send(number: int) -> None:
        for index in range(50):
            near.notify(segment, f"{number}", f"{index}", timeout_s=30)

    senders = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    received = [(note.name, note.text) for note in far.notifications()]
    assert len(received) == 200
    for number in range(4):
        assert [text for name, text in received if name == f"{number}"] == [f"{index}" for index in range(50)]


def test_a_notification_that_comes_twice_is_delivered_once(far: TransferEngine) -> None:
    client = BlockingClient(far.handshake, messages.REPLIES)
    for _ in range(2):
        client.call(messages.NotifyRequest(VERSION, far.epoch, 7, "near", "once", b""), 5)
    client.call(messages.NotifyRequest(VERSION, far.epoch, 8, "near", "other", b""), 5)
    client.close()
    assert [notification.name for notification in far.notifications()] == ["once", "other"]


def test_notifications_that_are_not_taken(
    near: TransferEngine, far: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_NOTIFICATIONS", 3)
    monkeypatch.setattr(messages, "MAX_NOTIFIED_BYTES", 100)
    segment = near.open(far.describe())
    with pytest.raises(Unavailable, match="call notifications"):
        near.notify(segment, "large", b"x" * 101)
    for _ in range(3):
        near.notify(segment, "n")
    with pytest.raises(Unavailable, match="3 notifications wait"):
        near.notify(segment, "n")
    assert len(far.notifications()) == 3
    near.notify(segment, "n")


def test_bad_notifications(near: TransferEngine, far: TransferEngine) -> None:
    with pytest.raises(InvalidArgument, match="at most 1048576"):
        near.notify(near.open(far.describe()), "large", b"x" * MAX_PAYLOAD_BYTES)
    with pytest.raises(InvalidArgument, match="handshake_port=0"):
        far.notify(far.open(near.describe()), "n")


def test_a_restarted_peer_is_not_taken_for_its_predecessor(near: TransferEngine) -> None:
    first = TransferEngine(TransferSettings(name="far", handshake_port=0))
    segment = near.open(first.describe())
    near.notify(segment, "hello")
    port = int(first.handshake.rpartition(":")[2])
    first.close()
    with pytest.raises(PeerLost, match="is it running"):
        near.notify(segment, "anyone?")
    with pytest.raises(PeerLost, match="is it running"):
        near.probe(first.handshake)
    with TransferEngine(TransferSettings(name="far", handshake_port=port)) as second:
        with pytest.raises(PeerLost, match="was restarted; open its current descriptor"):
            near.notify(segment, "still you?")
        with pytest.raises(PeerLost, match="was restarted"):
            near.exchange(second.handshake, "rdma", b"", 5, epoch=segment.descriptor.epoch)
        near.notify(near.open(second.describe()), "you, then", timeout_s=5)
        assert [notification.name for notification in second.notifications()] == ["you, then"]


def test_another_version(far: TransferEngine) -> None:
    wanted = (
        rf"far speaks version {VERSION} .* requesting process version {VERSION + 1}; install the same release"
    )
    client = BlockingClient(far.handshake, messages.REPLIES)
    for request in (
        messages.DescribeRequest(VERSION + 1, 0),
        messages.ProbeRequest(VERSION + 1, 0),
        messages.NotifyRequest(VERSION + 1, 0, 1, "near", "n", b""),
        messages.ExchangeRequest(VERSION + 1, 0, "tcp", b""),
    ):
        with pytest.raises(ProtocolError, match=wanted):
            client.call(request, 5)
    client.close()
    assert far.notifications() == []
    newer = msgspec.structs.replace(far.describe(), version=VERSION + 1)
    with pytest.raises(ProtocolError, match=r"far speaks version 2 .* this process version 1; install"):
        decode_descriptor(newer.encode())


def test_descriptors_of_before_the_handshake() -> None:
    encoded = b'{"name":"old","host":"h","epoch":1,"endpoints":{},"regions":[]}'
    assert decode_descriptor(encoded).handshake == ""


def test_another_program_listens_there(client: HandshakeClient) -> None:
    """One peer closes the connection, another never answers."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            for _ in range(2):
                other.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"during Probe.*or another program"):
                client.probe(f"127.0.0.1:{other.getsockname()[1]}", 5)
        thread.join()
        with pytest.raises(DeadlineExceeded, match=r"didn.t answer Probe|can.t be reached within"):
            client.probe(f"127.0.0.1:{other.getsockname()[1]}", 0.05)


def test_bad_addresses(near: TransferEngine) -> None:
    for address in ("", "nonsense", "127.0.0.1", "127.0.0.1:0", ":1"):
        with pytest.raises(InvalidArgument, match="host:port"):
            near.probe(address)
    with pytest.raises(PeerLost, match="can't be reached"):
        near.probe("no such host:1")
    with pytest.raises(AddressInUse), socket.create_server(("127.0.0.1", 0)) as taken:
        TransferEngine(TransferSettings(handshake_port=taken.getsockname()[1]))
    with pytest.raises(InvalidArgument, match=r"address is .192\.0\.2\.1:0"):
        TransferEngine(TransferSettings(listen_host="192.0.2.1", handshake_port=0, transports=()))
    assert not threads(), "a refused engine leaves a thread behind"


class Doubling:
    """A transport that is only set up."""

    needs_handshake = True
    endpoint = "here"

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def accept(self, payload: bytes) -> bytes:
        self.entered.set()
        self.may_go_on.wait(30)
        if payload == b"bad":
            raise InvalidArgument("payload", payload, "anything else")
        if payload == b"ugly":
            raise RuntimeError("broken")
        return payload * 2

    def close(self) -> None: ...


@pytest.fixture
def doubling(far: TransferEngine) -> Doubling:
    transport = Doubling()
    far._transports["doubling"] = transport  # type: ignore[assignment]
    return transport


def test_connection_set_up(near: TransferEngine, far: TransferEngine, doubling: Doubling) -> None:
    assert near.exchange(far.handshake, "doubling", b"ab", 5, epoch=far.epoch) == b"abab"
    large = b"x" * MAX_PAYLOAD_BYTES
    assert near.exchange(far.handshake, "doubling", large, 10) == large * 2
    with pytest.raises(InvalidArgument, match="anything else"):
        near.exchange(far.handshake, "doubling", b"bad", 5)
    with pytest.raises(Exception, match="the handler failed with RuntimeError"):
        near.exchange(far.handshake, "doubling", b"ugly", 5)
    with pytest.raises(InvalidArgument, match="one that far sets up: doubling"):
        near.exchange(far.handshake, "rdma", b"", 5)
    with pytest.raises(InvalidArgument, match="size of the payload"):
        near.exchange(far.handshake, "doubling", large + b"x", 5)


def test_a_slow_set_up_delays_no_other(near: TransferEngine, far: TransferEngine, doubling: Doubling) -> None:
    doubling.may_go_on.clear()
    answers: list[bytes] = []
    asker = threading.Thread(
        target=lambda: answers.append(near.exchange(far.handshake, "doubling", b"z", 30))
    )
    asker.start()
    assert doubling.entered.wait(30)
    alive = near.probe(far.handshake, 30)
    assert alive is not None and alive.name == "far"
    doubling.may_go_on.set()
    asker.join(30)
    assert answers == [b"zz"]


def test_closing_ends_what_is_under_way(far: TransferEngine, doubling: Doubling) -> None:
    doubling.may_go_on.clear()
    near = TransferEngine(TransferSettings(name="near"))
    errors: list[Exception] = []

    def ask() -> None:
        try:
            near.exchange(far.handshake, "doubling", b"z", 30)
        except PeerLost as error:
            errors.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    assert doubling.entered.wait(30)
    closer = threading.Thread(target=far.close)  # waits for the transport, which is still at it
    closer.start()
    asker.join(30)
    assert len(errors) == 1
    doubling.may_go_on.set()
    closer.join(30)
    assert not closer.is_alive() and not threads()
    near.close()
    with pytest.raises(PeerLost, match="closed"):
        near.probe("127.0.0.1:1")


def test_an_engine_without_references_is_closed(client: HandshakeClient) -> None:
    engine = TransferEngine(TransferSettings(handshake_port=0))
    address = engine.handshake
    assert client.probe(address, 5).epoch == engine.epoch
    del engine
    gc.collect()
    with pytest.raises(PeerLost):
        client.probe(address, 5)
    assert not threads()


def test_nothing_is_left_behind(client: HandshakeClient) -> None:
    def open_descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with TransferEngine(TransferSettings(handshake_port=0, transports=())) as engine:
        client.probe(engine.handshake, 5)
    before = open_descriptors()
    for _ in range(30):
        with (
            TransferEngine(TransferSettings(name="a", handshake_port=0, transports=())) as far,
            TransferEngine(TransferSettings(name="b", transports=())) as near,
        ):
            near.notify(near.open(far.describe()), "n")
            client.probe(far.handshake, 5)
            with pytest.raises(InvalidArgument):
                near.exchange(far.handshake, "none", b"", 5)
    client.close()
    deadline = time.monotonic() + 10
    while open_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_descriptors() <= before and not threads()


def test_a_forked_child_lets_go(near: TransferEngine, far: TransferEngine) -> None:
    """The parent's port is free once the parent closes, although the child lives on; both can connect."""
    segment = near.open(far.describe())
    near.notify(segment, "before")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(writing)
            near.notify(segment, "from the child", timeout_s=20)
            os.read(reading, 1)  # ends when the parent has looked
        os._exit(0)
    os.close(reading)
    try:
        near.notify(segment, "from the parent", timeout_s=20)
        names: list[str] = []
        deadline = time.monotonic() + 20
        while len(names) < 3 and time.monotonic() < deadline:
            names += [notification.name for notification in far.notifications(timeout_s=1)]
        assert sorted(names) == ["before", "from the child", "from the parent"]
        far.close()
        with pytest.raises(PeerLost):
            near.probe(far.handshake, 1)
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


async def test_asked_from_a_loop(far: TransferEngine) -> None:
    """An engine of this process answers although this thread's loop waits for it."""
    with TransferEngine(TransferSettings(name="near")) as near:
        segment = near.open(far.describe())
        near.notify(segment, "blocking the loop")
        await asyncio.to_thread(near.notify, segment, "not blocking it")
    assert len(far.notifications()) == 2


def test_an_engine_answers_the_roles_that_it_admits(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(format_secret(b"s" * 32))
    path.chmod(0o600)
    settings = SecuritySettings(cluster_key_file=str(path))
    node, tenant = Identity(settings), Identity(settings, Role.CLIENT, "tenant")
    listening = TransferSettings(handshake_port=0)
    with (
        TransferEngine(listening, identity=node, admitted=NODES_AND_ADMINS) as private,
        TransferEngine(listening, identity=node) as usual,
    ):
        peer, client = HandshakeClient(node), HandshakeClient(tenant)
        for engine in (private, usual):
            assert peer.describe(engine.handshake, 20) == engine.describe()
        assert client.describe(usual.handshake, 20) == usual.describe()
        for ask in (
            lambda: client.describe(private.handshake, 20),
            lambda: client.probe(private.handshake, 20),
            lambda: client.exchange(private.handshake, "rdma", b"", 20),
            lambda: client.notify(private.handshake, "me", "name", b"", 20),
        ):
            with pytest.raises(AccessDenied, match="client of tenant"):
                ask()
        peer.close()
        client.close()
