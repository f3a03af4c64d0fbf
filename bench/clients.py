# SPDX-License-Identifier: Apache-2.0
"""The master with many clients: throughput, times, fairness, and what an idle cluster costs.

* Client processes that call it in closed loops: 64 at once, each a process with the store's own client; with
  ``--reference PYTHON`` (an interpreter that has the existing package, redis and hiredis) the existing
  package's clients and master, and clients of a redis-server, take turns with ours.
* A load of requests from one process that costs little per request, so that the master is the bottleneck:
  one or several requests open on each of 64 connections. Redis gets the same load, and ``redis-benchmark``.
* The same beside 1,000 other connections, idle and slow, and beside one connection that floods the master.
* An idle cluster: the processor time of master, node and connected clients.

*capacity* is operations per second of the server's processor time: what one core of its own would serve.
It is the figure to compare on a machine with few cores, where 64 client processes take most of the time from
the server, and "per s" and the times are those of the crowd. Redis and our master use one thread, the
existing package's master several.

    python -m bench.clients --reference /path/to/python
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import select
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.clients_reference import BATCH, NUM_KEYS, SIZE_BYTES, expect, keys, mine
from bench.forked_clients import ForkedClients, Operations, processor_s
from bench.report import Result, measured, options, p99
from bench.request_load import (
    Burst,
    LoadResult,
    OtherConnections,
    PutBurst,
    load,
    opened,
    our_queries,
    redis_exists,
)
from mooncake.cli.ports import free_ports
from mooncake.rpc.wire import OPEN_GREETING
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import TransferEngine, TransferSettings

HOST = "127.0.0.1"
POOL_BYTES = 1 << 30
OPERATIONS = {"exists": 1, "exists 256": BATCH, "get": 1, "put": 1}
"""Operations of client processes, and keys of each."""
PATIENCE_S = 60.0


class Cluster:
    """Our master and a node, two processes."""

    def __init__(self) -> None:
        self.port = free_ports(HOST, 1, Random())[0]
        self.address = f"{HOST}:{self.port}"
        start = [sys.executable, "-m", "mooncake"]
        quiet = ["--log-level", "warning"]
        # Patient with the node, whose heartbeats may be late where 64 clients share few cores with it.
        patient = ["--heartbeat-s", "10", "--promote-after-hits", "0"]
        master = [*start, "master", "--port", str(self.port), *patient, *quiet]
        node = [*start, "node", "--master", self.address, "--pool-size", str(POOL_BYTES), *quiet]
        self.started = [subprocess.Popen(command) for command in (master, node)]
        self.server = self.started[0].pid
        self.clients: ForkedClients | None = None

    def fill(self, num_clients: int) -> None:
        """Put the keys that are queried, and start the clients. Before this process has threads."""
        filling = ForkedClients(1, lambda _: filled(self.address))
        filling.close()
        self.clients = ForkedClients(num_clients, lambda index: our_operations(self.address, index))

    @property
    def processes(self) -> list[int]:
        return [*(one.pid for one in self.started), *(self.clients.processes if self.clients else ())]

    def measure(self, what: str, seconds: float) -> dict[str, Any]:
        assert self.clients is not None
        return self.clients.measure(what, seconds)

    def close(self) -> None:
        if self.clients is not None:
            self.clients.close()
        for process in reversed(self.started):
            process.terminate()
            process.wait(PATIENCE_S)


def client_of(address: str) -> tuple[Store, TransferEngine]:
    engine = TransferEngine(TransferSettings(transports=("shm", "tcp")))
    return Store(address, engine, StoreSettings(timeout_s=PATIENCE_S)), engine


def filled(address: str) -> Operations:
    store, engine = client_of(address)
    deadline = time.monotonic() + PATIENCE_S
    while not any(one.state == "alive" for one in store.ask(m.GetMasterStatus()).segments):
        expect(time.monotonic() < deadline, "no node was mounted")
        time.sleep(0.05)
    source = engine.allocate(SIZE_BYTES)
    for first in range(0, NUM_KEYS, BATCH):
        several = keys()[first : first + BATCH]
        expect(store.put_batch(several, [(source.address, SIZE_BYTES)] * BATCH) == [None] * BATCH, "put")
    return {}


def our_operations(address: str, index: int) -> Operations:
    store, engine = client_of(address)
    source, target = engine.allocate(SIZE_BYTES), engine.allocate(SIZE_BYTES)
    own, serial = mine(index), itertools.count()
    cycle, from_here, to_here = (
        itertools.cycle(own),
        (source.address, SIZE_BYTES),
        (target.address, SIZE_BYTES),
    )

    def put() -> None:
        expect(store.put_batch([f"put/{index:08x}/{next(serial):068x}"], [from_here]) == [None], "put")

    return {
        "exists": lambda: expect(all(store.exists([next(cycle)])), "exists"),
        "exists 256": lambda: expect(all(store.exists(own)), "exists"),
        "get": lambda: expect(store.get_batch_into([next(cycle)], [to_here]) != [None], "get"),
        "put": put,
    }


class Reference:
    """The existing package's master, or a redis-server, with its clients under another interpreter."""

    def __init__(self, system: str, python: str, num_clients: int) -> None:
        folder = Path(python).absolute().parent
        self._folder = tempfile.TemporaryDirectory()  # not in this one: our package has the same name
        self.port, other_port = free_ports(HOST, 2, Random())
        if system == "package":
            server = [str(folder / "mooncake_master"), f"--port={self.port}", f"--metrics_port={other_port}"]
        else:
            server = ["redis-server", "--port", str(self.port), "--save", "", "--bind", HOST]
        self._environment = {**os.environ, "MC_TCP_ENABLE_CONNECTION_POOL": "1", "PYTHONPATH": ""}
        self._server = self._start(server)
        time.sleep(2.0)  # neither reports on a pipe that it is ready
        self.server = self._server.pid
        script = str(Path(__file__).with_name("clients_reference.py").absolute())
        address = f"{HOST}:{self.port}" if system == "package" else str(self.port)
        self._clients = self._start([python, script, system, address, str(num_clients)])
        self.processes = [self.server, *map(int, self._answer().split()[1:])]

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self._folder.name,
            env=self._environment,
        )

    def _answer(self) -> str:
        assert self._clients.stdout is not None
        while line := self._clients.stdout.readline():
            if line.startswith(("ready", "{")):
                return line
        raise SystemExit(f"the reference ended: {self._clients.args!r}")

    def measure(self, what: str, seconds: float) -> dict[str, Any]:
        assert self._clients.stdin is not None
        self._clients.stdin.write(f"{what} {seconds}\n")
        self._clients.stdin.flush()
        found: dict[str, Any] = json.loads(self._answer())
        return found

    def close(self) -> None:
        assert self._clients.stdin is not None
        self._clients.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._clients.wait(5.0)
        for process in (self._clients, self._server):
            process.kill()
            process.wait(PATIENCE_S)
        for client in self.processes[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(client, 9)
        self._folder.cleanup()


def client_processes(
    result: Result, systems: dict[str, Cluster | Reference], num_clients: int, rounds: int, seconds: float
) -> None:
    table = result.table(
        "operation",
        "server",
        "per s",
        ("p50, ms", 3),
        ("p99, ms", 3),
        ("fewest/most of a client", 2),
        ("server, us each", 2),
        "capacity, per s",
        "capacity, keys per s",
        title=f"{num_clients} client processes in closed loops, {SIZE_BYTES} bytes each",
        note=f"Medians of {rounds} turns of {seconds:g} s each.",
    )
    for what, num_keys in OPERATIONS.items():
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for _ in range(rounds):
            for name, system in systems.items():
                before = processor_s(system.server)
                one = system.measure(what, seconds)
                one["server_s"] = (processor_s(system.server) - before) / max(1, sum(one["counts"]))
                found[name].append(one)
        for name, turns in found.items():
            middle = {
                key: statistics.median(turn[key] for turn in turns)
                if None not in map(_of(key), turns)
                else None
                for key in ("per_s", "p50_s", "p99_s", "server_s")
            }
            fairness = statistics.median(min(t["counts"]) / max(1, max(t["counts"])) for t in turns)
            times = [None if middle[key] is None else 1e3 * middle[key] for key in ("p50_s", "p99_s")]  # type: ignore[operator]
            per_call = middle["server_s"] or 0.0
            table.add(
                what,
                name,
                middle["per_s"],
                *times,
                fairness,
                1e6 * per_call,
                1 / per_call,
                num_keys / per_call,
                samples={"per_s": [turn["per_s"] for turn in turns], "calls": turns[-1]["counts"]},
                num_samples=min(sum(turn["counts"]) for turn in turns),
            )


def _of(key: str) -> Any:
    return lambda turn: turn[key]


def query(what: type[m.Exists] | type[m.LookupObjects], num_keys: int, depth: int, index: int) -> Burst:
    every = keys()
    first = [(index * depth + number) * num_keys % NUM_KEYS for number in range(depth)]
    return our_queries(what, [every[at : at + num_keys] for at in first])


def redis_query(num_keys: int, depth: int, index: int) -> Burst:
    every = keys()
    first = [(index * depth + number) * num_keys % NUM_KEYS for number in range(depth)]
    return redis_exists([every[at : at + num_keys] for at in first])


class LoadTable:
    """Loads of one process on a server, one row each."""

    def __init__(self, result: Result, title: str, rounds: int, seconds: float) -> None:
        self._rounds, self._seconds = rounds, seconds
        self._table = result.table(
            "operation",
            "server",
            "open on each of 64",
            "per s",
            "keys per s",
            ("p50, ms", 3),
            ("p99, ms", 3),
            ("fewest/most of a connection", 2),
            ("server, us each", 2),
            "capacity, per s",
            "capacity, keys per s",
            title=title,
            note=f"Medians of {rounds} turns of {seconds:g} s each. Times are those of all requests that a "
            "connection has open.",
        )

    def add(
        self,
        what: str,
        servers: Sequence[tuple[str, int, int, list[Burst], bytes | None]],
        depth: int,
        num_keys: int,
        others: OtherConnections | None = None,
    ) -> None:
        """Measure these servers (name, port, process, bursts, opening) in turns."""
        found: dict[str, list[tuple[LoadResult, float]]] = {name: [] for name, *_ in servers}
        for _ in range(self._rounds):
            for name, port, process, bursts, opening in servers:
                before = processor_s(process)
                more = {} if opening is None else {"opening": opening}
                one = load((HOST, port), bursts, self._seconds, others=others, **more)
                found[name].append((one, processor_s(process) - before))
        for name, turns in found.items():
            per_s = statistics.median(one.per_s for one, _ in turns)
            per_call = statistics.median(server_s / max(1, sum(one.counts)) for one, server_s in turns)
            times = sorted(t for one, _ in turns for of in one.times for t in of)
            late = p99(times)
            fairness = statistics.median(min(one.counts) / max(1, *one.counts) for one, _ in turns)
            self._table.add(
                what,
                name,
                depth,
                per_s,
                per_s * num_keys,
                1e3 * times[len(times) // 2],
                None if late is None else 1e3 * late,
                fairness,
                1e6 * per_call,
                1 / per_call,
                num_keys / per_call,
                samples={"per_s": [one.per_s for one, _ in turns]},
                num_samples=len(times),
            )


def saturating(result: Result, ours: Cluster, redis: Reference | None, rounds: int, seconds: float) -> None:
    table = LoadTable(result, "64 connections of one process", rounds, seconds)
    for what, depth, num_keys in (("exists", 1, 1), ("exists", 16, 1), ("exists 256", 2, BATCH)):
        servers: list[Any] = [
            (
                "ours",
                ours.port,
                ours.server,
                [query(m.Exists, num_keys, depth, i) for i in range(64)],
                None,
            )
        ]
        if redis is not None:
            bursts = [redis_query(num_keys, depth, index) for index in range(64)]
            servers.append(("redis", redis.port, redis.server, bursts, b""))
        table.add(what, servers, depth, num_keys)
    for what, depth, num_keys in (("lookup", 1, 1), ("lookup", 16, 1), ("lookup 256", 2, BATCH)):
        lookups = [query(m.LookupObjects, num_keys, depth, index) for index in range(64)]
        table.add(what, [("ours", ours.port, ours.server, lookups, None)], depth, num_keys)


def many_puts(result: Result, ours: Cluster, rounds: int, seconds: float) -> None:
    table = LoadTable(result, "Puts of 64 connections of one process", rounds, seconds)
    for what, num_keys, in_two_steps in (
        ("put, one request", 1, False),
        ("put 32, one request", 32, False),
        ("put, two requests", 1, True),
        ("put 256, two requests", BATCH, True),
    ):
        puts: list[Burst] = [PutBurst(num_keys, in_two_steps) for _ in range(64)]
        table.add(what, [("ours", ours.port, ours.server, puts, None)], 1, num_keys)


def redis_benchmark(result: Result, redis: Reference, seconds: float) -> None:
    """Redis with a client in C, which costs less than our load does."""
    table = result.table(
        "operation",
        "open on each of 64",
        "per s",
        ("p50, ms", 3),
        ("p99, ms", 3),
        ("server, us each", 2),
        "capacity, per s",
        title="Redis with redis-benchmark",
    )
    for what, depth in itertools.product(("EXISTS", "GET", "SET"), (1, 16)):
        words = [what, keys()[0], *(["x" * SIZE_BYTES] if what == "SET" else [])]
        number = int(seconds * 50_000)
        before = processor_s(redis.server)
        command = ["redis-benchmark", "-p", str(redis.port), "-c", "64", "-P", str(depth), "-n", str(number)]
        shown = subprocess.run([*command, "--csv", *words], capture_output=True, text=True, check=True).stdout
        server_s = (processor_s(redis.server) - before) / number
        # test, rps, then latencies in ms: average, least, p50, p95, p99, most
        columns = [float(one) for one in re.findall(r'"([0-9.]+)"', shown.splitlines()[-1])]
        table.add(
            *(what, depth, columns[0], columns[3], columns[5], 1e6 * server_s, 1 / server_s),
            num_samples=number,
        )


def beside_others(result: Result, ours: Cluster, rounds: int, seconds: float, num_others: int) -> None:
    table = LoadTable(result, "Single queries beside other connections", rounds, seconds)

    def singles() -> list[Burst]:
        return [query(m.Exists, 1, 1, index) for index in range(64)]

    table.add("exists, alone", [("ours", ours.port, ours.server, singles(), None)], 1, 1)
    others = OtherConnections((HOST, ours.port), num_others)
    table.add(
        f"exists beside {num_others}", [("ours", ours.port, ours.server, singles(), None)], 1, 1, others
    )
    others.close()


FLOODS = {"1,024 of 1 key": (1024, 1), "64 of 256 keys": (64, BATCH), "16 of 4,096 keys": (16, NUM_KEYS)}
"""Requests that one client has open at once, and keys of each."""


def flood(address: tuple[str, int]) -> Operations:
    """Send many requests at once, again and again; an operation takes as long as all of their replies."""
    every = keys()
    operations: Operations = {}
    for name, (depth, num_keys) in FLOODS.items():
        batches = [every[number * num_keys % NUM_KEYS :][:num_keys] for number in range(depth)]
        sock, burst = opened(address, OPEN_GREETING), our_queries(m.Exists, batches)

        def once(sock: socket.socket = sock, burst: Burst = burst) -> None:
            requests = memoryview(burst.requests())
            sock.setblocking(False)
            while True:  # sends and receives by turns: the server does not read while its replies wait
                ready = select.select([sock], [sock] if requests else [], [], PATIENCE_S)
                if ready[1]:
                    requests = requests[sock.send(requests) :]
                if ready[0] and burst.take(sock.recv(1 << 20)):
                    return

        operations[name] = once
    return operations


def beside_a_flood(
    result: Result, ours: Cluster, flooding: ForkedClients, rounds: int, seconds: float
) -> None:
    table = result.table(
        "open at once on another connection",
        "singles per s",
        ("p50, ms", 3),
        ("p99, ms", 3),
        ("fewest/most of a connection", 2),
        "its keys per s",
        title="Single queries of 16 connections beside one of another process that sends many at once",
    )
    for name in ("none", *FLOODS):
        turns: list[LoadResult] = []
        found: list[float] = []
        for _ in range(rounds):
            if name != "none":
                flooding.start(name, seconds)
            bursts = [query(m.Exists, 1, 1, index) for index in range(16)]
            turns.append(load((HOST, ours.port), bursts, seconds))
            if name != "none":
                depth, num_keys = FLOODS[name]
                found.append(flooding.finish(seconds)["per_s"] * depth * num_keys)
        times = sorted(t for one in turns for of in one.times for t in of)
        late = p99(times)
        table.add(
            name,
            statistics.median(one.per_s for one in turns),
            1e3 * times[len(times) // 2],
            None if late is None else 1e3 * late,
            statistics.median(min(one.counts) / max(1, *one.counts) for one in turns),
            statistics.median(found) if found else None,
            num_samples=len(times),
        )


def idle(result: Result, systems: dict[str, Cluster | Reference], num_others: int, seconds: float) -> None:
    table = result.table(
        "server",
        "processes",
        ("server, % of a core", 2),
        ("all, % of a core", 2),
        title="An idle cluster",
        note=f"Server, node, connected clients over {seconds:g} s; ours with {num_others} more connections.",
    )
    for name, system in systems.items():
        held = OtherConnections((HOST, system.port), num_others) if name == "ours" else None
        time.sleep(1.0)
        before = [processor_s(process) for process in system.processes]
        time.sleep(seconds)
        used = [processor_s(process) - then for process, then in zip(system.processes, before, strict=True)]
        table.add(name, len(used), 100 * used[0] / seconds, 100 * sum(used) / seconds)
        if held is not None:
            held.close()


@contextlib.contextmanager
def running(
    arguments: argparse.Namespace,
) -> Iterator[tuple[dict[str, Cluster | Reference], ForkedClients]]:
    """Run our cluster and the references, each with its clients, which are idle but in their turns, and the
    process that floods ours."""
    systems: dict[str, Cluster | Reference] = {}
    flooding: ForkedClients | None = None
    try:
        systems["ours"] = ours = Cluster()
        ours.fill(arguments.clients)
        flooding = ForkedClients(1, lambda _: flood((HOST, ours.port)))
        if arguments.reference:
            systems["package"] = Reference("package", arguments.reference, arguments.clients)
            if shutil.which("redis-server"):
                systems["redis"] = Reference("redis", arguments.reference, arguments.clients)
        yield systems, flooding
    finally:
        if flooding is not None:
            flooding.close()
        for system in systems.values():
            system.close()


def main() -> None:
    parser = options(__doc__, "bench.clients")
    parts = ("idle", "processes", "queries", "fairness", "puts")
    parser.add_argument("--part", choices=parts, default="", help="one of the measurements instead of all")
    parser.add_argument("--clients", type=int, default=64, help="client processes")
    parser.add_argument(
        "--others", type=int, default=936, help="idle and slow connections beside 64 active ones"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of each turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each measurement")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="seconds of watching idle processes")
    parser.add_argument(
        "--reference", default="", help="interpreter with the existing package, redis and hiredis"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.clients, arguments.seconds, arguments.rounds = min(arguments.clients, 8), 0.5, 1
        arguments.idle_seconds = min(arguments.idle_seconds, 2.0)
    rounds, seconds = arguments.rounds, arguments.seconds
    name = f"clients-{arguments.part}" if arguments.part else "clients"
    words = shlex.join(word for word in sys.argv[1:] if word not in ("--save", "--json"))
    command = f"python -m bench.clients {words}".strip()
    with measured(name, arguments, command) as result, running(arguments) as (systems, flooding):
        ours, redis = systems["ours"], systems.get("redis")
        assert isinstance(ours, Cluster) and not isinstance(redis, Cluster)
        if arguments.part in ("", "idle"):
            idle(result, systems, arguments.others, arguments.idle_seconds)
        if arguments.part in ("", "processes"):
            client_processes(result, systems, arguments.clients, rounds, seconds)
        if arguments.part in ("", "queries"):
            saturating(result, ours, redis, rounds, seconds)
            if redis is not None and shutil.which("redis-benchmark"):
                redis_benchmark(result, redis, seconds)
        if arguments.part in ("", "fairness"):
            beside_others(result, ours, rounds, seconds, arguments.others)
            beside_a_flood(result, ours, flooding, rounds, seconds)
        if arguments.part in ("", "puts"):  # last: they may evict what is queried
            many_puts(result, ours, rounds, seconds)


if __name__ == "__main__":
    main()
