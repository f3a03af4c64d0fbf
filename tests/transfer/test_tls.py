# SPDX-License-Identifier: Apache-2.0
"""TLS between two engines of this process: which pairs may connect, and the reasons that the others get."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from mooncake.errors import InvalidArgument, PeerLost, ProtocolError
from mooncake.http.server import HttpServer, listen
from mooncake.security.tls_contexts import client_context, server_context
from mooncake.transfer import Completion, Op, Status, TransferEngine, TransferSettings
from mooncake.transfer.metadata import make_backend
from mooncake.transfer.metadata_server import make_app
from mooncake.transfer.transports.tcp import native_tls

pytest.importorskip("cryptography", reason="makes the certificates: pip install 'mooncake-serving[tls]'")

from mooncake.cli.certs import CertsSettings, make

PLAIN = TransferSettings(transports=("tcp",), num_streams=2)


def settings_of(folder: Path, name: str = "node", host: tuple[str, ...] = ("127.0.0.1",)) -> TransferSettings:
    """Settings for TLS everywhere, with a certificate of the authority in ``folder``."""
    if not (folder / f"{name}.pem").exists():
        make(CertsSettings(folder=folder, name=name, host=host))
    return dataclasses.replace(
        PLAIN,
        tls="all",
        tls_cert=str(folder / f"{name}.pem"),
        tls_key=str(folder / f"{name}.key"),
        tls_ca=str(folder / "ca.pem"),
    )


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TransferSettings:
    return settings_of(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> TransferSettings:
    return settings_of(tmp_path_factory.mktemp("theirs"))


def try_it(near_settings: TransferSettings, far_settings: TransferSettings) -> Completion:
    with TransferEngine(near_settings) as near, TransferEngine(far_settings) as far:
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = near.open(far.describe())
        done = near.run(Op.WRITE, segment, [here.address], [pool.address], [100], timeout_s=20)
        if done.status != Status.OK:
            assert not any(pool.view()), "nothing moved"
            again = near.run(Op.READ, segment, [here.address], [pool.address], [100], timeout_s=20)
            assert (again.status, again.reason) == (done.status, done.reason), "and it stays like that"
        return done


@pytest.mark.parametrize("size", [1, 4096, 16_384, 16_385, 3_000_001, 40 << 20])
def test_bytes_arrive(ours: TransferSettings, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    with TransferEngine(ours) as near, TransferEngine(ours) as far:
        pool, here, back = far.allocate(size), near.register(data), near.allocate(size)
        segment = near.open(far.describe())
        cuts = sorted({0, size // 7, size // 7 + 1, size // 3, size})
        starts, lengths = cuts[:-1], [b - a for a, b in itertools.pairwise(cuts)]
        there = [pool.address + start for start in starts]
        sent = near.run(
            Op.WRITE, segment, [here.address + start for start in starts], there, lengths, checksum=True
        )
        assert sent.status == Status.OK, sent.reason
        assert bytes(pool.view()) == data.tobytes()
        got = near.run(
            Op.READ, segment, [back.address + start for start in starts], there, lengths, checksum=True
        )
        assert got.status == Status.OK, got.reason
        assert sent.checksums is not None and got.checksums is not None
        assert bytes(back.view()) == data.tobytes() and (sent.checksums == got.checksums).all()


def test_many_batches_at_once(ours: TransferSettings) -> None:
    """More transfers than lanes, so that sessions are passed between threads."""
    with TransferEngine(ours) as near, TransferEngine(ours) as far:
        pool, here = far.allocate(64 << 16), near.allocate(64 << 16)
        here.view()[:] = bytes(range(256)) * (64 << 8)
        segment, queue = near.open(far.describe()), near.new_queue()
        for i in range(64):
            at = i << 16
            near.submit(queue, i, Op.WRITE, segment, [here.address + at], [pool.address + at], [1 << 16])
        done: list[Completion] = []
        while len(done) < 64:
            some = queue.drain(64, 20)
            assert some or len(queue), "all of them end"
            done += some
        assert {one.status for one in done} == {Status.OK}
        assert bytes(pool.view()) == bytes(here.view())


def test_a_plain_client_gets_the_reason(ours: TransferSettings) -> None:
    done = try_it(PLAIN, ours)
    assert done.status == Status.PROTOCOL_ERROR
    assert "takes data over TLS only" in done.reason and "`tls`" in done.reason


def test_a_client_that_wants_tls_gets_the_reason(ours: TransferSettings) -> None:
    done = try_it(ours, PLAIN)
    assert done.status == Status.PROTOCOL_ERROR
    assert "takes plain data only" in done.reason and "`tls`" in done.reason


class PlainServer(threading.Thread):
    """A server without TLS that sends its answer in two parts: the first at once, the rest when asked."""

    ANSWER = b"MOKC" + bytes([2, 4]) + bytes(18)
    """The refusal of a server that takes plain data only."""

    def __init__(self, num_first: int, answer: bytes = ANSWER) -> None:
        super().__init__(daemon=True)
        self._first, self._rest = answer[:num_first], answer[num_first:]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.sendall(self._first)
                    if connection.recv(4096):
                        connection.sendall(self._rest)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):
                            pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join()


def reason_from(server: PlainServer, settings: TransferSettings) -> str:
    """Why a client with these settings can't write to the server."""
    with TransferEngine(settings) as near, TransferEngine(PLAIN) as far:
        here = near.allocate(4096)
        far.allocate(4096)
        described = msgspec.structs.replace(far.describe(), endpoints={"tcp": server.address})
        segment = near.open(described)
        there = described.regions[0].address
        server.start()
        try:
            done = near.run(Op.WRITE, segment, [here.address], [there], [100], timeout_s=20)
        finally:
            server.close()
        assert done.status in (Status.PROTOCOL_ERROR, Status.PEER_LOST)
        return done.reason


