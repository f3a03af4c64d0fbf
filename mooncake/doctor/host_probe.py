# SPDX-License-Identifier: Apache-2.0
"""The host on which the examination runs: its limits, its shared memory, its disk, and processes that listen
here.

The limit of open files is that of the process behind a port, from /proc, which is readable for processes of
the same user; elsewhere it stays unknown.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
from pathlib import Path

from mooncake import clock
from mooncake.doctor.facts import HostFacts
from mooncake.errors import InvalidArgument
from mooncake.rpc.client import split_address
from mooncake.security import is_loopback

DISK_BYTES = 64 << 20
CHUNK_BYTES = 4 << 20
DISK_S = 5.0
"""A disk that takes longer is measured by what it wrote until then."""


def read_host(disk: str) -> HostFacts:
    """The facts of this host; with ``disk`` a file of 64 MiB is written there and removed."""
    facts = HostFacts(disk=disk)
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        facts.shared_memory_bytes = found.f_blocks * found.f_frsize
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts.locked_memory_bytes = -1 if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError):
        facts.num_rdma_devices = len(os.listdir("/sys/class/infiniband"))
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        facts.num_huge_pages = next(int(one.split()[1]) for one in lines if one.startswith("HugePages_Total"))
    if disk:
        try:
            facts.disk_bytes_per_s = write_speed(Path(disk).expanduser())
        except OSError as error:
            facts.disk_problem = f"can't be measured: {error.strerror or error}"
    return facts


def write_speed(folder: Path) -> float:
    """Bytes per second that reach the disk under ``folder``, past the page cache where that is possible.

    Raises:
        OSError: nothing can be written there.
    """
    import mmap

    path = folder / f".mooncake-doctor-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        number = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # such as a file system in memory
        with contextlib.suppress(OSError):
            path.unlink()
        number = os.open(path, flags, 0o600)
    try:
        with mmap.mmap(-1, CHUNK_BYTES) as memory:
            memory.write(os.urandom(CHUNK_BYTES))
            began = clock.monotonic()
            written = 0
            while written < DISK_BYTES and clock.monotonic() < began + DISK_S:
                written += os.write(number, memory)
            os.fsync(number)
            return written / max(clock.monotonic() - began, 1e-9)
    finally:
        os.close(number)
        path.unlink()


def is_here(address: str) -> bool:
    """Whether ``host:port`` is one of this host's addresses."""
    if "://" in address:
        return False
    try:
        host, _ = split_address(address)
    except InvalidArgument:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: no host can have this name
        return False
    if is_loopback(host):
        return True
    for family, kind, _, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as one:
            one.bind((place[0], 0))  # only an address of this host can be bound
            return True
    return False


def max_files_behind(port: int) -> int | None:
    """How many files the process may open that listens on ``port`` of this host; None if unknown."""
    inodes = {*_listeners(Path("/proc/net/tcp"), port), *_listeners(Path("/proc/net/tcp6"), port)}
    if not inodes:
        return None
    wanted = {f"socket:[{one}]" for one in inodes}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for link in (folder / "fd").iterdir():
                if os.readlink(link) in wanted:
                    return _max_files(folder)
    return None


def _listeners(table: Path, port: int) -> list[str]:
    with contextlib.suppress(OSError):
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        return [row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
    return []


def _max_files(process: Path) -> int | None:
    for line in (process / "limits").read_text().splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return int(soft) if soft.isdecimal() else None
    return None
