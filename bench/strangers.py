# SPDX-License-Identifier: Apache-2.0
"""The cost of unauthenticated connections to a real client: idle ones, and ones with half a message sent.

A master is started with a given limit of open files, without a credential, with a cluster key and with TLS. A
client calls it repeatedly, alone and while unauthenticated clients (the strangers) hold as many connections
as they can get; and a new client connects repeatedly. Prints the median and the 99th percentile of both, and
the number of unauthenticated connections.

    python -m bench.strangers --files 256 --strangers 1000
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.report import Table, measured, options, p99
from mooncake.cli.certs import CertsSettings, make, make_cluster_key
from mooncake.rpc import BlockingClient
from mooncake.rpc.wire import OPEN_GREETING, PREFACE, header
from mooncake.security import Identity, SecuritySettings
from mooncake.store.ha.leader_search import Leads, WhoLeads

OPENINGS = (
    b"",
    b"m",
    PREFACE,
    OPEN_GREETING[:-1],
    OPEN_GREETING + header(1 << 20, 1, 0),
    b"GET / HTTP/1.1\r\n",
)
PATIENCE_S = 30.0


def settings_of(way: str, folder: Path) -> dict[str, str]:
    if way == "key":
        make_cluster_key(folder / "cluster.key")
        return {"cluster_key_file": str(folder / "cluster.key")}
    if way == "tls":
        make(CertsSettings(folder=folder))
        return {
            "tls_cert": f"{folder}/node.pem",
            "tls_key": f"{folder}/node.key",
            "tls_ca": f"{folder}/ca.pem",
        }
    return {}


@contextlib.contextmanager
def master(settings: dict[str, str], num_files: int) -> Iterator[str]:
    """Run a master; yield its address."""
    environment = {
        **os.environ,
        **{f"MOONCAKE_SECURITY_{name.upper()}": value for name, value in settings.items()},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake", "master", "--port", "0", "--metrics-port", "0"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files)),
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if " ready " in line:
                address = next(word for word in line.split() if word.startswith("address="))
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield address.removeprefix("address=")
                return
        sys.exit("the master did not start")
    finally:
        process.kill()
        process.wait(PATIENCE_S)


class UnauthenticatedConnections:
    """``number`` connections to ``address``, each opened again as soon as it is closed."""

    def __init__(self, address: str, number: int) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._number = number
        self._is_over = threading.Event()
        self._open: dict[int, socket.socket] = {}
        self.num_made = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> UnauthenticatedConnections:
        self._thread.start()
        until = time.monotonic() + PATIENCE_S
        while self.num_made < self._number and time.monotonic() < until:
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _run(self) -> None:
        watched = select.epoll()
        while not self._is_over.is_set():
            while len(self._open) < self._number and not self._is_over.is_set():
                one = socket.socket()
                one.settimeout(1.0)
                with contextlib.suppress(OSError):
                    one.connect(self._address)
                    one.sendall(OPENINGS[self.num_made % len(OPENINGS)])
                    self._open[one.fileno()] = one
                    watched.register(one.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
                self.num_made += 1
                if self.num_made > self._number:
                    break  # the first of them all at once, others as the first are cut off
            for number, _ in watched.poll(0.02):
                watched.unregister(number)
                self._open.pop(number).close()
            if self.num_made > self._number:
                time.sleep(0.001)
        for one in self._open.values():
            one.close()


def times_of_a_client(address: str, identity: Identity, seconds: float) -> tuple[list[float], list[float]]:
    """Times of calls on one connection, and of connections with their first call."""
    calls: list[float] = []
    connects: list[float] = []
    client = BlockingClient(address, (Leads,), is_patient=False, identity=identity)
    client.call(WhoLeads(), PATIENCE_S)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        since = time.perf_counter()
        client.call(WhoLeads(), PATIENCE_S)
        calls.append(time.perf_counter() - since)
        if len(calls) % 50 == 0:
            since = time.perf_counter()
            fresh = BlockingClient(address, (Leads,), is_patient=False, identity=identity)
            fresh.call(WhoLeads(), PATIENCE_S)
            fresh.close()
            connects.append(time.perf_counter() - since)
        time.sleep(0.001)
    client.close()
    return calls, connects


def main() -> None:
    parser = options(__doc__, "bench.strangers")
    parser.add_argument("--files", type=int, default=256, help="files that the master may open")
    parser.add_argument("--strangers", type=int, default=1000, help="unauthenticated connections")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    arguments = parser.parse_args()
    seconds = min(arguments.seconds, 2.0) if arguments.quick else arguments.seconds
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, arguments.strangers + 200)), hard))
    with measured("strangers", arguments) as result:
        table = result.table(
            "credential",
            "strangers connected",
            "connections made",
            ("call p50, ms", 3),
            ("p99", 3),
            ("connection and call p50, ms", 3),
            ("p99", 3),
            title=f"{arguments.strangers} unauthenticated clients, a master with {arguments.files} files",
        )
        for way in ("none", "key", "tls"):
            with tempfile.TemporaryDirectory() as folder:
                settings = settings_of(way, Path(folder))
                identity = Identity(SecuritySettings(**settings))  # type: ignore[arg-type]
                with master(settings, arguments.files) as address:
                    times_of_a_client(address, identity, 1.0)
                    add(table, way, 0, 0, times_of_a_client(address, identity, seconds))
                    with UnauthenticatedConnections(address, arguments.strangers) as strangers:
                        found = times_of_a_client(address, identity, seconds)
                        add(table, way, strangers.num_open, strangers.num_made, found)


def add(table: Table, way: str, num_open: int, num_made: int, found: tuple[list[float], list[float]]) -> None:
    numbers = [
        None if one is None else 1000 * one
        for times in found
        for one in (statistics.median(times), p99(times))
    ]
    table.add(way, num_open, num_made, *numbers, samples={"call_s": found[0], "connect_s": found[1]})


if __name__ == "__main__":
    main()