@pytest.mark.parametrize("num_first", [0, 1, 3, 4, 6, 23, 24])
def test_the_reason_is_the_same_however_the_answer_arrives(ours: TransferSettings, num_first: int) -> None:
    """OpenSSL took a part of the answer for its own, if that was there when it first read."""
    reason = reason_from(PlainServer(num_first), ours)
    assert "the peer takes plain data only and we asked for TLS; use the same `tls` setting" in reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"MOKC" + bytes([77, 4]) + bytes(18), "speaks version 77"),
        (b"MOKC", "closed the connection during the greeting"),
        (b"MOCK" + bytes(20), "something other than a transfer engine"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "wrong version number"),
        (b"", "the peer ended it"),
    ],
)
def test_what_else_answers_a_client_that_wants_tls(
    ours: TransferSettings, answer: bytes, reason: str
) -> None:
    for num_first in (0, 2):
        assert reason in reason_from(PlainServer(num_first, answer), ours)


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: (a, b),
        lambda a, b: (dataclasses.replace(a, tls_ca=b.tls_ca), b),
        lambda a, b: (a, dataclasses.replace(b, tls_ca=a.tls_ca)),
    ],
    ids=["neither trusts the other", "the server does not trust us", "we do not trust the server"],
)
def test_another_authority_is_not_talked_to(
    ours: TransferSettings,
    theirs: TransferSettings,
    mix: Callable[[TransferSettings, TransferSettings], tuple[TransferSettings, TransferSettings]],
) -> None:
    done = try_it(*mix(ours, theirs))
    assert done.status == Status.PROTOCOL_ERROR
    assert "certificate" in done.reason and "`tls_ca`" in done.reason


