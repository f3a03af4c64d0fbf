"""How close transfers come to the machine: shm against memcpy, tcp against a C program's socket stream.

Run ``python bench/transfer.py`` (``--json`` for programs, ``--quick`` for a look). Two processes on one
host, one client thread, huge-page memory on both sides, a window of 256 MiB walked through so that
neither side works from the cache. ``+crc`` rows also compute CRC32C of every slice. Reference and
measured code take turns; a ratio is a ratio of medians over rounds, because on a shared machine only
neighbours in time can be compared.

What it cannot show: a real network (loopback has no wire, and both ends share the cores), many clients,
NUMA, and latency under load.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mooncake.transfer import Op, Region, Segment, Status, TransferEngine, TransferSettings
from mooncake.transfer.segment import Column, decode_descriptor

COMMAND = " ".join(["python -m bench.transfer", *sys.argv[1:]])
WINDOW_BYTES = 256 << 20
ROUND_BYTES = 32 << 20
SHAPES = [
    ("4 KiB", 4 << 10, 1),
    ("64 KiB", 64 << 10, 1),
    ("1 MiB", 1 << 20, 1),
    ("16 MiB", 16 << 20, 1),
    ("128 MiB", 128 << 20, 1),
    ("512 x 128 KiB", 128 << 10, 512),
]


@dataclass
class Row:
    """One line of the table."""

    path: str
    op: str
    shape: str
    reference: str
    reference_gb_s: float
    ours_gb_s: float
    ratio: float
    p50_us: float
    p99_us: float
    reference_p50_us: float | None = None


class Reference:
    """The C program, as two processes."""

    def __init__(self, folder: str) -> None:
        program = f"{folder}/raw_stream"
        subprocess.run(
            [os.environ.get("CC", "cc"), "-O2", "-o", program, str(Path(__file__).with_name("raw_stream.c"))],
            check=True,
        )
        self._server = subprocess.Popen([program, "serve"], stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        port = self._server.stdout.readline().strip()
        self._driver = subprocess.Popen(
            [program, "drive", port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, kind: str, size: int, count: int) -> float:
        assert self._driver.stdin is not None and self._driver.stdout is not None
        self._driver.stdin.write(f"{kind} {size} {count}\n")
        self._driver.stdin.flush()
        return float(self._driver.stdout.readline())

    def close(self) -> None:
        self._driver.communicate()
        self._server.wait(10)
        assert self._server.stdout is not None
        self._server.stdout.close()


def serve() -> None:
    with TransferEngine(TransferSettings(name="bench-target")) as engine:
        engine.allocate(WINDOW_BYTES)
        print(engine.describe().encode().decode(), flush=True)
        sys.stdin.read()


def columns(base: int, offset: int, size: int, count: int) -> Column:
    return np.uint64(base + offset) + np.arange(count, dtype=np.uint64) * np.uint64(size)


def run_ours(
    engine: TransferEngine,
    op: Op,
    segment: Segment,
    here: Region,
    there: int,
    size: int,
    count: int,
    num: int,
    checksum: bool = False,
) -> list[float]:
    """Seconds of each of ``num`` calls."""
    step = size * count
    num_places = max(1, WINDOW_BYTES // step)
    lengths = np.full(count, size, dtype=np.uint64)
    places = [
        (columns(here.address, i * step, size, count), columns(there, i * step, size, count))
        for i in range(min(num, num_places))
    ]
    taken = []
    for i in range(num):
        local, remote = places[i % len(places)]
        begin = time.perf_counter()
        done = engine.run(op, segment, local, remote, lengths, checksum=checksum)
        taken.append(time.perf_counter() - begin)
        assert done.status == Status.OK, done
    return taken


def run_memcpy(here: Region, spare: Region, size: int, count: int, num: int) -> float:
    """Seconds of ``num`` times ``count`` plain copies by one thread."""
    step = size * count
    num_places = max(1, WINDOW_BYTES // step)
    begin = time.perf_counter()
    for i in range(num):
        offset = i % num_places * step
        for row in range(count):
            at = offset + row * size
            ctypes.memmove(spare.address + at, here.address + at, size)
    return time.perf_counter() - begin


def measure(
    engines: dict[str, TransferEngine], encoded: bytes, reference: Reference, rounds: int
) -> list[Row]:
    descriptor = decode_descriptor(encoded)
    there = descriptor.regions[0].address
    here, spare = ({path: e.allocate(WINDOW_BYTES) for path, e in engines.items()} for _ in range(2))
    segments = {path: engine.open(descriptor) for path, engine in engines.items()}
    rows = []
    for shape, size, count in SHAPES:
        step = size * count
        num = int(min(1000, max(1, ROUND_BYTES // step)))
        references: dict[str, Callable[[], float]] = {
            "memcpy": lambda num=num, size=size, count=count: run_memcpy(  # type: ignore[misc]
                here["shm"], spare["shm"], size, count, num
            ),
            "stream w": lambda num=num, size=size, count=count: reference.seconds("w", size, count * num),  # type: ignore[misc]
            "stream r": lambda num=num, size=size, count=count: reference.seconds("r", size, count * num),  # type: ignore[misc]
        }
        plans = [
            ("shm", Op.WRITE, False, "memcpy"),
            ("shm", Op.READ, False, "memcpy"),
            ("shm", Op.WRITE, True, "memcpy"),
            ("tcp", Op.WRITE, False, "stream w"),
            ("tcp", Op.READ, False, "stream r"),
            ("tcp", Op.WRITE, True, "stream w"),
        ]
        seen: list[tuple[list[float], list[float]]] = [([], []) for _ in plans]
        calls: list[list[float]] = [[] for _ in plans]
        pings: list[float] = []
        for round_number in range(rounds + 1):
            for i, (path, op, checksum, name) in enumerate(plans):
                base = references[name]()
                taken = run_ours(
                    engines[path], op, segments[path], here[path], there, size, count, num, checksum
                )
                if round_number == 0:
                    continue  # connections, page tables and caches warm up
                seen[i][0].append(step * num / base / 1e9)
                seen[i][1].append(step * num / sum(taken) / 1e9)
                calls[i] += taken
            if count == 1:
                pings.append(reference.seconds("p", size, num) / num)
        for i, (path, op, checksum, name) in enumerate(plans):
            ref, ours = (statistics.median(values) for values in seen[i])
            ordered = sorted(calls[i])
            p50, p99 = (ordered[int(len(ordered) * part)] * 1e6 for part in (0.5, 0.99))
            is_tcp_write = path == "tcp" and count == 1 and op == Op.WRITE and not checksum
            ping = statistics.median(pings) * 1e6 if is_tcp_write else None
            rows.append(
                Row(
                    path,
                    op.name.lower() + "+crc" * checksum,
                    shape,
                    name,
                    ref,
                    ours,
                    ours / ref,
                    p50,
                    p99,
                    ping,
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="three rounds instead of 21")
    asked = parser.parse_args()
    if asked.serve:
        serve()
        return
    target = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert target.stdout is not None
    encoded = target.stdout.readline()
    engines = {path: TransferEngine(TransferSettings(transports=(path,))) for path in ("shm", "tcp")}
    with tempfile.TemporaryDirectory() as folder:
        reference = Reference(folder)
        try:
            rows = measure(engines, encoded, reference, 3 if asked.quick else 21)
        finally:
            reference.close()
            for engine in engines.values():
                engine.close()
            target.communicate()
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    machine = f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"
    if asked.json:
        print(json.dumps({"machine": machine, "command": COMMAND, "rows": [asdict(row) for row in rows]}))
        return
    print(f"machine: {machine}\ncommand: {COMMAND}")
    print(f"{'path':4} {'op':9} {'shape':14} {'reference':>10} {'GB/s':>7} {'ours':>7} {'ratio':>6}"
          f" {'p50 us':>10} {'p99 us':>10}  C ping-pong us")  # fmt: skip
    for row in rows:
        ping = "" if row.reference_p50_us is None else f"{row.reference_p50_us:10.1f}"
        print(
            f"{row.path:4} {row.op:9} {row.shape:14} {row.reference:>10} {row.reference_gb_s:7.2f}"
            f" {row.ours_gb_s:7.2f} {row.ratio:6.2f} {row.p50_us:10.1f} {row.p99_us:10.1f}  {ping}"
        )
    print("not shown: a real network, many clients, NUMA, latency under load; both ends share the cores")


if __name__ == "__main__":
    main()
