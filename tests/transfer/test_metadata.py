# SPDX-License-Identifier: Apache-2.0
"""The metadata service and its client, over real sockets."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from mooncake.errors import AccessDenied, DeadlineExceeded, InvalidArgument, PeerLost, ProtocolError
from mooncake.http.server import HttpServer, listen
from mooncake.transfer import metadata_server
from mooncake.transfer.metadata import HttpBackend, RedisBackend, make_backend
from mooncake.transfer.metadata_server import MAX_VALUE_BYTES, MetadataEntries, make_app


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = HttpServer(make_app(), listen("127.0.0.1", 0))
    await server.start()
    yield server.port
    await server.close()


async def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    def call() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path, body)
        response = connection.getresponse()
        answer = response.status, response.read().decode()
        connection.close()
        return answer

    return await asyncio.to_thread(call)


async def test_the_answers_programs_expect(port: int) -> None:
    assert await ask(port, "GET", "/metadata?key=a") == (404, "metadata not found")
    assert await ask(port, "PUT", "/metadata?key=a", b'{"x": 1}') == (200, "metadata updated")
    assert await ask(port, "GET", "/metadata?key=a") == (200, '{"x": 1}')
    assert await ask(port, "PUT", "/metadata?key=a", b"2") == (200, "metadata updated")
    assert await ask(port, "GET", "/metadata?key=a") == (200, "2")
    assert await ask(port, "DELETE", "/metadata?key=a") == (200, "metadata deleted")
    assert await ask(port, "DELETE", "/metadata?key=a") == (404, "metadata not found")
    for method in ("GET", "PUT", "DELETE"):
        assert await ask(port, method, "/metadata") == (400, "metadata key is required")
    assert (await ask(port, "POST", "/metadata?key=a"))[0] == 405
    assert await ask(port, "GET", "/health") == (200, "OK")


async def test_bad_requests(port: int) -> None:
    assert (await ask(port, "PUT", f"/metadata?key={'k' * 1025}", b"x"))[0] == 400
    for ttl in ("0", "-1", "soon", "nan", "inf"):
        assert (await ask(port, "PUT", f"/metadata?key=a&ttl_s={ttl}", b"x"))[0] == 422
    assert (await ask(port, "PUT", "/metadata?key=big", b"x" * (MAX_VALUE_BYTES + 1)))[0] == 413
    assert (await ask(port, "GET", "/metadata?key=big"))[0] == 404


async def test_the_backend_against_the_service(port: int) -> None:
    backend = HttpBackend(f"http://127.0.0.1:{port}/metadata")

    def use() -> None:
        assert backend.get("mooncake/ram/a b&c=ü") is None
        backend.put("mooncake/ram/a b&c=ü", b"\x00\xff", ttl_s=60)
        backend.put("mooncake/ram/z", b"z")
        backend.put("other", b"")
        assert backend.get("mooncake/ram/a b&c=ü") == b"\x00\xff"
        assert backend.get("other") == b""
        assert backend.list("mooncake/ram/") == ["mooncake/ram/a b&c=ü", "mooncake/ram/z"]
        assert backend.remove("mooncake/ram/z") and not backend.remove("mooncake/ram/z")
        with pytest.raises(ProtocolError, match="refused"):
            backend.put("k" * 2000, b"")
        backend.close()
        assert backend.get("other") == b"", "a closed connection is opened again"
        backend.close()

    await asyncio.to_thread(use)


def test_no_service_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLost, match="is it running"):
            HttpBackend(f"http://127.0.0.1:{unused.getsockname()[1]}/metadata").get("a")


@pytest.mark.parametrize("scheme", ["http", "etcd", "redis"])
@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_service_with_a_name_that_no_host_can_have(scheme: str, host: str) -> None:
    backend = make_backend(f"{scheme}://{host}:1", timeout_s=5.0)
    assert backend is not None
    with pytest.raises(PeerLost, match="is it running"):
        backend.get("key")


def test_a_service_that_does_not_answer() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        backend = HttpBackend(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match="did not answer GET"):
            backend.get("a")


@pytest.mark.parametrize("url", ["", "etcd://x:1", "http://", "127.0.0.1:8080", "http://host:99999/"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidArgument, match="url is"):
        HttpBackend(url)


def test_entries_expire() -> None:
    entries = MetadataEntries()
    entries.put("a", b"1", 10, now=100)
    entries.put("b", b"2", None, now=100)
    assert entries.get("a", now=109.9) == b"1"
    entries.put("a", b"3", 10, now=109.9)
    assert entries.get("a", now=119) == b"3"
    assert entries.list("", now=119.9) == ["b"]
    assert entries.get("a", now=119.9) is None and not entries.remove("a", now=119.9)


def test_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_server, "MAX_ENTRIES", 3)
    monkeypatch.setattr(metadata_server, "MAX_OWNED", 2)
    monkeypatch.setattr(metadata_server, "MAX_BYTES", 3000)
    entries = MetadataEntries()
    for name in "ab":
        assert entries.put(name, b"1", 10, 0, "client", False) is None
    refusal = entries.put("c", b"1", 10, 0, "client", False)
    assert refusal is not None and refusal.code == "full", "of one owner"
    assert entries.put("a", b"2", 10, 0, "client", False) is None, "its own again"
    assert entries.put("c", b"1", None, 0, "node") is None
    refusal = entries.put("d", b"1", None, 0, "node")
    assert refusal is not None and refusal.code == "full", "in number"
    refusal = entries.put("c", bytes(3000), None, 0, "node")
    assert refusal is not None and refusal.code == "full", "in bytes"
    assert entries.get("c", 0) == b"1", "what was there is not lost"
    assert entries.put("d", b"1", None, 10, "node") is None, "what has expired makes room"
    assert entries.list("", 10) == ["c", "d"]


def test_an_entry_is_its_owners_until_it_expires() -> None:
    entries = MetadataEntries()
    assert entries.put("a", b"1", 10, 0, "client of tenant a", False) is None
    refusal = entries.put("a", b"2", 10, 5, "client of tenant b", False)
    assert refusal is not None and refusal.code == "not_owner"
    removed = entries.remove("a", 5, "client of tenant b", False)
    assert not isinstance(removed, bool) and removed.code == "not_owner"
    assert entries.get("a", 5) == b"1"
    assert entries.put("a", b"2", 10, 10, "client of tenant b", False) is None
    assert entries.put("a", b"3", 10, 11, "node") is None, "a node may"
    assert entries.remove("a", 12) is True
    assert entries.num_bytes == 0


def test_what_is_put_again_and_again_leaves_nothing_behind() -> None:
    """Nor does looking up get slower: outdated expiry times are removed."""
    entries = MetadataEntries()
    for number in range(10_000):
        entries.put("a", b"1", 1e6 + number, float(number))
    assert len(entries._expiring) < 200
    assert entries.get("a", 9e5) == b"1"


class PlayedRedis(threading.Thread):
    """A service that answers as Redis does, and refuses the commands in ``refused``."""

    def __init__(self, *refused: bytes) -> None:
        super().__init__(daemon=True)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.refused = refused
        self.taken: list[list[bytes]] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                while line := stream.readline():
                    command = []
                    for _ in range(int(line[1:])):
                        size = int(stream.readline()[1:])
                        command.append(stream.read(size + 2)[:-2])
                    self.taken.append(command)
                    connection.sendall(b"-ERR no\r\n" if command[0] in self.refused else b"+OK\r\n")

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.mark.parametrize(("command", "error"), [(b"AUTH", AccessDenied), (b"SELECT", ProtocolError)])
def test_a_redis_that_refuses_the_password_or_the_database_is_not_used(
    command: bytes, error: type[Exception]
) -> None:
    service = PlayedRedis(command)
    backend = RedisBackend(f"redis://:secret@127.0.0.1:{service.port}/3")
    for _ in range(3):
        with pytest.raises(error, match=command.decode()):
            backend.put("k", b"v")
    assert [b"SET", b"k", b"v"] not in service.taken, "in another database, or without the password"
    service.refused = ()
    backend.put("k", b"v")
    assert service.taken[-3:] == [[b"AUTH", b"secret"], [b"SELECT", b"3"], [b"SET", b"k", b"v"]]
    backend.close()
    service.close()


@pytest.mark.parametrize("kind", ["http", "redis"])
def test_the_wait_for_requests_of_other_threads_is_bounded(kind: str) -> None:
    """Else each of many threads would wait for all those before it, one timeout after the other."""
    backend = make_backend(f"{kind}://127.0.0.1:1", timeout_s=0.05)
    assert isinstance(backend, HttpBackend | RedisBackend)
    lock = backend._connection._lock if isinstance(backend, HttpBackend) else backend._lock
    with lock, pytest.raises(DeadlineExceeded, match="other threads"):
        backend.get("k")
    with pytest.raises(PeerLost, match="is it running"):
        backend.get("k")
