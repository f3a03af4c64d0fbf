# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from mooncake.cli.certs import CertsSettings, make, make_cluster_key
from mooncake.cli.ports import free_ports
from mooncake.cli.processes import HttpCheck, Processes, RolePlan, is_serving, last_lines
from mooncake.cli.supervisor import RoleSpec, RoleState
from mooncake.http.server import HttpServer, listen
from mooncake.security import HttpAuth, Identity, SecuritySettings
from mooncake.security.http_auth import HttpClientAuth, Receive, Scope, Send

pytestmark = pytest.mark.processes

SERVER = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
        self.wfile.write(b"x 1\\nmounted 1\\n")
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else lambda *_: sys.exit(0))
server.serve_forever()
"""
READY = HttpCheck("/ready")
PLAIN = HttpClientAuth(Identity())
REFUSER = "import sys; print('error: port is 70000; allowed: less', file=sys.stderr); sys.exit(2)"


def server(name: str, *words: str, after: tuple[str, ...] = (), ready: HttpCheck | None = READY) -> RolePlan:
    [port] = free_ports("127.0.0.1", 1, Random())
    command = (sys.executable, "-S", "-c", SERVER, str(port), *words)
    return RolePlan(RoleSpec(name, after), command, "127.0.0.1", port, ready)


class World:
    """Processes and all messages about them."""

    def __init__(self, folder: Path, *plans: RolePlan) -> None:
        self.messages: list[str] = []
        self.num_all_ready = 0
        self.happened = asyncio.Event()
        self.processes = Processes(list(plans), folder, self._say, self.happened.set, self._all_ready)
        self.running = asyncio.create_task(self.processes.run())

    def _say(self, role: str, text: str, log_lines: Sequence[str]) -> None:
        self.messages += [f"{role}: {text}", *(f"{role} | {line}" for line in log_lines)]

    def _all_ready(self) -> None:
        self.num_all_ready += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.happened.clear()
                await self.happened.wait()
        self.processes.supervisor.check()

    def is_ready(self, name: str) -> bool:
        return self.processes.supervisor.roles[name].state is RoleState.READY

    async def end(self) -> int:
        async with asyncio.timeout(60):
            return await self.running


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_start_ready_restart_after_sigkill_and_stop(tmp_path: Path) -> None:
    world = World(tmp_path, server("a"), server("b", after=("a",)))
    await world.until(lambda: world.num_all_ready == 1)
    port = world.processes.plans["b"].port
    assert await is_serving("127.0.0.1", port, HttpCheck("/ready"), PLAIN)
    assert await is_serving("127.0.0.1", 1, HttpCheck("/ready", "\nmounted 1", port), PLAIN)
    assert not await is_serving("127.0.0.1", port, HttpCheck("/ready", "\nmounted 2"), PLAIN)
    assert not await is_serving("127.0.0.1", port, HttpCheck("/nowhere"), PLAIN)
    first = world.processes.pid("a")
    assert first is not None
    assert os.getpgid(first) == first, "Ctrl-C in the terminal would reach the role"

    os.kill(first, signal.SIGKILL)
    await world.until(lambda: not world.is_ready("a"))
    await world.until(lambda: world.is_ready("a"))
    second = world.processes.pid("a")
    assert second is not None
    assert second != first
    assert "a: died (killed by signal 9); restarting in 0.5 s" in world.messages
    assert "a | serving" in world.messages
    assert world.num_all_ready == 1

    world.processes.stop()
    assert await world.end() == 0
    assert is_gone(second)
    assert world.messages[-2:] == ["b: stopped (exit status 0)", "a: stopped (exit status 0)"]


async def test_a_second_stop_kills_what_ignores_the_first(tmp_path: Path) -> None:
    world = World(tmp_path, server("a", "stubborn"))
    await world.until(lambda: world.is_ready("a"))
    pid = world.processes.pid("a")
    assert pid is not None
    world.processes.stop()
    assert world.processes.pid("a") == pid
    world.processes.stop()
    assert await world.end() == 0
    assert is_gone(pid)


async def test_stopping_while_a_process_is_being_started(tmp_path: Path) -> None:
    world = World(tmp_path, server("a"))
    await asyncio.sleep(0)  # run() has posted Begin; the child does not exist yet
    assert world.processes.pid("a") is None
    world.processes.stop()
    assert await world.end() == 0
    [message] = world.messages
    assert message.startswith("a: stopped (")


async def test_refused_settings_stop_the_others_and_are_shown(tmp_path: Path) -> None:
    refuser = RolePlan(RoleSpec("b", ("a",)), (sys.executable, "-S", "-c", REFUSER), "127.0.0.1", 1)
    world = World(tmp_path, server("a"), refuser)
    assert await world.end() == 2
    assert "b | error: port is 70000; allowed: less" in world.messages
    assert "a: stopped (exit status 0)" in world.messages


async def test_a_program_that_is_not_there_is_a_death(tmp_path: Path) -> None:
    world = World(tmp_path, RolePlan(RoleSpec("a"), (str(tmp_path / "nothing"),), "127.0.0.1", 1))
    await world.until(lambda: world.processes.supervisor.roles["a"].state is RoleState.RESTING)
    assert world.messages[0].startswith("a: cannot be started (")
    world.processes.stop()
    assert await world.end() == 0


async def test_a_free_port_is_not_serving() -> None:
    [port] = free_ports("127.0.0.1", 1, Random())
    assert not await is_serving("127.0.0.1", port, None, PLAIN)


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_lines(log) == []
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(5000)))
    lines = last_lines(log)
    assert len(lines) == 12
    assert lines[-1] == "line 4999 \ufffd"
    start = log.stat().st_size
    with log.open("ab") as more:
        more.write(b"a new life\n")
    assert last_lines(log, start) == ["a new life"]


async def test_roles_with_a_credential_are_checked_with_it(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    make_cluster_key(tmp_path / "cluster.key")
    cert, private, ca = (str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))
    key = str(tmp_path / "cluster.key")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"mounted 1"})

    ways = {
        "tls": SecuritySettings(cert, private, ca),
        "key": SecuritySettings(cluster_key_file=key),
        "both": SecuritySettings(cert, private, ca, cluster_key_file=key),
    }
    check = HttpCheck("/ready", "mounted 1")
    for way, settings in ways.items():
        identity = Identity(settings)
        server = HttpServer(HttpAuth(answer, identity), listen("127.0.0.1", 0), tls=identity.server_tls)
        await server.start()
        try:
            assert await is_serving("127.0.0.1", server.port, check, HttpClientAuth(identity)), way
            assert await is_serving("127.0.0.1", server.port, None, HttpClientAuth(identity)), way
            assert not await is_serving("127.0.0.1", server.port, check, PLAIN), way
            public = HttpCheck("/ready", "mounted 1", over="https")
            assert not await is_serving("127.0.0.1", server.port, public, HttpClientAuth(identity)), way
        finally:
            await server.close()


async def test_a_public_https_side_is_checked_without_a_certificate(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "node.pem", tmp_path / "node.key")

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    server = HttpServer(answer, listen("127.0.0.1", 0), tls=tls)
    await server.start()
    try:
        for over, serves in {"https": True, "http": False, "member": False}.items():
            check = HttpCheck("/ready", over=over)  # type: ignore[arg-type]
            assert await is_serving("127.0.0.1", server.port, check, PLAIN) is serves, over
    finally:
        await server.close()


@pytest.mark.parametrize("is_ignored", [True, False])
async def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path, is_ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        world = World(tmp_path, server("one"))
        await world.until(lambda: world.is_ready("one"))
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == is_ignored
        if is_ignored:
            world.processes.stop()
        else:
            os.kill(os.getpid(), signal.SIGHUP)
        assert await world.end() == 0
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)
