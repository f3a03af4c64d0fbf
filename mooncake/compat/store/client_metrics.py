# SPDX-License-Identifier: Apache-2.0
"""Bytes that a drop-in client has moved and durations of its calls, under the existing package's names.

That package's dashboards read these; ours read the process's registry, which counts within the same store.
"""

from __future__ import annotations

import bisect
import threading

BUCKETS_US = (125, 150, 200, 300, 400, 500, 750, 1000, 2000, 5000, 10_000, 50_000, 100_000, 1_000_000)
KINDS = ("get", "put", "batch_get", "batch_put")


def kind_of(call: str) -> str:
    """Which of ``KINDS`` a call is; empty for calls that move no object."""
    batch = call.startswith("batch_") or call.endswith("_batch")
    for verbs, kind in ((("put", "upsert", "pub"), "put"), (("get",), "get")):
        if call.removeprefix("batch_").startswith(verbs):
            moves_nothing = "session" in call or call in ("get_size", "get_replica_desc", "get_buffer_size")
            return "" if moves_nothing else f"batch_{kind}" if batch else kind
    return ""


class ClientMetrics:
    """Counters and histograms of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = {"read": 0, "write": 0}
        self._counts = {kind: [0] * (len(BUCKETS_US) + 1) for kind in KINDS}
        self._sums_us = dict.fromkeys(KINDS, 0.0)

    def count_bytes(self, direction: str, size_bytes: int) -> None:
        """Count bytes that were moved; ``direction``: read or write."""
        with self._lock:
            self._bytes[direction] += size_bytes

    def observe_call(self, call: str, seconds: float) -> None:
        """Record the duration of a call; calls that move no object are ignored."""
        kind = kind_of(call)
        if kind:
            micros = seconds * 1e6
            with self._lock:
                self._counts[kind][bisect.bisect_left(BUCKETS_US, micros)] += 1
                self._sums_us[kind] += micros

    def page(self) -> bytes:
        """Render the metrics as Prometheus text."""
        with self._lock:
            counts = {kind: list(row) for kind, row in self._counts.items()}
            sums_us, moved = dict(self._sums_us), dict(self._bytes)
        lines: list[str] = []
        for direction, size_bytes in moved.items():
            name = f"mooncake_transfer_{direction}_bytes"
            lines += [f"# HELP {name} Bytes of objects", f"# TYPE {name} counter", f"{name} {size_bytes}"]
        for kind, row in counts.items():
            name = f"mooncake_transfer_{kind}_latency"
            lines += [f"# HELP {name} Microseconds of one call", f"# TYPE {name} histogram"]
            total = 0
            for bound, count in zip((*BUCKETS_US, "+Inf"), row, strict=True):
                total += count
                lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
            lines += [f"{name}_sum {sums_us[kind]:.0f}", f"{name}_count {total}"]
        return ("\n".join(lines) + "\n").encode()

    def summary(self) -> str:
        """Summary in one line for people."""
        with self._lock:
            parts = [f"{direction} {size_bytes} B" for direction, size_bytes in self._bytes.items()]
            for kind in KINDS:
                num = sum(self._counts[kind])
                mean_us = self._sums_us[kind] / num if num else 0.0
                parts.append(f"{kind} {num} calls, mean {mean_us:.0f} us")
        return "; ".join(parts) + "\n"
