# SPDX-License-Identifier: Apache-2.0
"""Many client processes that call a server at the same time, each in a closed loop, for any client library.

The processes are forked from one that has imported the library, which takes a fraction of the time that
starting them takes. Only the standard library is imported here, because ``clients_reference.py`` runs under
an interpreter that has the existing package instead of ours.
"""

from __future__ import annotations

import os
import struct
import time
import traceback
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

Operations = dict[str, Callable[[], None]]
"""What a client can do, by name; each makes one call and raises if its result is wrong."""

HEAD_START_S = 0.2
"""Time from the order to the start, in which all processes wake up."""


class ForkedClients:
    """``number`` processes; ``connect(i)`` is called in process ``i`` and returns its operations."""

    def __init__(self, number: int, connect: Callable[[int], Operations]) -> None:
        self.processes: list[int] = []
        self._orders: list[int] = []
        self._results: list[int] = []
        for index in range(number):
            orders, results = os.pipe(), os.pipe()
            process = os.fork()
            if process == 0:
                for other in (*self._orders, *self._results, orders[1], results[0]):
                    os.close(other)
                try:
                    _serve(connect(index), orders[0], results[1])
                except BaseException:
                    os.write(2, traceback.format_exc().encode())
                os._exit(1)  # without destructors, which are not part of the measurement
            os.close(orders[0])
            os.close(results[1])
            self.processes.append(process)
            self._orders.append(orders[1])
            self._results.append(results[0])
            # One after the other: many that connect at once would find the same ports free.
            _read(results[0], 1)

    def measure(self, what: str, seconds: float) -> dict[str, Any]:
        """Let all do ``what`` for ``seconds``; the calls of each, and percentiles of their times."""
        self.start(what, seconds)
        return self.finish(seconds)

    def start(self, what: str, seconds: float) -> None:
        start = time.monotonic() + HEAD_START_S
        for orders in self._orders:
            _write(orders, struct.pack("<dd16s", start, start + seconds, what.encode()))

    def finish(self, seconds: float) -> dict[str, Any]:
        """What ``measure`` returns, after ``start``."""
        times = array("d")
        counts: list[int] = []
        for results in self._results:
            (size,) = struct.unpack("<q", _read(results, 8))
            counts.append(size // 8)
            times.frombytes(_read(results, size))
        ordered = sorted(times)
        return {
            "per_s": len(ordered) / seconds,
            "p50_s": ordered[len(ordered) // 2] if ordered else None,
            "p99_s": ordered[int(len(ordered) * 0.99)] if len(ordered) >= 100 else None,
            "counts": counts,
        }

    def close(self) -> None:
        for orders, results in zip(self._orders, self._results, strict=True):
            os.close(orders)
            os.close(results)
        for process in self.processes:
            os.waitpid(process, 0)


def _serve(operations: Operations, orders: int, results: int) -> None:
    """Carry out orders until their pipe is closed."""
    for operation in operations.values():  # the first call makes connections
        operation()
    _write(results, b"r")
    while order := os.read(orders, 32):
        start, end, name = struct.unpack("<dd16s", order)
        operation = operations[name.rstrip(b"\0").decode()]
        times = array("d")
        time.sleep(max(0.0, start - time.monotonic()))
        began = time.monotonic()
        while not times or began < end:
            operation()
            now = time.monotonic()
            times.append(now - began)
            began = now
        content = times.tobytes()
        _write(results, struct.pack("<q", len(content)) + content)
    os._exit(0)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _read(file: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = os.read(file, size - len(data))
        if not piece:
            raise RuntimeError("a client ended")
        data += piece
    return bytes(data)


def processor_s(process: int) -> float:
    """Seconds of processor time that all threads of a process have used, without its ended threads."""
    total_ns = 0
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_bytes().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return total_ns / 1e9
