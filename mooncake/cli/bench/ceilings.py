# SPDX-License-Identifier: Apache-2.0
"""The limits of the machine: plain copies, a C program's socket stream, fio on a file, a GPU driver.

A ceiling moves the same amount in pieces of the same size as what is measured, so that the two can take
turns. It knows nothing of the transfer engine. ``native/raw_stream.c`` is the C program; it is built with
the extension and lies beside it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mooncake.errors import Unavailable, cause_of

WRITE, READ = "write", "read"
FIO_MS = 300
_MIB = bytes(range(256)) * 4096
FILE_PIECE_BYTES = 512 << 10
"""The largest single read or write of the file transport (``native/file.h``)."""
LANE_BYTES, LOOPBACK_BUFFER_BYTES = 1 << 20, 160 << 10
"""Bytes of a job for which ours takes one connection, and its sockets' send buffers (``native/tcp.cpp``)."""


@dataclass(frozen=True)
class Sample:
    """The measurements of one round."""

    seconds: float
    cpu_s: float
    "Processor time of all processes that took part, user and system."
    num_bytes: int
    calls_s: list[float] = field(default_factory=list)
    "Seconds of each call, where calls were timed one by one."

    @property
    def gb_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.num_bytes * 1e9


class Ceiling(Protocol):
    """A reference to measure against."""

    name: str

    def move(self, op: str, size_bytes: int, count: int, num: int) -> Sample:
        """Move ``num`` times ``count`` pieces of ``size_bytes``."""
        ...


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used: its CPU clock, whose id is derived from the pid.

    Raises:
        Unavailable: the process has ended.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise Unavailable(f"process {pid} of the bench has ended; was it killed?") from error


