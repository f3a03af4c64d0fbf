# SPDX-License-Identifier: Apache-2.0
"""The path ``file`` against fio: the same file, depth and block, taking turns in one run.

Run ``python -m bench.file`` (``--device /dev/nvme0n1`` overwrites that device; ``--quick`` for a short run).
fio runs its io_uring engine with O_DIRECT; both keep depth x block bytes of memory busy and no more, because
with more of it the copies inside the (virtual) device miss the cache, which is no difference between the
programs. A ratio is one of medians over rounds.

What it cannot show: real NVMe, several jobs, mixed loads.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.report import Result, measured, not_run, options
from mooncake.transfer import Op, Region, Status, TransferEngine, TransferSettings

DEPTH = 32
BLOCKS = [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("128 KiB", 128 << 10), ("512 KiB", 512 << 10)]


def fio_gb_s(path: Path, size_bytes: int, op: Op, block: int, seconds: float) -> float:
    words = [
        "fio", "--name=reference", f"--filename={path}", f"--rw={op.name.lower()}", f"--bs={block}",
        "--direct=1", "--ioengine=io_uring", f"--iodepth={DEPTH}", f"--size={size_bytes}",
        f"--runtime={int(seconds * 1e3)}ms",
        "--time_based", "--output-format=json", "--thread", "--overwrite=1", "--allow_file_create=0",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    job = json.loads(done.stdout)["jobs"][0][op.name.lower()]
    return float(job["io_bytes"] / (job["runtime"] / 1e3) / 1e9)


class Ours:
    """An engine with one file, read or written sequentially in batches."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.engine = TransferEngine(TransferSettings(transports=("file",), file_depth=DEPTH))
        self.region: Region = self.engine.open_file(path, size_bytes)
        self._segment = self.engine.open(self.engine.describe())
        huge = path.is_file()  # see tests/transfer/test_nvmeof.py
        self._here = self.engine.allocate(DEPTH * BLOCKS[-1][1], huge_pages=huge)
        self._at = 0

    def gb_s(self, op: Op, block: int, seconds: float) -> float:
        count = min(self.region.size_bytes, 64 << 20) // block
        rows = np.arange(count, dtype=np.uint64)
        local = np.uint64(self._here.address) + rows % np.uint64(DEPTH) * np.uint64(block)
        lengths = np.full(count, block, dtype=np.uint64)
        moved, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            if self._at + count * block > self.region.size_bytes:
                self._at = 0
            remote = np.uint64(self.region.address + self._at) + rows * np.uint64(block)
            done = self.engine.run(op, self._segment, local, remote, lengths)
            assert done.status == Status.OK, done
            moved += done.num_bytes
            self._at += done.num_bytes
        return moved / (time.perf_counter() - begin) / 1e9


def measure(result: Result, path: Path, size_bytes: int, rounds: int) -> None:
    ours = Ours(path, size_bytes)
    table = result.table(
        "op", "block", "depth", ("fio GB/s", 3), ("ours GB/s", 3), ("ratio", 2), title=repr(ours.region)
    )
    for op in (Op.WRITE, Op.READ):
        for name, block in BLOCKS:
            pairs = []
            for round_number in range(rounds + 1):
                theirs, mine = fio_gb_s(path, size_bytes, op, block, 0.5), ours.gb_s(op, block, 0.5)
                if round_number:  # the first one warms up
                    pairs.append((theirs, mine))
            samples = {"fio_gb_s": [pair[0] for pair in pairs], "ours_gb_s": [pair[1] for pair in pairs]}
            reference, mine = map(statistics.median, samples.values())
            table.add(op.name.lower(), name, DEPTH, reference, mine, mine / reference, samples=samples)
    ours.engine.close()


def main() -> None:
    parser = options(__doc__, "bench.file")
    parser.add_argument("--device", type=Path, help="a block device, which is overwritten, instead of a file")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        not_run("fio is not installed (apt-get install fio), which is the reference of this bench")
    size, rounds = (128 << 20, 3) if arguments.quick else (512 << 20, 9)
    with measured("file", arguments) as result:
        if arguments.device:
            measure(result, arguments.device, size, rounds)
            return
        with tempfile.NamedTemporaryFile(prefix="mooncake-bench-", dir=os.environ.get("TMPDIR")) as file:
            file.write(os.urandom(1 << 20) * (size >> 20))
            file.flush()
            os.fsync(file.fileno())
            measure(result, Path(file.name), size, rounds)


if __name__ == "__main__":
    main()
