# SPDX-License-Identifier: Apache-2.0
"""Real metadata services for tests: started on a free port, killed, started again with nothing in them."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import pytest

from mooncake.errors import MooncakeError
from mooncake.transfer.host import with_port
from mooncake.transfer.metadata import Backend, make_backend

KINDS = ("http", "etcd", "redis")
PROGRAMS = {"etcd": ("etcd", "etcd-server"), "redis": ("redis-server", "redis-server")}
PATIENCE_S = 90.0


def free_port() -> int:
    """Below the ports that the kernel gives to connections, so that it is still free after a restart."""
    for _ in range(100):
        port = random.randrange(20_000, 32_000)
        with socket.socket(socket.AF_INET6 if has_ipv6() else socket.AF_INET) as sock:
            try:
                sock.bind(("::" if has_ipv6() else "0.0.0.0", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def skip_without(kind: str) -> None:
    if kind in PROGRAMS:
        program, package = PROGRAMS[kind]
        if shutil.which(program) is None:
            pytest.skip(
                f"{program} is not installed, so metadata in {kind} was NOT TESTED; "
                f"run scripts/install-servers (or apt-get install {package})"
            )


class MetadataServer:
    """One service of ``kind`` on ``host``; keeps its port when it is started again."""

    def __init__(self, kind: str, host: str = "127.0.0.1", flags: Sequence[str] = ()) -> None:
        skip_without(kind)
        self.kind = kind
        self._host = host
        self._flags = list(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.port = 0
        for attempt in range(5):
            self.port = free_port()
            try:
                self.start()
                return
            except AssertionError:
                if attempt == 4:
                    raise

    @property
    def address(self) -> str:
        return with_port(self._host, self.port)

    @property
    def url(self) -> str:
        return f"{self.kind}://{self.address}" + ("/metadata" if self.kind == "http" else "")

    def start(self) -> None:
        """Start it, empty."""
        assert self._process is None, "it runs already, and would be left behind"
        self._folder = tempfile.TemporaryDirectory()
        log = open(f"{self._folder.name}/log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command(self._folder.name), stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()
        backend = make_backend(self.url)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._is_there(backend)
                break
            except (MooncakeError, OSError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    output = open(f"{self._folder.name}/log", errors="replace").read()[-2000:]  # noqa: SIM115
                    self.stop()
                    raise AssertionError(f"{self.kind} does not start: {error}\n{output}") from error
                time.sleep(0.02)
        backend.close()

    def stop(self) -> None:
        """Kill it, as a loss of power would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _is_there(self, backend: Backend) -> None:
        if "--requirepass" in self._flags:
            with socket.create_connection((self._host, self.port), 1) as sock:
                sock.sendall(b"PING\r\n")
                if not sock.recv(100).startswith(b"-NOAUTH"):
                    raise OSError("it takes no password yet")
        else:
            backend.list("")

    def _command(self, folder: str) -> list[str]:
        if self.kind == "http":
            flags = ["--host", self._host, "--port", str(self.port)]
            return [sys.executable, "-m", "mooncake", "metadata", *flags]
        if self.kind == "redis":
            flags = ["--bind", self._host, "--port", str(self.port), "--dir", folder, "--save", ""]
            return ["redis-server", *flags, *self._flags]
        ours, peers = f"http://{self.address}", f"http://{with_port(self._host, free_port())}"
        return [
            "etcd",
            *["--name", "one", "--data-dir", f"{folder}/data"],
            *["--heartbeat-interval", "20", "--election-timeout", "200"],
            *["--listen-client-urls", ours, "--advertise-client-urls", ours],
            *["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers],
            *["--initial-cluster", f"one={peers}", *self._flags],
        ]