def test_the_address_is_checked_when_asked(ours: TransferSettings) -> None:
    folder = Path(ours.tls_ca).parent
    elsewhere = settings_of(folder, "elsewhere", ("10.9.8.7",))
    careful = dataclasses.replace(ours, tls_check_host=True)
    assert try_it(careful, ours).status == Status.OK
    assert try_it(ours, elsewhere).status == Status.OK
    done = try_it(careful, elsewhere)
    assert done.status == Status.PROTOCOL_ERROR and "IP address mismatch" in done.reason


@pytest.mark.parametrize("level", ["handshake", "all"])
def test_handshakes(
    ours: TransferSettings, theirs: TransferSettings, level: Literal["handshake", "all"]
) -> None:
    """Peers with a certificate of the authority may send handshakes and notifications; others may not."""
    settings = dataclasses.replace(ours, tls=level, handshake_port=0)
    with TransferEngine(settings) as near, TransferEngine(settings) as far:
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = near.open(far.describe())
        alive = near.probe(far.handshake, timeout_s=20)
        assert alive is not None and alive.epoch == far.epoch
        near.notify(segment, "done", b"\0\1", timeout_s=20)
        assert [one.message for one in far.notifications(timeout_s=20)] == [b"\0\1"]
        assert near.run(Op.WRITE, segment, [here.address], [pool.address], [64]).status == Status.OK
        for other, reason in ((theirs, "`tls_ca`"), (PLAIN, "`tls`")):
            with TransferEngine(other) as outsider, pytest.raises((ProtocolError, PeerLost), match=reason):
                outsider.probe(far.handshake, timeout_s=20)
    plain = TransferEngine(dataclasses.replace(PLAIN, handshake_port=0))
    with plain, TransferEngine(ours) as near, pytest.raises(ProtocolError, match="`tls`"):
        near.probe(plain.handshake, timeout_s=20)


async def test_metadata_over_https(ours: TransferSettings, theirs: TransferSettings) -> None:
    tls = server_context(ours)
    server = HttpServer(make_app(), listen("127.0.0.1", 0), tls=tls)
    await server.start()
    url = f"https://127.0.0.1:{server.port}/metadata"
    try:
        settings = dataclasses.replace(ours, tls="handshake", metadata=url, name="far")
        far = await asyncio.to_thread(TransferEngine, settings)
        near = await asyncio.to_thread(TransferEngine, dataclasses.replace(settings, name="near"))
        far.allocate(4096)
        await asyncio.to_thread(far.publish, 60)
        found = await asyncio.to_thread(near.open_name, "far")
        assert found is not None and found.descriptor.epoch == far.epoch
        for context in (client_context(theirs, check_host=False), None):
            outsider = make_backend(url, timeout_s=20, tls=context)
            with pytest.raises(ProtocolError, match="TLS failed"):
                await asyncio.to_thread(outsider.get, "k")
        plain = make_backend(url.replace("https", "http"), timeout_s=20)
        with pytest.raises(PeerLost):
            await asyncio.to_thread(plain.get, "k")
        await asyncio.to_thread(near.close)
        await asyncio.to_thread(far.close)
    finally:
        await server.close()


def test_settings_are_checked(ours: TransferSettings, theirs: TransferSettings, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tls_key is ''; allowed: the path of a PEM file"):
        dataclasses.replace(ours, tls_key="")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for field in ("tls_cert", "tls_key", "tls_ca"):
        for path in (str(tmp_path / "missing.pem"), str(empty)):
            changed: Any = {field: path}
            wrong = dataclasses.replace(ours, **changed)
            for use in (native_tls, server_context, functools.partial(client_context, check_host=True)):
                with pytest.raises(InvalidArgument, match=f"^{field} is "):
                    use(wrong)
    outsider = dataclasses.replace(ours, tls_key=theirs.tls_key)
    with pytest.raises(InvalidArgument, match=r"^tls_key is .* private key of tls_cert .*(?i:mismatch)"):
        TransferEngine(outsider)
    assert client_context(ours, check_host=True).minimum_version == ssl.TLSVersion.TLSv1_3
