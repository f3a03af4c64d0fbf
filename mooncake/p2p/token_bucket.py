# SPDX-License-Identifier: Apache-2.0
"""Token bucket: bounds the bytes per second of one direction.

Bytes may be taken while the level is positive, which may then become negative: so a chunk that is larger than
the bucket can pass, and the rate is exact over any longer time.
"""

from __future__ import annotations


class TokenBucket:
    """Bucket of ``burst_bytes`` that fills with ``rate_bytes_s``; a rate of 0 sets no bound."""

    def __init__(self, rate_bytes_s: float, burst_bytes: float) -> None:
        self._rate = rate_bytes_s
        self._burst = burst_bytes
        self._level = burst_bytes
        self._at: float | None = None

    def ready_at(self, now: float) -> float:
        """The instant from which bytes may be taken; not after ``now`` when they may be taken now."""
        if not self._rate:
            return now
        self._fill(now)
        return now if self._level > 0 else now + (1 - self._level) / self._rate

    def wait_s(self, size_bytes: int, now: float) -> float:
        """Seconds until ``size_bytes`` more than now have been taken at this rate; 0 without a limit."""
        if not self._rate:
            return 0.0
        self._fill(now)
        return max(0.0, (size_bytes - self._level) / self._rate)

    def take(self, size_bytes: int, now: float) -> None:
        """Take bytes, after ``ready_at`` has allowed it."""
        self._fill(now)
        self._level -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that were taken and not moved."""
        self._level = min(self._burst, self._level + size_bytes)

    def check(self) -> None:
        assert self._level <= self._burst

    def _fill(self, now: float) -> None:
        if self._at is not None:
            self._level = min(self._burst, self._level + self._rate * max(0.0, now - self._at))
        self._at = now
