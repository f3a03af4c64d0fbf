# SPDX-License-Identifier: Apache-2.0
"""Downtime of a master that is killed with many objects, and where that time goes.

Run ``python -m bench.restart``. A core puts ``--objects`` objects of 64 KiB; what it would have logged
becomes a log, once as it grows (two records an object) and once compacted (one). Then this process
replays both (read: the file and its decoding; enter: ``Master.apply``; settle) and measures the CPU time,
because a restart waits for nothing else; and a master process is started on each and polled until it answers.
The reference is the same process without objects: the interpreter, the imports and the socket.

What it cannot show: nodes that mount again, which takes as long as their connections do.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import msgspec

from bench.report import Table, measured, options
from mooncake.cli.ports import free_ports
from mooncake.rpc import BlockingClient
from mooncake.store import messages as m
from mooncake.store.master.effects import AppendRecords, Effect, Received, Reply
from mooncake.store.master.log_records import Record
from mooncake.store.master.master import Master
from mooncake.store.master.oplog import Oplog
from mooncake.store.master.oplog_writer import OplogWriter
from mooncake.store.settings import MasterSettings

OBJECT_BYTES = 64 << 10
BATCH = 128
NUM_NODES = 4
ROUNDS = 5
PATIENCE_S = 60.0
REPLIES = (m.Flags,)


class LoggedMaster:
    """A master's core, and the records that it emits."""

    def __init__(self, num_objects: int) -> None:
        self.master = Master(MasterSettings())
        self.records: list[Record] = self.master.snapshot()
        pool_bytes = (num_objects // NUM_NODES + BATCH) * OBJECT_BYTES * 2
        for number in range(NUM_NODES):
            self.ask(m.Mount(f"node{number}", number + 1, "host", 1 << 40, pool_bytes, bytes(200), 0.0))
            self.ask(m.Heartbeat(f"node{number}", number + 1))
        for first in range(0, num_objects, BATCH):
            self.put([f"{number:064x}" for number in range(first, min(first + BATCH, num_objects))])

    def put(self, keys: list[str]) -> None:
        sizes = [OBJECT_BYTES] * len(keys)
        started = self.ask(m.PutStart(1, "host", keys, sizes, sizes))
        assert isinstance(started, m.PutStarted)
        ids = [reserved.object_id for reserved in started.reserved if reserved is not None]
        assert len(ids) == len(keys), started.refusals
        self.ask(m.PutEnd(keys, ids, [bytes(4)] * len(keys)))

    def ask(self, message: msgspec.Struct) -> msgspec.Struct:
        effects: list[Effect] = self.master.handle(Received("origin", "connection", message), 100.0)
        for effect in effects:
            if isinstance(effect, AppendRecords):
                self.records += effect.records
        return next(effect.message for effect in effects if isinstance(effect, Reply))


def enter(path: Path) -> tuple[float, float, float]:
    """CPU seconds to read, enter and settle a log like a master that starts."""
    gc.collect()
    gc.disable()  # as a master that starts does
    began = time.process_time()
    writer = OplogWriter(str(path))
    records = writer.read()
    read = time.process_time()
    master = Master(MasterSettings())
    master.apply(records, 100.0)
    entered = time.process_time()
    master.settle(100.0)
    settled = time.process_time()
    gc.enable()
    writer.close()
    return read - began, entered - read, settled - entered


def start(flags: list[str]) -> float:
    """Seconds from starting a master process until it answers."""
    (port,) = free_ports("127.0.0.1", 1, Random())
    client = BlockingClient(f"127.0.0.1:{port}", REPLIES)
    command = [sys.executable, "-c", "from mooncake.cli import main; main()", "master", "--port", str(port)]
    began = time.monotonic()
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL) as master:
        client.call(m.Exists(["a key"]), PATIENCE_S)
        took_s = time.monotonic() - began
        client.close()
        master.kill()
    return took_s


def report(
    table: Table, what: str, num_objects: int, num_records: int, path: Path | None, rounds: int
) -> None:
    starts = [start(["--oplog", str(path)] if path else []) for _ in range(rounds)]
    if path is None:
        cells: list[float | None] = [None] * 5
        samples = {}
    else:
        parts = [enter(path) for _ in range(rounds)]
        columns = [[*column] for column in zip(*parts, strict=True)]
        samples = dict(zip(("read_s", "enter_s", "settle_s"), columns, strict=True))
        whole = statistics.median(map(sum, parts))
        cells = [*map(statistics.median, columns), whole, whole / num_records * 1e6]
    samples["answers_s"] = starts
    table.add(what, num_objects, num_records, *cells, statistics.median(starts), samples=samples)


def main() -> None:
    parser = options(__doc__, "bench.restart")
    parser.add_argument("--objects", type=int, help="number of objects; 100,000 by default")
    given = parser.parse_args()
    num_objects = given.objects or (1000 if given.quick else 100_000)
    rounds = 1 if given.quick else ROUNDS
    with measured("restart", given) as result:
        table = result.table(
            "log",
            "objects",
            "records",
            ("read s", 2),
            ("enter s", 2),
            ("settle s", 2),
            ("all s", 2),
            ("us/record", 1),
            ("answers s", 2),
            note="answers: from the start of a process to its first reply; the rest is CPU time",
        )
        report(table, "none", 0, 0, None, rounds)
        logged = LoggedMaster(num_objects)
        with tempfile.TemporaryDirectory() as folder:
            for what, records in (("as it grew", logged.records), ("written anew", logged.master.snapshot())):
                path = Path(folder) / what.replace(" ", "-")
                log = Oplog(path)
                log.read()
                log.append(records)
                log.close()
                report(table, what, num_objects, len(records), path, rounds)


if __name__ == "__main__":
    main()
