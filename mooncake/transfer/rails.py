# SPDX-License-Identifier: Apache-2.0
"""State of the paths to one peer: measured speed, queued bytes, and which are masked after failures.

A rail that failed is masked for a time that doubles with each failure; after that, one part at a time
is sent over it as a probe, and the first that arrives unmasks it. The duration of a part is predicted from
measurements: latency, bandwidth, and the bytes queued in front of it. Paths of one scheme are
equals and share the work; another scheme is used when none of the better one is left.

This module moves nothing and reads no clock. ``batch.py`` queries it for where to send a part and
reports the outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mooncake.transfer.descriptor import scheme_of

FIRST_MASK_S = 0.25
MAX_MASK_S = 30.0
UNMEASURED_BYTES_PER_S = 1e9
UNMEASURED_LATENCY_S = 50e-6
NEWEST_WEIGHT = 0.3
"""Weight of the newest measurement; the rest is the weight of the previous estimate."""
BIG_BYTES = 256 << 10
PENALTY_PER_RANK = 0.5
"""Factor by which a rail is assumed to be slower for each step farther from the memory."""
MIN_S_PER_BYTE = 1e-13
PATIENCE_FACTOR = 8.0
"""Multiple of the predicted duration after which a part is moved to another path, if there is one."""


@dataclass(slots=True)
class Rail:
    """State of one path."""

    path: str
    bytes_per_s: float = 0.0
    "Measured bandwidth; 0 before the first big part."
    latency_s: float = UNMEASURED_LATENCY_S
    queued_bytes: int = 0
    num_under_way: int = 0
    last_end: float = 0.0
    masked_at: float | None = None
    "None when the rail is not masked."
    masked_until: float = 0.0
    num_failures: int = 0
    "Consecutive failures."
    is_being_probed: bool = False

    @property
    def is_masked(self) -> bool:
        return self.masked_at is not None


class Rails:
    """The paths to one peer, best scheme first.

    Args:
        paths: ``scheme`` or ``scheme@rail``.
        patience_s: minimum time for a part before it is sent over another path instead.
        big_bytes: parts from this size on measure bandwidth, smaller ones latency.
    """

    def __init__(self, paths: Sequence[str], patience_s: float = 2.0, big_bytes: int = BIG_BYTES) -> None:
        self.rails = {path: Rail(path) for path in paths}
        self.path_events: list[tuple[str, str, str]] = []
        "(event, path, reason) not logged yet; the logger clears it."
        self._patience_s = patience_s
        self._big_bytes = big_bytes
        self._story: deque[str] = deque(maxlen=64)

    def is_open(self, path: str, now: float) -> bool:
        """Whether the path is unmasked, or its mask has expired and one part may be sent as a probe."""
        rail = self.rails[path]
        return not rail.is_masked or (now >= rail.masked_until and not rail.is_being_probed)

    def in_order(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if not self.rails[path].is_masked]

    def predicted_s(self, path: str, num_bytes: int, rank: int = 0) -> float:
        """Predicted time until the last byte of ``num_bytes`` more would arrive."""
        rail = self.rails[path]
        seconds = rail.latency_s + (rail.queued_bytes + num_bytes) / self.bytes_per_s(path)
        return seconds * (1 + PENALTY_PER_RANK * rank)

    def bytes_per_s(self, path: str) -> float:
        """Measured bandwidth, or until there is one the bandwidth of its equals."""
        rail = self.rails[path]
        if rail.bytes_per_s:
            return rail.bytes_per_s
        scheme = scheme_of(path)
        measured = [
            other.bytes_per_s
            for other in self.rails.values()
            if other.bytes_per_s and scheme_of(other.path) == scheme
        ]
        return sum(measured) / len(measured) if measured else UNMEASURED_BYTES_PER_S

    def together_s(self, paths: Sequence[str], num_bytes: int) -> float:
        """Predicted time for these paths together to carry their queued bytes and ``num_bytes`` more."""
        queued = sum(self.rails[path].queued_bytes for path in paths)
        return (queued + num_bytes) / sum(self.bytes_per_s(path) for path in paths)

    def choose(
        self, paths: Sequence[str], num_bytes: int, now: float, ranks: Mapping[str, int] | None = None
    ) -> str | None:
        """The path on which ``num_bytes`` arrive first, or one due for a probe; None when all are masked.

        ``paths`` are equals; ``ranks`` are their distances from the memory that is moved.
        """
        candidates = []
        for path in paths:
            if self.rails[path].is_masked:
                if self.is_open(path, now):
                    return path
            else:
                candidates.append(path)
        if not candidates:
            return None
        ranks = ranks or {}
        return min(candidates, key=lambda path: self.predicted_s(path, num_bytes, ranks.get(path, 0)))

    def first_to_unmask(self, paths: Sequence[str]) -> str:
        """The path whose mask ends first, among masked ones."""
        return min(paths, key=lambda path: self.rails[path].masked_until)

    def patience_s(self, path: str, num_bytes: int) -> float:
        """Time limit of a part that could go over another path. A rail being probed gets a quarter of it."""
        if self.rails[path].is_masked:
            return self._patience_s / 4
        return max(self._patience_s, PATIENCE_FACTOR * self.predicted_s(path, num_bytes))

    def sent(self, path: str, num_bytes: int) -> None:
        """Record that a part was sent."""
        rail = self.rails[path]
        rail.queued_bytes += num_bytes
        rail.num_under_way += 1
        if rail.is_masked:
            rail.is_being_probed = True

    def arrived(self, path: str, num_bytes: int, sent_at: float, now: float) -> None:
        """Record that a part sent at ``sent_at`` has arrived."""
        rail = self._ended(path, num_bytes)
        seconds = max(0.0, now - max(sent_at, rail.last_end))
        rail.last_end = now
        if rail.masked_at is not None and sent_at >= rail.masked_at:
            self._record("rail_recovered", path, f"carried {num_bytes} bytes")
            rail.masked_at, rail.masked_until, rail.num_failures = None, 0.0, 0
            rail.is_being_probed = False
        if num_bytes >= self._big_bytes:
            # Averaged as seconds per byte: of two parts that end together the second took no time, and
            # the mean of infinitely fast and half as fast must be what both together showed.
            measured = max(seconds - rail.latency_s, seconds / 2) / num_bytes
            known = 1 / rail.bytes_per_s if rail.bytes_per_s else measured
            rail.bytes_per_s = 1 / max(known + NEWEST_WEIGHT * (measured - known), MIN_S_PER_BYTE)
        elif seconds and not rail.num_under_way:
            rail.latency_s += NEWEST_WEIGHT * (seconds - rail.latency_s)

    def failed(self, path: str, num_bytes: int, sent_at: float, now: float, reason: str) -> None:
        """Record that a part sent at ``sent_at`` failed because of the rail."""
        rail = self._ended(path, num_bytes)
        if rail.masked_at is not None and sent_at < rail.masked_at:
            return  # the same failure, reported by another part
        rail.is_being_probed = False
        if rail.is_masked and now < rail.masked_until:
            return  # sent only because all others were masked, too
        rail.num_failures += 1
        mask_s = min(FIRST_MASK_S * 2.0 ** (rail.num_failures - 1), MAX_MASK_S)
        rail.masked_at, rail.masked_until = now, now + mask_s
        self._record("rail_masked", path, f"{reason}; tried again in {mask_s:g} s")

    def dropped(self, path: str, num_bytes: int) -> None:
        """Record that a part ended for a reason unrelated to the rail (cancelled, refused)."""
        rail = self._ended(path, num_bytes)
        rail.is_being_probed = False

    def check(self) -> None:
        for rail in self.rails.values():
            assert rail.queued_bytes >= 0 and rail.num_under_way >= 0, rail
            assert rail.num_under_way or not rail.queued_bytes, rail
            assert rail.num_under_way or not rail.is_being_probed, rail
            assert rail.is_masked == (rail.num_failures > 0), rail
            assert rail.bytes_per_s >= 0 and rail.latency_s > 0, rail
            assert rail.masked_at is None or rail.masked_until - rail.masked_at < MAX_MASK_S + 1, rail

    def story(self, key: str = "") -> list[str]:
        """History of the rails, oldest first; ``key`` restricts it to one path."""
        return [line for line in self._story if key in line]

    def __repr__(self) -> str:
        def shown(rail: Rail) -> str:
            state = " masked" if rail.is_masked else ""
            return f"{rail.path} {rail.bytes_per_s / 1e9:.2f} GB/s {rail.latency_s * 1e6:.0f} us{state}"

        return f"<Rails {', '.join(shown(rail) for rail in self.rails.values())}>"

    def _ended(self, path: str, num_bytes: int) -> Rail:
        rail = self.rails[path]
        rail.queued_bytes -= num_bytes
        rail.num_under_way -= 1
        return rail

    def _record(self, event: str, path: str, reason: str) -> None:
        self._story.append(f"{event} {path}: {reason}")
        self.path_events.append((event, path, reason))
