# SPDX-License-Identifier: Apache-2.0
"""How fast the store is for one client: metadata calls, single objects, batches; the references beside them.

Run ``python -m bench.store`` (``--json`` for programs, ``--quick`` for a short run). Master, node and client
are three processes on this host; the client has one thread. Checksums are on, as always: a put computes them,
a get verifies them.

The limit of a row is named beside it. On the paths ``shm`` and ``tcp`` it is one thread copying the same
bytes between the same kinds of memory, as one call of ours uses one thread, too. On path ``ssd``, where
durable puts are answered when a copy is on disk and gets find none in memory, it is fio on the same disk: for
flushed puts as many jobs as there are objects, each of which writes one and calls fdatasync; for puts that
are not flushed (``--no-ssd-flush``, which does not survive a power loss) and for gets, fio with as many
requests under way, which does not flush either.

Redis runs beside it if redis-server and a C compiler are installed: ``redis_client.c`` is its client in C.
With ``--reference PYTHON`` (or ``BENCH_REFERENCE``), an interpreter that has the existing package, the
package's master, node and client run as well, and if that interpreter has ``redis``, Redis' client for
Python, whose parser is named, because it is a large part of a big get. The package and Redis use tcp on both
paths: the package has no shared memory between processes, and the column says so. All take turns, because on
a shared machine only adjacent measurements can be compared. Sources are read in a cycle and every key is new,
so nothing comes from the processor's cache.

What it cannot show: a real network, many clients at once, NUMA, latency under load, and first touches: the
pool is written once before the clock starts, because a long-running node's memory has all been used.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from bench.report import (
    FASTER_THAN,
    LIMIT,
    OF_LIMIT,
    OVER,
    Cell,
    Result,
    Table,
    measured,
    options,
    p99,
)
from mooncake.cli.bench.ceilings import READ, WRITE, DurableFio, Fio
from mooncake.cli.ports import free_ports
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import Region, TransferEngine, TransferSettings

KIB, MIB = 1 << 10, 1 << 20
WINDOW_BYTES = 512 * MIB
POOL_BYTES = 768 * MIB
LEASE_S = 0.2
SIZES = [("4 KiB", 4 * KIB), ("64 KiB", 64 * KIB), ("1 MiB", MIB), ("16 MiB", 16 * MIB)]
BATCH = 128
MOST_THREADS = 16
PLAIN, DURABLE = m.PutPolicy(), m.PutPolicy(is_durable=True)
MEMCPY = "memcpy, one thread"
IN_A_ROW = 32
"""A small operation that follows a wait for others finds its code in no cache: both cases are shown."""


@dataclass
class Row:
    """One line of the table."""

    path: str
    what: str
    p50_us: float
    p99_us: float | None
    "None: too few samples to have one."
    keys_per_s: float
    gb_s: float | None = None
    limit: str = ""
    limit_gb_s: float | None = None
    others_us: dict[str, float] = field(default_factory=dict)
    "Median time of each system in ``References.systems`` that has this call."
    samples: dict[str, list[float]] = field(default_factory=dict)
    "In seconds."

    def faster_than(self, system: str) -> float | None:
        """Ratio to the system's time; None when it did not run."""
        return self.others_us[system] / self.p50_us if system in self.others_us else None

    @property
    def ratio(self) -> float | None:
        return None if self.gb_s is None or not self.limit_gb_s else self.gb_s / self.limit_gb_s


@contextmanager
def running_store(pool_bytes: int, *node_flags: str, lease_s: float = LEASE_S) -> Iterator[str]:
    """Run a master and a node; yield the master's address."""
    port = free_ports("127.0.0.1", 1, Random())[0]
    address = f"127.0.0.1:{port}"
    # Short leases, so that the bench may overwrite what it has just read.
    quiet = ["--log-level", "warning"]
    start = [sys.executable, "-m", "mooncake"]
    master = [*start, "master", "--port", str(port), "--promote-after-hits", "0", "--lease-s", str(lease_s)]
    node = [*start, "node", "--master", address, "--pool-size", str(pool_bytes), *node_flags]
    processes = [subprocess.Popen(command) for command in ([*master, *quiet], [*node, *quiet])]
    try:
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(20)


PACKAGE, REDIS_C, REDIS_PY = "package", "redis, C", "redis, Python"