class Memcpy:
    """One thread copies from one window of memory to another; one thread carries a call of ours, too."""

    name = "one thread"

    def __init__(self, source: int, target: int, window_bytes: int) -> None:
        self._source, self._target, self._window = source, target, window_bytes

    def move(self, op: str, size_bytes: int, count: int, num: int) -> Sample:
        source, target = (self._source, self._target) if op == WRITE else (self._target, self._source)
        places = max(1, self._window // size_bytes)
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        for i in range(num * count):
            at = i % places * size_bytes
            ctypes.memmove(target + at, source + at, size_bytes)
        seconds = time.perf_counter() - begin
        return Sample(seconds, time.thread_time() - begin_cpu, num * count * size_bytes)


class DriverCopy:
    """The CUDA driver's own copy between two places of this process, one call and one wait per piece.

    Raises:
        Unavailable: the driver cannot be loaded.
    """

    def __init__(self, name: str, library: str, source: int, target: int, window_bytes: int) -> None:
        self.name = name
        self._source, self._target, self._window = source, target, window_bytes
        try:
            self._driver = ctypes.CDLL(library)
        except OSError as error:
            raise Unavailable(str(error)) from error
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def move(self, op: str, size_bytes: int, count: int, num: int) -> Sample:
        source, target = (self._source, self._target) if op == WRITE else (self._target, self._source)
        places = max(1, self._window // size_bytes)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for i in range(num * count):
            at = i % places * size_bytes
            self._call("cuMemcpy", *map(ctypes.c_uint64, (target + at, source + at, size_bytes)))
            self._call("cuCtxSynchronize")
        seconds = time.perf_counter() - begin
        return Sample(seconds, time.process_time() - begin_cpu, num * count * size_bytes)

    def _call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._driver, name)(*arguments):
            raise Unavailable(f"{name} of the CUDA driver failed with error {result}")


class RawStreams:
    """TCP connections of loopback between two processes of a C program: as many as ours uses for as many
    bytes, at most ``num_streams``, with sockets' buffers as large as ours.

    Raises:
        Unavailable: the program is missing.
    """

    def __init__(self, window_bytes: int, num_streams: int) -> None:
        self._num_streams = num_streams
        self.name = "1 raw stream" if num_streams == 1 else f"{num_streams} raw streams"
        program = raw_stream_program()
        words = [str(program), str(window_bytes), str(num_streams), str(LOOPBACK_BUFFER_BYTES)]
        self._server = subprocess.Popen([*words, "serve"], stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        port = self._server.stdout.readline().strip()
        self._driver = subprocess.Popen(
            [*words, "drive", port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def move(self, op: str, size_bytes: int, count: int, num: int) -> Sample:
        lanes = max(1, min(self._num_streams, size_bytes * count // LANE_BYTES))
        return self._obeyed("w" if op == WRITE else "r", size_bytes, count * num, lanes)

    def ping(self, size_bytes: int, num: int) -> float:
        """Seconds of one round trip: a message of so many bytes one way, one byte back."""
        return self._obeyed("p", size_bytes, num, 1).seconds / num

    def _obeyed(self, kind: str, size_bytes: int, count: int, lanes: int) -> Sample:
        assert self._driver.stdin is not None and self._driver.stdout is not None
        pids = (self._server.pid, self._driver.pid)
        before = sum(map(cpu_s, pids))
        self._driver.stdin.write(f"{kind} {size_bytes} {count} {lanes}\n")
        self._driver.stdin.flush()
        answer = self._driver.stdout.readline()
        if not answer:
            raise Unavailable("the raw socket streams have ended; was one of its processes killed?")
        return Sample(float(answer), sum(map(cpu_s, pids)) - before, size_bytes * count)

    def close(self) -> None:
        for process in (self._driver, self._server):  # the driver's end is the server's, too
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def raw_stream_program() -> Path:
    """Path of the C program: beside the extension it was built with."""
    found = importlib.util.find_spec("mooncake._native")
    assert found is not None and found.origin is not None
    program = Path(found.origin).with_name("raw_stream")
    if not program.exists():
        raise Unavailable(f"{program} is missing; reinstall mooncake-serving to have it built")
    return program


class Fio:
    """fio reads or writes a file with O_DIRECT through io_uring as a batch does: with the request size and
    concurrency of the file transport, and to its end before the next begins.

    Raises:
        Unavailable: fio is not installed.
    """

    name = "fio"

    def __init__(self, file: Path, size_bytes: int, depth: int) -> None:
        self._program = _fio_program()
        self._file, self._depth = file, depth
        with file.open(
            "r+b" if file.exists() else "wb"
        ) as written:  # blocks that were never written are read without the disk
            for _ in range(0, size_bytes, len(_MIB)):
                written.write(_MIB)

    def move(self, op: str, size_bytes: int, count: int, num: int) -> Sample:
        """Run for ``FIO_MS``, because starting fio takes longer than moving ``num`` small batches."""
        block = min(size_bytes, FILE_PIECE_BYTES)
        num_pieces = -(-size_bytes // block) * count
        depth = min(self._depth, num_pieces)
        together = depth if num_pieces <= self._depth else 1
        words = [
            "--name=ceiling", f"--filename={self._file}", f"--rw={op}", f"--bs={block}", "--direct=1",
            "--ioengine=io_uring", f"--iodepth={depth}", f"--size={self._file.stat().st_size}",
            f"--runtime={FIO_MS}ms", "--time_based", "--output-format=json", "--thread",
            "--overwrite=1", "--allow_file_create=0", f"--iodepth_batch_submit={together}",
            f"--iodepth_batch_complete_min={together}", f"--iodepth_batch_complete_max={depth}",
        ]  # fmt: skip
        job = _ran(self._program, words)
        moved, seconds = job[op]["io_bytes"], job[op]["runtime"] / 1e3
        if not moved or not seconds:
            raise Unavailable(f"fio moved {moved} bytes in {seconds:g} s; is the disk stuck?")
        return Sample(seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds, moved)


class DurableFio:
    """fio writes to a file that exists, and calls fdatasync after each write, by several jobs at once.

    Raises:
        Unavailable: fio is not installed.
    """

    def __init__(self, file: Path, size_bytes: int) -> None:
        self._program = _fio_program()
        self._file, self._size_bytes = file, size_bytes

    def write(self, size_bytes: int, num_jobs: int) -> float:
        """Seconds in which ``num_jobs`` jobs have written so many bytes each, and have them on the disk."""
        part = self._size_bytes // num_jobs // size_bytes * size_bytes
        words = [
            "--name=ceiling", f"--filename={self._file}", "--rw=write", f"--bs={size_bytes}", "--direct=1",
            "--ioengine=psync", f"--numjobs={num_jobs}", "--fdatasync=1", f"--size={part}",
            f"--offset_increment={part}", f"--runtime={FIO_MS}ms", "--time_based", "--output-format=json",
            "--thread", "--group_reporting", "--overwrite=1", "--allow_file_create=0",
        ]  # fmt: skip
        job = _ran(self._program, words)
        written, seconds = job[WRITE]["total_ios"], job[WRITE]["runtime"] / 1e3
        if not written or not seconds:
            raise Unavailable(f"fio wrote {written} times in {seconds:g} s; is the disk stuck?")
        return float(num_jobs * seconds / written)


def _fio_program() -> str:
    program = shutil.which("fio")
    if program is None:
        raise Unavailable("fio is not installed (apt-get install fio)")
    return program


def _ran(program: str, words: list[str]) -> dict[str, Any]:
    """Run fio; returns the results of its first job, or of all that are reported together."""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"fio failed: {cause_of(error)}") from error
    if done.returncode != 0:
        raise Unavailable(f"fio failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    try:
        job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
    except (ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"fio did not answer as JSON: {done.stdout[:80]!r}") from error
    return job
