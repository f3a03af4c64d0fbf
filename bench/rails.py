# SPDX-License-Identifier: Apache-2.0
"""The gain of several rails to one peer: two links of known speed, alone, together, and one going down.

Run ``python -m bench.rails`` as root. Two network namespaces are joined by two links whose speed ``tc``
limits, so that the reference is known: a batch over both should take as long as their sum allows. Then
the second link is taken down in the middle of a batch, which must arrive all the same, and brought up again.

What it cannot show: rails faster than this machine copies (two rails over loopback share its cores and
gain nothing), and real cards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.report import Result, Table, decoded, encoded, measured, not_run, options
from mooncake.transfer import (
    Op,
    Region,
    RemoteSegment,
    SegmentDescriptor,
    Status,
    TransferEngine,
    TransferSettings,
)
from mooncake.transfer.descriptor import decode_descriptor

SIZE = 64 << 20
ROUNDS = 5
NEAR, FAR = f"mc-near-{os.getpid()}", f"mc-far-{os.getpid()}"
SERVE = """
import sys
from mooncake.transfer import TransferEngine, TransferSettings
with TransferEngine(TransferSettings(transports=("tcp",), listen_host=sys.argv[1])) as engine:
    engine.allocate(int(sys.argv[2]))
    print(engine.describe().encode().decode(), flush=True)
    sys.stdin.read()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def links(speeds_mbit: list[int]) -> Iterator[None]:
    """Create two namespaces with a link of each speed between them; remove them at the end."""
    try:
        ip("netns", "add", NEAR)
        ip("netns", "add", FAR)
        for i, speed in enumerate(speeds_mbit):
            pair = (f"mcn{i}", f"mcf{i}")
            ip("link", "add", pair[0], "netns", NEAR, "type", "veth", "peer", "name", pair[1], "netns", FAR)
            for namespace, name, end in ((NEAR, pair[0], 1), (FAR, pair[1], 2)):
                ip("-n", namespace, "addr", "add", f"10.77.{i}.{end}/24", "dev", name)
                ip("-n", namespace, "link", "set", name, "up")
                limit = f"tc qdisc add dev {name} root tbf rate {speed}mbit burst 256k latency 50ms"
                ip("netns", "exec", namespace, *limit.split())
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not leave the other namespace
        for name in (NEAR, FAR):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def target(hosts: str) -> Iterator[SegmentDescriptor]:
    command = ["ip", "netns", "exec", FAR, sys.executable, "-c", SERVE, hosts, str(SIZE)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield decode_descriptor(process.stdout.readline())
    finally:
        process.communicate()


class Bench:
    """The initiating side, inside the near namespace."""

    def __init__(self, engine: TransferEngine, descriptor: SegmentDescriptor) -> None:
        self.engine = engine
        self.here: Region = engine.allocate(SIZE)
        self.there = descriptor.regions[0].address
        self.segment: RemoteSegment = engine.open(descriptor)

    def seconds(self, op: Op) -> float:
        begin = time.perf_counter()
        done = self.engine.run(op, self.segment, [self.here.address], [self.there], [SIZE], timeout_s=60.0)
        assert done.status == Status.OK, done
        return time.perf_counter() - begin

    def speeds(self, op: Op) -> list[float]:
        """MB/s of several rounds after one to warm up."""
        self.seconds(op)
        return [SIZE / self.seconds(op) / 1e6 for _ in range(ROUNDS)]


def measure(table: Table, rails: list[int], speeds_mbit: list[int]) -> None:
    ours, theirs = (",".join(f"10.77.{i}.{end}" for i in rails) for end in (1, 2))
    settings = TransferSettings(transports=("tcp",), listen_host=ours)
    with target(theirs) as descriptor, TransferEngine(settings) as engine:
        bench = Bench(engine, descriptor)
        reference = sum(speeds_mbit[i] for i in rails) / 8
        for op in (Op.WRITE, Op.READ):
            speeds = bench.speeds(op)
            speed, name = statistics.median(speeds), "+".join(str(speeds_mbit[i]) for i in rails)
            cells = f"{name} Mbit/s", op.name.lower(), reference, speed, speed / reference
            table.add(*cells, samples={"mb_s": speeds})


def take_down(result: Result) -> None:
    settings = TransferSettings(transports=("tcp",), listen_host="10.77.0.1,10.77.1.1", rail_patience_s=1.0)
    with target("10.77.0.2,10.77.1.2") as descriptor, TransferEngine(settings) as engine:
        bench = Bench(engine, descriptor)
        view = np.frombuffer(bench.here.view(), dtype=np.uint8)
        view[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        wanted = view.copy()
        times = result.table("the second of two links goes down in the middle of a batch", ("s", 2))
        times.add("both up", bench.seconds(Op.WRITE))
        down = threading.Timer(0.1, ip, ["-n", FAR, "link", "set", "mcf1", "down"])
        down.start()
        times.add("it goes down", bench.seconds(Op.WRITE))
        down.join()
        view[:] = 0
        took_s = bench.seconds(Op.READ)
        times.add("read back: " + ("right" if (view == wanted).all() else "WRONG"), took_s)
        ip("-n", FAR, "link", "set", "mcf1", "up")
        for _ in range(4):
            time.sleep(1.0)  # not a wait for anything: masks end by the clock
            times.add("up again", bench.seconds(Op.WRITE))
        assert bench.segment.rails is not None
        times.note = "\n".join(bench.segment.rails.story())


def inside(result: Result, speeds: list[int]) -> None:
    table = result.table("rails", "op", ("links MB/s", 0), ("ours MB/s", 0), ("ratio", 2))
    measure(table, [0], speeds)
    measure(table, [1], speeds)
    measure(table, [0, 1], speeds)
    take_down(result)


def main() -> None:
    parser = options(__doc__, "bench.rails")
    parser.add_argument("--mbit", type=int, nargs=2, default=[800, 800], help="speed of the two links")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    global NEAR, FAR, ROUNDS
    if arguments.quick:
        ROUNDS = 1
    if arguments.inside:
        NEAR, FAR, file = arguments.inside
        result = decoded(Path(file).read_bytes())
        inside(result, arguments.mbit)
        Path(file).write_bytes(encoded(result))
        return
    if os.geteuid() != 0 or shutil.which("tc") is None:
        not_run(
            "it makes network namespaces, for which it must be root and have ip and tc (Debian: iproute2)"
        )
    with measured("rails", arguments) as result, links(arguments.mbit), tempfile.NamedTemporaryFile() as kept:
        kept.write(encoded(result))
        kept.flush()
        words = [sys.executable, "-m", "bench.rails", "--inside", NEAR, FAR, kept.name]
        words += ["--mbit", *map(str, arguments.mbit), *(["--quick"] if arguments.quick else [])]
        with subprocess.Popen(["ip", "netns", "exec", NEAR, *words]) as process:
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                raise
        if status:
            raise SystemExit(f"the moving side ended with {status}")
        result.tables = decoded(Path(kept.name).read_bytes()).tables


if __name__ == "__main__":
    main()
