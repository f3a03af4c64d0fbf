# SPDX-License-Identifier: Apache-2.0
"""``transfer_engine_bench``: the existing package's benchmark under its name, with its flags and last line.

A target registers memory and serves it; an initiator moves batches of blocks from several threads for
``--duration`` seconds and prints the rate. ``mooncake bench transfer`` measures more, also the host's limits.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

import mooncake
from mooncake.cli import print_and_exit
from mooncake.compat.programs.gflags import parse_flags
from mooncake.compat.transfer import TransferEngine, TransferOpcode
from mooncake.errors import InvalidArgument, MooncakeError, PeerLost, Unavailable

P2P = "P2PHANDSHAKE"
FLAGS: dict[str, Any] = {
    "mode": "initiator",
    "metadata_server": P2P,
    "local_server_name": "",
    "segment_id": "",
    "protocol": "rdma",
    "device_name": "",
    "operation": "read",
    "block_size": 65536,
    "batch_size": 128,
    "threads": 12,
    "duration": 10,
    "buffer_size": 1 << 30,
    "report_unit": "GB",
    "report_precision": 2,
    "auto_discovery": False,
    "nic_priority_matrix": "",
    "backend": "classic",
}
IGNORED = ("auto_discovery", "nic_priority_matrix", "backend")
UNITS = {"b": 1 / 8, "B": 1.0}
UNITS |= {f"{p}B": 1e3**n for n, p in enumerate("KMGT", 1)} | {
    f"{p}b": 1e3**n / 8 for n, p in enumerate("KMGT", 1)
}
UNITS |= {f"{p}iB": 1024.0**n for n, p in enumerate("KMGT", 1)} | {
    f"{p}ib": 1024.0**n / 8 for n, p in enumerate("KMGT", 1)
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the console script ``transfer_engine_bench``."""
    command_line = sys.argv[1:] if arguments is None else arguments
    if {"-h", "-help", "--help"} & set(command_line):
        lines = [f"  --{name}={default}" for name, default in FLAGS.items()]
        print_and_exit("\n".join([str(__doc__), *lines]))
    if {"-version", "--version"} & set(command_line):
        print_and_exit(f"transfer_engine_bench {mooncake.__version__}")
    try:
        flags = _checked(parse_flags(command_line, FLAGS, os.environ))
        for name in IGNORED:
            if flags[name] != FLAGS[name]:
                print(f"--{name} has no effect: the engine finds devices and paths itself", file=sys.stderr)
        engine = _engine(flags)
        if flags["mode"] == "target":
            serve(engine, flags)
        else:
            measure(engine, flags)
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, Unavailable) else 2)
    sys.exit(0)


def _checked(flags: dict[str, Any]) -> dict[str, Any]:
    for name, allowed in {
        "mode": ("initiator", "target"),
        "operation": ("read", "write"),
        "report_unit": tuple(UNITS),
    }.items():
        if flags[name] not in allowed:
            raise InvalidArgument(f"--{name}", flags[name], ", ".join(allowed))
    for name in ("block_size", "batch_size", "threads", "duration", "buffer_size"):
        if flags[name] <= 0:
            raise InvalidArgument(f"--{name}", flags[name], "more than 0")
    needed = flags["block_size"] * flags["batch_size"] * flags["threads"]
    if flags["mode"] == "initiator" and flags["buffer_size"] < needed:
        raise InvalidArgument(
            "--buffer_size", flags["buffer_size"], f"at least block_size x batch_size x threads, {needed}"
        )
    if flags["mode"] == "initiator" and not flags["segment_id"]:
        raise InvalidArgument("--segment_id", "", "the name that the target prints")
    return flags


def _engine(flags: dict[str, Any]) -> TransferEngine:
    engine = TransferEngine()
    host = flags["local_server_name"] or socket.gethostname()
    if engine.initialize(host, flags["metadata_server"], flags["protocol"], flags["device_name"]):
        raise InvalidArgument(
            "initialize",
            [host, flags["metadata_server"], flags["protocol"]],
            "the log line above has the reason",
        )
    return engine


class Memory:
    """Registered memory of this process: shared with processes of this host when the protocol is shm."""

    def __init__(self, engine: TransferEngine, flags: dict[str, Any]) -> None:
        size = flags["buffer_size"]
        if flags["protocol"] == "shm":
            self.address = engine.allocate_managed_buffer(size)
        else:
            self._owner = np.ones(size, dtype=np.uint8)
            self.address = int(self._owner.ctypes.data)
            if engine.register_memory(self.address, size):
                self.address = 0
        if not self.address:
            raise InvalidArgument("--buffer_size", size, "the log line above has the reason")


def serve(engine: TransferEngine, flags: dict[str, Any]) -> None:
    """Serve registered memory until SIGINT or SIGTERM."""
    memory = Memory(engine, flags)
    host = flags["local_server_name"] or socket.gethostname()
    name = f"{host}:{engine.get_rpc_port()}" if flags["metadata_server"] == P2P else host
    print(
        f"target listening, --segment_id={name} ({flags['buffer_size']} bytes at {memory.address:#x})",
        flush=True,
    )
    if flags["metadata_server"] == P2P:  # a line of the existing program, which scripts take the name from
        print(f"Transfer Engine RPC using P2P handshake, listening on {name}", flush=True)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    while not over.wait(1.0):
        pass


def measure(engine: TransferEngine, flags: dict[str, Any]) -> None:
    """Move blocks for the given duration, then print the rate."""
    memory = Memory(engine, flags)
    there = engine.get_first_buffer_address(flags["segment_id"])
    if not there:
        raise PeerLost(
            f"target {flags['segment_id']} has no memory for us; the log line above has the reason"
        )
    opcode = TransferOpcode.Read if flags["operation"] == "read" else TransferOpcode.Write
    block, batch = flags["block_size"], flags["batch_size"]
    lengths = np.full(batch, block, dtype=np.uint64)
    counts, over = [0] * flags["threads"], threading.Event()

    def work(number: int) -> None:
        offsets = (np.arange(batch, dtype=np.uint64) + np.uint64(number * batch)) * np.uint64(block)
        here, far = offsets + np.uint64(memory.address), offsets + np.uint64(there)
        while not over.is_set():
            if engine.batch_transfer_sync(flags["segment_id"], here, far, lengths, opcode):
                over.set()  # the engine has logged why
                return
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(flags["threads"])]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    failed = over.wait(flags["duration"])
    over.set()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    if failed:
        raise PeerLost("a batch failed; the log line above has the reason")
    rate = sum(counts) * batch * block / seconds / UNITS[flags["report_unit"]]
    print(
        f"Test completed: duration {seconds:.2f}, batch count {sum(counts)}, throughput "
        f"{rate:.{flags['report_precision']}f} {flags['report_unit']}/s",
        flush=True,
    )