class References:
    """The systems to compare with that are there: Redis, by a client in C, and what an interpreter ``python``
    has: the existing package, and Redis' client for Python (``store_reference.py``). ``missing``: why others
    are not."""

    def __init__(self, python: str | None) -> None:
        # Not in this folder: our package has the same name as the other.
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[str]] = []
        self._clients: dict[str, subprocess.Popen[str]] = {}
        self.missing: list[str] = []
        self.parser = ""
        """Parser of Redis' client for Python."""
        port, metrics_port, redis_port = free_ports("127.0.0.1", 3, Random())
        has_redis = shutil.which("redis-server") is not None
        if has_redis:
            self._start("redis-server", "--port", str(redis_port), "--save", "", "--bind", "127.0.0.1")
        else:
            self.missing.append("Redis, for redis-server is not installed (apt-get install redis-server)")
        if python is not None:
            folder = Path(python).absolute().parent
            words = [str(folder / "mooncake_master"), f"--port={port}", f"--metrics_port={metrics_port}"]
            self._start(*words)
        time.sleep(2.0)  # neither reports on a pipe that it is ready
        if python is not None:
            self._start_package(python, f"127.0.0.1:{port}", redis_port if has_redis else 0)
        else:
            self.missing.append("the existing package, for --reference PYTHON is not given")
        if has_redis:
            self._start_redis_client(redis_port)

    @property
    def systems(self) -> list[str]:
        return list(self._clients)

    def _start_package(self, python: str, master: str, redis_port: int) -> None:
        script = str(Path(__file__).with_name("store_reference.py").absolute())
        if redis_port and subprocess.run([python, "-c", "import redis"], capture_output=True).returncode:
            self.missing.append("Redis' client for Python, for that interpreter does not have it")
            redis_port = 0
        answer_of(self._start(python, script, master))
        client = self._start(python, script, master, str(redis_port))
        self.parser = answer_of(client).partition(" ")[2].strip()
        self._clients[PACKAGE] = client
        if redis_port:
            self._clients[REDIS_PY] = client

    def _start_redis_client(self, port: int) -> None:
        source, program = Path(__file__).with_name("redis_client.c"), f"{self._folder.name}/redis_client"
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            self.missing.append("Redis by a client in C, for there is no C compiler")
            return
        subprocess.run([compiler, "-O2", "-o", program, str(source.absolute())], check=True)
        client = self._start(program, str(port), str(WINDOW_BYTES // 2))
        answer_of(client)
        self._clients[REDIS_C] = client

    def _start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self._folder.name,
            env={**os.environ, "MC_TCP_ENABLE_CONNECTION_POOL": "1", "PYTHONPATH": ""},
        )
        self._processes.append(process)
        return process

    def time(self, system: str, what: str, size: int, count: int, times: int = 1) -> float:
        """Seconds per call of ``times`` in a row."""
        client = self._clients[system]
        assert client.stdin is not None
        words = [] if system == REDIS_C else ["package" if system == PACKAGE else "redis"]
        client.stdin.write(" ".join([*words, what, str(size), str(count), f"{times}\n"]))
        client.stdin.flush()
        return float(answer_of(client))

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(20)
        self._folder.cleanup()


def answer_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith("ready") or line[0].isdigit():
            return line
    raise SystemExit(f"the reference ended: {process.args!r}")


class Bench:
    """One client and the memory it puts from and gets into."""

    def __init__(self, address: str, path: str, num_rounds: int, references: References | None) -> None:
        self.path = path
        self.references = references
        self.systems = [] if references is None else references.systems
        self.num_rounds = num_rounds
        transports = ("shm", "tcp") if path == "shm" else (path,)
        self.engine = TransferEngine(TransferSettings(transports=transports))
        self.store = Store(address, self.engine, StoreSettings(timeout_s=30.0))
        self.source = self.engine.allocate(WINDOW_BYTES)
        self.target = self.engine.allocate(WINDOW_BYTES)
        np.asarray(self.source.view())[:] = np.random.default_rng(0).integers(
            0, 256, WINDOW_BYTES, dtype=np.uint8
        )
        self._num_keys = 0
        self._at = 0
        self._threads: ThreadPoolExecutor | None = None

    def wait_until_mounted(self, num_segments: int = 1) -> None:
        deadline = time.monotonic() + 60
        while sum(s.state == "alive" for s in self.store.ask(m.GetMasterStatus()).segments) < num_segments:
            assert time.monotonic() < deadline, "no node was mounted"
            time.sleep(0.05)

    def touch_pool(self) -> None:
        """Write all of the pool once, and drop it."""
        count = POOL_BYTES // (16 * MIB)
        keys = self.new_keys(count)
        for key in keys:
            assert self.store.put(key, self.pieces(self.source, 16 * MIB, 1)[0]) is None
        self.store.remove(keys)

    def new_keys(self, count: int) -> list[str]:
        self._num_keys += count
        return [f"kv/0123456789abcdef/{self._num_keys - i:064x}" for i in range(count)]

    def pieces(self, region: Region, size: int, count: int) -> list[tuple[int, int]]:
        """(address, size) of the next ``count`` pieces of the window."""
        if self._at + size * count > WINDOW_BYTES:
            self._at = 0
        first = region.address + self._at
        self._at += size * count
        return [(first + i * size, size) for i in range(count)]

    def memcpy(self, size: int, count: int) -> float:
        """Seconds one thread takes to copy as many bytes."""
        sources = self.pieces(self.source, size, count)
        targets = self.pieces(self.target, size, count)
        began = time.perf_counter()
        for (source, _), (target, _) in zip(sources, targets, strict=True):
            ctypes.memmove(target, source, size)
        return time.perf_counter() - began

    def put_and_get(self, name: str, size: int, count: int) -> list[Row]:
        puts, gets, copies, views = [], [], [], []
        others: dict[tuple[str, str], list[float]] = {}
        for _ in range(self.num_rounds if size * count < 8 * MIB else max(5, self.num_rounds // 20)):
            keys = self.new_keys(count)
            copies.append(self.memcpy(size, count))
            source = self.pieces(self.source, size, count)
            puts.append(timed(lambda k=keys, s=source: self.put(k, s)))  # type: ignore[misc]
            target = self.pieces(self.target, size, count)
            gets.append(timed(lambda k=keys, t=target: self.get(k, t)))  # type: ignore[misc]
            if count == 1:
                views.append(timed(lambda k=keys: self.look(k[0])))  # type: ignore[misc]
            for system, what in itertools.product(self.systems, ("put", "get")):
                others.setdefault((system, what), []).append(self.other(system, what, size, count))
            # The lease of the get protects the objects for a while; many small ones have room for that.
            if self._num_keys % 64 == 0 or size * count >= MIB:
                self.store.remove(keys, force=True)
            if size * count >= 8 * MIB:
                time.sleep(LEASE_S * 1.5)
        rows = []
        for what, times in (("put", puts), ("get", gets)):
            row = self.row(f"{what} {name}", times, count, size, MEMCPY, copies)
            compare(row, others, what)
            rows.append(row)
        if views and self.path == "shm":
            rows.append(self.row(f"view {name}, unverified", views, 1))
        return rows

    def in_a_row(self, name: str, size: int) -> list[Row]:
        """Small objects as programs move them: many in a row, instead of one per turn."""
        ours: dict[str, list[float]] = {"put": [], "exists": [], "get": []}
        others: dict[tuple[str, str], list[float]] = {}
        for _ in range(self.num_rounds):
            keys = self.new_keys(IN_A_ROW)
            source, target = (
                self.pieces(self.source, size, IN_A_ROW),
                self.pieces(self.target, size, IN_A_ROW),
            )
            actions: dict[str, Callable[[str, tuple[int, int], tuple[int, int]], object]] = {
                "put": lambda key, from_here, _: self.put([key], [from_here]),
                "exists": lambda key, *_: self.store.exists([key]),
                "get": lambda key, _, to_here: self.get([key], [to_here]),
            }
            for what, action in actions.items():
                began = time.perf_counter()
                for arguments in zip(keys, source, target, strict=True):
                    action(*arguments)
                ours[what].append((time.perf_counter() - began) / IN_A_ROW)
                for system in self.systems:
                    if what != "exists" or system == PACKAGE:
                        seconds = self.other(system, what, size, 1, IN_A_ROW)
                        others.setdefault((system, what), []).append(seconds)
            self.store.remove(keys, force=True)
        rows = []
        for what, samples in ours.items():
            row = self.row(f"{what} {name}, {IN_A_ROW} in a row", samples, 1)
            compare(row, others, what)
            rows.append(row)
        return rows

    def put(self, keys: list[str], source: list[tuple[int, int]], policy: m.PutPolicy = PLAIN) -> None:
        refused = [one for one in self.store.put_batch(keys, source, policy) if one is not None]
        assert not refused, f"a refused put is not a fast one: {refused[0]}"

    def get(self, keys: list[str], target: list[tuple[int, int]]) -> None:
        assert None not in self.store.get_batch_into(keys, target), "a miss is not a fast get"

    def look(self, key: str) -> None:
        with self.store.view(key, verify=False) as view:
            assert view is not None

    def other(self, system: str, what: str, size: int, count: int, times: int = 1) -> float:
        assert self.references is not None
        return self.references.time(system, what, size, count, times)

    def ssd(self, fio: Fio, durable_fio: DurableFio, count: int, is_flushed: bool) -> list[Row]:
        """Batches of durable puts, gets of them, and single durable puts by as many threads."""
        puts, gets, singles = list[float](), list[float](), list[float]()
        put_limits, get_limits = list[float](), list[float]()
        for _ in range(max(5, self.num_rounds // 10)):
            keys, others = self.new_keys(count), self.new_keys(count)
            source, target = self.pieces(self.source, MIB, count), self.pieces(self.target, MIB, count)
            puts.append(timed(lambda k=keys, s=source: self.put(k, s, DURABLE)))  # type: ignore[misc]
            if 1 < count <= MOST_THREADS and is_flushed:
                singles.append(self.put_at_once(others, source))
            if is_flushed:
                put_limits.append(durable_fio.write(MIB, count))
            else:
                put_limits.append(MIB * count / fio.move(WRITE, MIB, count, count).gb_s / 1e9)
            assert all(self.store.drop_replicas(keys)), "what is in memory would not be read from disk"
            gets.append(timed(lambda k=keys, t=target: self.get(k, t)))  # type: ignore[misc]
            get_limits.append(MIB * count / fio.move(READ, MIB, count, count).gb_s / 1e9)
            self.store.remove([*keys, *others] if singles else keys, force=True)
            time.sleep(0.02 * count)  # until enough leases have ended for the next
        name = "durable put, flushed" if is_flushed else "durable put, not flushed"
        limit = f"fio fdatasync, {count} job{'s' * (count > 1)}" if is_flushed else "fio"
        rows = [self.row(f"{name} {count} x 1 MiB", puts, count, MIB, limit, put_limits)]
        if singles:
            what = f"{name} 1 MiB by {count} threads"
            rows.append(self.row(what, singles, count, MIB, limit, put_limits))
        if is_flushed:  # else the same
            rows.append(self.row(f"get {count} x 1 MiB", gets, count, MIB, "fio", get_limits))
        for row in rows:
            row.path = "ssd"
        return rows

    def put_at_once(self, keys: list[str], source: list[tuple[int, int]]) -> float:
        """Seconds that as many threads take for one put each."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MOST_THREADS)
        began = time.perf_counter()
        # list() raises what a put has raised
        list(
            self._threads.map(
                lambda one: self.put([one[0]], [one[1]], DURABLE), zip(keys, source, strict=True)
            )
        )
        return time.perf_counter() - began

    def exists(self, count: int) -> Row:
        keys = self.new_keys(count)
        self.store.put_batch(keys, self.pieces(self.source, KIB, count))
        others: list[float] = []
        has_package = PACKAGE in self.systems
        if has_package:
            self.other(PACKAGE, "put", KIB, count)
        times = []
        for _ in range(self.num_rounds * 10):
            times.append(timed(lambda: self.store.exists(keys)))
            if has_package:
                others.append(self.other(PACKAGE, "exists", KIB, count))
        if has_package:
            self.other(PACKAGE, "get", KIB, count)  # every put is read once
        row = self.row(f"exists, {count} keys", times, count)
        compare(row, {(PACKAGE, "exists"): others} if others else {}, "exists")
        return row

    def row(
        self,
        what: str,
        times: list[float],
        count: int,
        size: int = 0,
        limit: str = "",
        limit_times: list[float] | None = None,
    ) -> Row:
        """The row of these times; with a limit that moved as many bytes of ``size`` in its times."""
        median = statistics.median(times)
        rare = p99(times)
        row = Row(self.path, what, median * 1e6, None if rare is None else rare * 1e6, count / median)
        row.samples["ours_s"] = times
        if limit_times:
            row.gb_s = size * count / median / 1e9
            row.limit, row.limit_gb_s = limit, size * count / statistics.median(limit_times) / 1e9
            row.samples["limit_s"] = limit_times
        return row

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        self.store.close()
        self.engine.close()


def compare(row: Row, others: dict[tuple[str, str], list[float]], what: str) -> None:
    """The references' times of the same rounds."""
    row.samples |= {f"{system}_s": times for (system, call), times in others.items() if call == what}
    row.others_us |= {
        system: statistics.median(times) * 1e6 for (system, call), times in others.items() if call == what
    }


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure_ssd(num_rounds: int, is_quick: bool) -> list[Row]:
    """Batches to and from the SSD tier, and fio on the same disk in turn; with flushes, and without."""
    size_bytes = 1 << 30
    rows: list[Row] = []
    for is_flushed in (True, False):
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
            flags = ["--ssd-path", f"{folder}/ssd", "--ssd-size", str(size_bytes)]
            flags += [] if is_flushed else ["--no-ssd-flush"]
            fio = Fio(Path(folder) / "fio", WINDOW_BYTES, TransferSettings().file_depth)
            durable_fio = DurableFio(Path(folder) / "fio", WINDOW_BYTES)
            with running_store(POOL_BYTES, *flags, lease_s=2.0) as address:
                bench = Bench(address, "shm", num_rounds, None)
                try:
                    bench.wait_until_mounted(2)
                    bench.touch_pool()
                    for count in (1, 16) if is_quick else (1, 16, BATCH):
                        rows += bench.ssd(fio, durable_fio, count, is_flushed)
                finally:
                    bench.close()
    return rows


def measure(path: str, num_rounds: int, references: References | None) -> list[Row]:
    with running_store(POOL_BYTES) as address:
        bench = Bench(address, path, num_rounds, references)
        try:
            bench.wait_until_mounted()
            bench.touch_pool()
            rows = [bench.exists(1), bench.exists(256)] if path == "shm" else []
            for name, size in SIZES:
                rows += bench.put_and_get(name, size, 1)
                rows += bench.in_a_row(name, size) if size < MIB else []
            rows += bench.put_and_get(f"{BATCH} x 1 MiB", MIB, BATCH)
            return rows
        finally:
            bench.close()


def columns_of(systems: list[str]) -> list[str | tuple[str, int]]:
    columns: list[str | tuple[str, int]] = ["path", "what", ("p50 us", 1), ("p99 us", 1), "keys/s"]
    columns += [("GB/s", 2), LIMIT, ("its GB/s", 2), (OF_LIMIT, 2)]
    for system in systems:
        columns += [(f"{system}, us", 1), OVER, (f"{FASTER_THAN}{system}", 2)]
    return columns


def show(table: Table, row: Row, systems: list[str]) -> None:
    cells: list[Cell] = [row.path, row.what, row.p50_us, row.p99_us, row.keys_per_s]
    cells += [row.gb_s, row.limit, row.limit_gb_s, row.ratio]
    for system in systems:
        is_there = system in row.others_us
        cells += [row.others_us.get(system), "tcp" if is_there else "", row.faster_than(system)]
    table.add(*cells, samples=row.samples)


def add_notes(result: Result, references: References | None) -> None:
    result.note("p99: only of 100 samples or more")
    if references is not None and references.systems:
        result.note("faster than: how many times the other's time is ours; over: how its bytes travelled")
    if references is not None and PACKAGE in references.systems:
        result.note(
            "package: over tcp beside our shared memory, too, which it does not have between processes"
        )
    if references is not None and REDIS_C in references.systems:
        result.note(
            "redis, C: one connection, values sent and received without a copy (bench/redis_client.c)"
        )
    if references is not None and references.parser:
        result.note(f"redis, Python: redis-py with {references.parser}, most of the time of a large get")
    for one in [] if references is None else references.missing:
        result.note(f"NOT RUN: {one}")
    result.note("not shown: a real network, many clients, NUMA, latency under load, first touches of memory")


def main() -> None:
    parser = options(__doc__, "bench.store")
    parser.add_argument(
        "--path", choices=("shm", "tcp", "ssd", "all"), default="all", help="how bytes travel"
    )
    parser.add_argument(
        "--reference",
        metavar="PYTHON",
        default=os.environ.get("BENCH_REFERENCE"),
        help="an interpreter that has the existing package; default: $BENCH_REFERENCE",
    )
    given = parser.parse_args()
    paths = [path for path in ("shm", "tcp") if given.path in (path, "all")]
    num_rounds = 20 if given.quick else 200
    references = References(given.reference) if paths else None
    systems = [] if references is None else references.systems
    command = f"python -m bench.store{' --reference PYTHON' * (PACKAGE in systems)}"
    command += f"{' --quick' * given.quick}{f' --path {given.path}' * (given.path != 'all')}"
    try:
        with measured("store", given, command) as result:
            table = result.table(*columns_of(systems))
            for path in paths:
                for row in measure(path, num_rounds, references):
                    show(table, row, systems)
            if given.path in ("ssd", "all"):
                if shutil.which("fio") is None:
                    result.note("NOT RUN: path ssd, for fio is not installed (apt-get install fio)")
                else:
                    for row in measure_ssd(num_rounds, given.quick):
                        show(table, row, systems)
            add_notes(result, references)
    finally:
        if references is not None:
            references.close()


if __name__ == "__main__":
    main()
