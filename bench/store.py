# SPDX-License-Identifier: Apache-2.0
"""How fast the store is for one client: metadata calls, single objects, batches; the references beside them.

Run ``python -m bench.store`` (``--json`` for programs, ``--quick`` for a short run). Master, node and client
are three processes on this host; the client has one thread. Checksums are on, as always: a put computes them,
a get verifies them. The ceiling is one thread copying the same bytes between the same kinds of memory; on
path ``ssd``, where durable puts are answered when a copy is on disk and gets find none in memory, it is fio
on the same disk with as many requests under way, which does not flush the disk's own cache. Durable puts are
shown both ways: flushed, as nodes do by default, and not flushed (``--no-ssd-flush``), which does not survive
a power loss and is what fio does. With ``--reference PYTHON``, an interpreter that has the existing package
(and ``redis``, if a redis-server is to be compared), its master, node and client run as well, over tcp on
both paths: it has no shared memory between processes. Redis is used through its Python client, whose parser
is a large part of a big get. All take turns, because on a shared machine only adjacent measurements can be
compared. Sources are read in a cycle and every key is new, so nothing comes from the processor's cache.

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from bench.report import Cell, Table, measured, options, p99
from mooncake.cli.bench.ceilings import READ, WRITE, Fio
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
    ceiling_gb_s: float | None = None
    package_us: float | None = None
    redis_us: float | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    "In seconds."

    def faster_than(self, reference_us: float | None) -> float | None:
        """Ratio to the reference's time; None when the reference did not run."""
        return None if reference_us is None else reference_us / self.p50_us

    @property
    def ratio(self) -> float | None:
        return None if self.gb_s is None or not self.ceiling_gb_s else self.gb_s / self.ceiling_gb_s


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


class Reference:
    """The existing package, and Redis if both it and its client are there; see ``store_reference.py``."""

    def __init__(self, python: str) -> None:
        script = str(Path(__file__).with_name("store_reference.py").absolute())
        folder = Path(python).absolute().parent
        port, metrics_port, redis_port = free_ports("127.0.0.1", 3, Random())
        master = f"127.0.0.1:{port}"
        # Not in this folder: our package has the same name.
        self._folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "MC_TCP_ENABLE_CONNECTION_POOL": "1", "PYTHONPATH": ""}
        self._processes: list[subprocess.Popen[str]] = []

        def start(*command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=self._folder.name,
                env=environment,
            )
            self._processes.append(process)
            return process

        start(str(folder / "mooncake_master"), f"--port={port}", f"--metrics_port={metrics_port}")
        has_redis = shutil.which("redis-server") is not None
        has_redis &= subprocess.run([python, "-c", "import redis"], capture_output=True).returncode == 0
        if has_redis:
            start("redis-server", "--port", str(redis_port), "--save", "", "--bind", "127.0.0.1")
        self.systems = ["package", "redis"] if has_redis else ["package"]
        time.sleep(2.0)  # neither reports on a pipe that it is ready
        answer_of(start(python, script, master))
        self._client = start(python, script, master, str(redis_port if has_redis else 0))
        answer_of(self._client)

    def time(self, system: str, what: str, size: int, count: int, times: int = 1) -> float:
        """Seconds per call of ``times`` in a row."""
        assert self._client.stdin is not None
        self._client.stdin.write(f"{system} {what} {size} {count} {times}\n")
        self._client.stdin.flush()
        return float(answer_of(self._client))

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(20)
        self._folder.cleanup()


def answer_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.strip() == "ready" or line[0].isdigit():
            return line
    raise SystemExit(f"the reference ended: {process.args!r}")


