# SPDX-License-Identifier: Apache-2.0
"""The rdma transport beside perftest, on one device of this machine: scripts/test-rdma bench.

Both move the same sizes between two processes over the same device, one after the other, alternating, so that
other load on the machine affects both. perftest's ``ib_write_bw`` and ``ib_read_bw`` keep as many operations
under way as a batch here has slices, on one queue pair.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from statistics import median

import numpy as np

from bench.report import measured, not_run, options
from mooncake.errors import Unavailable
from mooncake.transfer import Op, Status, TransferEngine, TransferSettings
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.transfer.transports.rdma import usable_devices

SIZES = {4 << 10: 1024, 64 << 10: 256, 1 << 20: 32, 16 << 20: 4}
"""Bytes of one operation, and how many of them make a batch."""

PROGRAMS = {Op.WRITE: "ib_write_bw", Op.READ: "ib_read_bw"}
TIMEOUT_S = 120.0
_LEND = """
import sys
from mooncake.transfer import TransferEngine, TransferSettings
with TransferEngine(TransferSettings(transports=("rdma",), rdma_devices=(sys.argv[1],))) as engine:
    engine.allocate(int(sys.argv[2]))
    print(engine.describe().encode().decode(), flush=True)
    sys.stdin.read()
"""


def perftest(op: Op, device: str, size: int, count: int) -> float:
    """MB/s that perftest reports."""
    gid = os.environ.get("RDMA_GID", "1")
    depth = str(min(count, 64))
    flags = ["-d", device, "-x", gid, "-s", str(size), "-n", str(max(count, 5)), "-t", depth, "-F", "-q", "1"]
    flags += ["-p", "18600", "--report_gbits"]
    server = subprocess.Popen([PROGRAMS[op], *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            client = subprocess.run(
                [PROGRAMS[op], *flags, "127.0.0.1"], capture_output=True, text=True, timeout=TIMEOUT_S
            )
            found = re.search(rf"^\s*{size}\s+\d+\s+([\d.]+)\s+([\d.]+)", client.stdout, re.M)
            if found:
                return float(found.group(2)) * 1000 / 8
            if server.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit(f"{PROGRAMS[op]} failed: {client.stdout}{client.stderr}")
    finally:
        server.kill()
        server.communicate()


class Ours:
    """An engine here, and a target in another process."""

    def __init__(self, device: str, num_bytes: int) -> None:
        self.target = subprocess.Popen(
            [sys.executable, "-c", _LEND, device, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.target.stdout is not None
        descriptor = decode_descriptor(self.target.stdout.readline())
        self.engine = TransferEngine(TransferSettings(transports=("rdma",), rdma_devices=(device,)))
        self.here = self.engine.allocate(num_bytes)
        self.segment = self.engine.open(descriptor)
        self.there = descriptor.regions[0].address

    def move(self, op: Op, size: int, count: int) -> float:
        """MB/s of one batch."""
        rows = np.arange(count, dtype=np.uint64) * np.uint64(size)
        columns = (rows + np.uint64(self.here.address), rows + np.uint64(self.there), np.full(count, size))
        begun = time.perf_counter()
        done = self.engine.run(op, self.segment, *columns, timeout_s=TIMEOUT_S)
        took_s = time.perf_counter() - begun
        if done.status != Status.OK:
            raise SystemExit(f"{op.name} of {count} x {size}: {done}")
        return size * count / took_s / 1e6

    def close(self) -> None:
        self.engine.close()
        self.target.communicate(b"")


def main() -> None:
    parser = options(__doc__, "bench.rdma")
    parser.add_argument("--device", default=os.environ.get("RDMA_DEV", ""))
    parser.add_argument("--rounds", type=int, help="number of rounds; 3 by default")
    parser.add_argument("--least", type=float, default=0.0, help="fail below this share of perftest")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 3)
    try:
        device = args.device or usable_devices((), 1)[0]
    except Unavailable as error:
        not_run(f"{error} (scripts/test-rdma bench runs it in a VM that has one)")
    ours = Ours(device, max(size * count for size, count in SIZES.items()))
    least = float("inf")
    try:
        with measured("rdma", args) as result:
            table = result.table(
                "op",
                "size",
                "batch",
                ("mooncake MB/s", 1),
                ("perftest MB/s", 1),
                ("share", 2),
                title=f"{device}: median of {rounds}",
            )
            for op in Op:
                for size, count in SIZES.items():
                    ours.move(op, size, count)  # connects and registers
                    pairs = [
                        (ours.move(op, size, count), perftest(op, device, size, count)) for _ in range(rounds)
                    ]
                    samples = {
                        "mooncake": [pair[0] for pair in pairs],
                        "perftest": [pair[1] for pair in pairs],
                    }
                    mine, theirs = map(median, samples.values())
                    least = min(least, mine / theirs)
                    table.add(op.name.lower(), size, count, mine, theirs, mine / theirs, samples=samples)
    finally:
        ours.close()
    if least < args.least:
        raise SystemExit(f"error: {least:.2f} of perftest is less than {args.least}")


if __name__ == "__main__":
    main()
