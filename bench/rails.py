"""What several rails to one peer are worth: two links of known speed, alone, together, and one going down.

Run ``python -m bench.rails`` as root. Two network namespaces are joined by two links whose speed ``tc``
limits, so that the reference is known: a batch over both should take as long as their sum allows. Then
the second link is taken down in the middle of a batch, which must arrive all the same, and put up again.

What it cannot show: rails faster than this machine copies (two rails over loopback share its cores and
gain nothing), and real cards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np

from mooncake.transfer import Op, Region, Segment, SegmentDescriptor, Status, TransferEngine, TransferSettings
from mooncake.transfer.segment import decode_descriptor

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
    """Two namespaces with a link of each speed between them."""
    ip("netns", "add", NEAR)
    ip("netns", "add", FAR)
    try:
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
        ip("netns", "del", NEAR)
        ip("netns", "del", FAR)


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
    """The moving side, inside the near namespace."""

    def __init__(self, engine: TransferEngine, descriptor: SegmentDescriptor) -> None:
        self.engine = engine
        self.here: Region = engine.allocate(SIZE)
        self.there = descriptor.regions[0].address
        self.segment: Segment = engine.open(descriptor)

    def seconds(self, op: Op) -> float:
        begin = time.perf_counter()
        done = self.engine.run(op, self.segment, [self.here.address], [self.there], [SIZE], timeout_s=60.0)
        assert done.status == Status.OK, done
        return time.perf_counter() - begin

    def speed(self, op: Op) -> float:
        """MB/s, the median of some rounds after one to warm up."""
        self.seconds(op)
        return SIZE / statistics.median(self.seconds(op) for _ in range(ROUNDS)) / 1e6


def measure(rails: list[int], speeds_mbit: list[int]) -> None:
    ours, theirs = (",".join(f"10.77.{i}.{end}" for i in rails) for end in (1, 2))
    settings = TransferSettings(transports=("tcp",), listen_host=ours)
    with target(theirs) as descriptor, TransferEngine(settings) as engine:
        bench = Bench(engine, descriptor)
        reference = sum(speeds_mbit[i] for i in rails) / 8
        for op in (Op.WRITE, Op.READ):
            speed = bench.speed(op)
            name = "+".join(str(speeds_mbit[i]) for i in rails)
            print(
                f"{name:>9} Mbit/s {op.name.lower():5} {reference:9.0f} {speed:9.0f} {speed / reference:6.2f}"
            )


def take_down() -> None:
    settings = TransferSettings(transports=("tcp",), listen_host="10.77.0.1,10.77.1.1", rail_patience_s=1.0)
    with target("10.77.0.2,10.77.1.2") as descriptor, TransferEngine(settings) as engine:
        bench = Bench(engine, descriptor)
        view = np.frombuffer(bench.here.view(), dtype=np.uint8)
        view[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
        wanted = view.copy()
        print(f"both up: {bench.seconds(Op.WRITE):.2f} s")
        down = threading.Timer(0.1, ip, ["-n", FAR, "link", "set", "mcf1", "down"])
        down.start()
        print(f"the second goes down in the middle: {bench.seconds(Op.WRITE):.2f} s")
        down.join()
        view[:] = 0
        print(f"read back: {bench.seconds(Op.READ):.2f} s, {'right' if (view == wanted).all() else 'WRONG'}")
        ip("-n", FAR, "link", "set", "mcf1", "up")
        for _ in range(4):
            time.sleep(1.0)  # not a wait for anything: masks end by the clock
            print(f"up again: {bench.seconds(Op.WRITE):.2f} s")
        assert bench.segment.rails is not None
        print("\n".join(bench.segment.rails.story()))


def inside(speeds: list[int]) -> None:
    print(f"{'rails':>16} {'':5} {'link MB/s':>9} {'ours MB/s':>9} {'ratio':>6}")
    measure([0], speeds)
    measure([1], speeds)
    measure([0, 1], speeds)
    take_down()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, nargs=2, default=[800, 800], help="speed of the two links")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        global NEAR, FAR
        NEAR, FAR = asked.inside.split(",")
        inside(asked.mbit)
        return
    if os.geteuid() != 0 or shutil.which("tc") is None:
        sys.exit("bench.rails needs root and the programs ip and tc (Debian: iproute2)")
    print(f"machine: {os.cpu_count()} cores, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}")
    print(f"command: python -m bench.rails --mbit {asked.mbit[0]} {asked.mbit[1]}", flush=True)
    with links(asked.mbit):
        words = [
            sys.executable,
            "-m",
            "bench.rails",
            "--inside",
            f"{NEAR},{FAR}",
            "--mbit",
            *map(str, asked.mbit),
        ]
        subprocess.run(["ip", "netns", "exec", NEAR, *words], check=True)


if __name__ == "__main__":
    main()