class Bench:
    """One client and the memory it puts from and gets into."""

    def __init__(self, address: str, path: str, num_rounds: int, reference: Reference | None) -> None:
        self.path = path
        self.reference = reference
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
            if self.reference is not None:
                for system, what in itertools.product(self.reference.systems, ("put", "get")):
                    seconds = self.reference.time(system, what, size, count)
                    others.setdefault((system, what), []).append(seconds)
            # The lease of the get protects the objects for a while; many small ones have room for that.
            if self._num_keys % 64 == 0 or size * count >= MIB:
                self.store.remove(keys, force=True)
            if size * count >= 8 * MIB:
                time.sleep(LEASE_S * 1.5)
        rows = []
        reference = size * count / statistics.median(copies) / 1e9
        for what, times in (("put", puts), ("get", gets)):
            gb_s = size * count / statistics.median(times) / 1e9
            row = self.row(f"{what} {name}", times, count, gb_s, reference)
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
                for system in self.reference.systems if self.reference is not None else ():
                    if what != "exists" or system == "package":
                        assert self.reference is not None
                        seconds = self.reference.time(system, what, size, 1, IN_A_ROW)
                        others.setdefault((system, what), []).append(seconds)
            self.store.remove(keys, force=True)
        rows = []
        for what, samples in ours.items():
            row = self.row(f"{what} {name}, {IN_A_ROW} in a row", samples, 1)
            compare(row, others, what)
            rows.append(row)
        return rows

    def put(self, keys: list[str], source: list[tuple[int, int]]) -> None:
        refused = [outcome for outcome in self.store.put_batch(keys, source) if outcome is not None]
        assert not refused, f"a refused put is not a fast one: {refused[0]}"

    def get(self, keys: list[str], target: list[tuple[int, int]]) -> None:
        assert None not in self.store.get_batch_into(keys, target), "a miss is not a fast get"

    def look(self, key: str) -> None:
        with self.store.view(key, verify=False) as view:
            assert view is not None

    def ssd(self, fio: Fio, count: int, is_flushed: bool) -> list[Row]:
        puts, gets, ceilings = [], [], {WRITE: list[float](), READ: list[float]()}
        for _ in range(max(5, self.num_rounds // 10)):
            keys = self.new_keys(count)
            source, target = self.pieces(self.source, MIB, count), self.pieces(self.target, MIB, count)
            durable = m.PutPolicy(is_durable=True)
            began = time.perf_counter()
            refused = [one for one in self.store.put_batch(keys, source, durable) if one is not None]
            puts.append(time.perf_counter() - began)
            assert not refused, f"a refused put is not a fast one: {refused[0]}"
            assert all(self.store.drop_replicas(keys)), "what is in memory would not be read from disk"
            gets.append(timed(lambda k=keys, t=target: self.get(k, t)))  # type: ignore[misc]
            for op, samples in ceilings.items():
                samples.append(fio.move(op, MIB, count, count).gb_s)
            self.store.remove(keys, force=True)
            time.sleep(0.02 * count)  # until enough leases have ended for the next
        rows = []
        put = "durable put, flushed" if is_flushed else "durable put, not flushed"
        for what, times, ceiling in ((put, puts, WRITE), ("get", gets, READ)):
            if what == "get" and not is_flushed:
                continue  # the same as with flushes
            gb_s = MIB * count / statistics.median(times) / 1e9
            rows.append(
                self.row(f"{what} {count} x 1 MiB", times, count, gb_s, statistics.median(ceilings[ceiling]))
            )
            rows[-1].path = "ssd"
        return rows

    def exists(self, count: int) -> Row:
        keys = self.new_keys(count)
        self.store.put_batch(keys, self.pieces(self.source, KIB, count))
        others: list[float] = []
        if self.reference is not None:
            self.reference.time("package", "put", KIB, count)
        times = []
        for _ in range(self.num_rounds * 10):
            times.append(timed(lambda: self.store.exists(keys)))
            if self.reference is not None:
                others.append(self.reference.time("package", "exists", KIB, count))
        if self.reference is not None:
            self.reference.time("package", "get", KIB, count)  # every put is read once
        row = self.row(f"exists, {count} keys", times, count)
        row.package_us = statistics.median(others) * 1e6 if others else None
        return row

    def row(
        self,
        what: str,
        times: list[float],
        count: int,
        gb_s: float | None = None,
        memcpy: float | None = None,
    ) -> Row:
        median = statistics.median(times)
        rare = p99(times)
        p99_us = None if rare is None else rare * 1e6
        samples = {"ours_s": times}
        return Row(self.path, what, median * 1e6, p99_us, count / median, gb_s, memcpy, samples=samples)

    def close(self) -> None:
        self.store.close()
        self.engine.close()


def compare(row: Row, others: dict[tuple[str, str], list[float]], what: str) -> None:
    """The references' times of the same rounds."""
    row.samples |= {f"{system}_s": times for (system, call), times in others.items() if call == what}
    row.package_us, row.redis_us = (
        statistics.median(others[system, what]) * 1e6 if (system, what) in others else None
        for system in ("package", "redis")
    )


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
            with running_store(POOL_BYTES, *flags, lease_s=2.0) as address:
                bench = Bench(address, "shm", num_rounds, None)
                try:
                    bench.wait_until_mounted(2)
                    bench.touch_pool()
                    for count in (1, 16) if is_quick else (1, 16, BATCH):
                        rows += bench.ssd(fio, count, is_flushed)
                finally:
                    bench.close()
    return rows


def measure(path: str, num_rounds: int, reference: Reference | None) -> list[Row]:
    with running_store(POOL_BYTES) as address:
        bench = Bench(address, path, num_rounds, reference)
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


def show(table: Table, row: Row, has_reference: bool) -> None:
    cells: list[Cell] = [row.path, row.what, row.p50_us, row.p99_us, row.keys_per_s]
    cells += [row.gb_s, row.ceiling_gb_s, row.ratio]
    if has_reference:
        for reference_us in (row.package_us, row.redis_us):
            cells += [reference_us, row.faster_than(reference_us)]
    table.add(*cells, samples=row.samples)


def main() -> None:
    parser = options(__doc__, "bench.store")
    parser.add_argument(
        "--path", choices=("shm", "tcp", "ssd", "all"), default="all", help="how bytes travel"
    )
    parser.add_argument("--reference", metavar="PYTHON", help="an interpreter that has the existing package")
    given = parser.parse_args()
    paths = [path for path in ("shm", "tcp") if given.path in (path, "all")]
    num_rounds = 20 if given.quick else 200
    reference = Reference(given.reference) if given.reference else None
    command = f"python -m bench.store{' --reference PYTHON' * (reference is not None)}"
    command += f"{' --quick' * given.quick}{f' --path {given.path}' * (given.path != 'all')}"
    columns: list[str | tuple[str, int]] = ["path", "what", ("p50 us", 1), ("p99 us", 1), "keys/s"]
    columns += [("GB/s", 2), ("ceiling", 2), ("ratio", 2)]
    if reference is not None:
        columns += [("package us", 1), ("faster", 2), ("redis us", 1), ("faster than it", 2)]
    try:
        with measured("store", given, command) as result:
            table = result.table(*columns)
            for path in paths:
                for row in measure(path, num_rounds, reference):
                    show(table, row, reference is not None)
            if given.path in ("ssd", "all"):
                if shutil.which("fio") is None:
                    result.note("NOT RUN: path ssd, for fio is not installed (apt-get install fio)")
                else:
                    for row in measure_ssd(num_rounds, given.quick):
                        show(table, row, reference is not None)
            result.note("p99: only of 100 samples or more")
            if reference is not None:
                result.note("faster: how many times the reference's time is ours")
                result.note("package: over tcp, beside our shared memory too, which it does not have")
                result.note("redis: through its client for Python, whose parser takes most of a large get")
            result.note(
                "not shown: a real network, many clients, NUMA, latency under load, first touches of memory"
            )
    finally:
        if reference is not None:
            reference.close()


if __name__ == "__main__":
    main()
