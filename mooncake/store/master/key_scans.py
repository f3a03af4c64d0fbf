# SPDX-License-Identifier: Apache-2.0
"""Requests that examine every key, a slice at a time, so that others are answered in between.

A scan begins with a list of the keys that are readable then, and examines each in turn, with its state at
that time. Objects put meanwhile may be seen or not, removed ones are not. Whatever a scan has not done in
its first slice, which is part of the request, is done in slices of about a millisecond, one per ``PAUSE_S``,
and the request is answered at the end. So heartbeats and the election's lease are never late because of a
scan, however many keys there are, and a small store answers at once.

Few scans may be under way, and fewer of one connection; they take turns. One more is refused.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable

import msgspec

from mooncake.rpc.wire import Failure
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received, Reply
from mooncake.store.messages import Removed
from mooncake.types import ObjectKey

MAX_SCANS = 8
MAX_SCANS_PER_CONNECTION = 2
"""Scans of one connection."""
SLICE_COST = 1000
"""Budget of one slice, in microseconds roughly; a slice has one key at least."""
PAUSE_S = 0.002
"""Pause between two slices, of any scan."""


@dataclasses.dataclass(slots=True, eq=False)
class KeyScan:
    """``visit(key, now)`` returns its cost, or None to end the scan. ``end(now)`` makes the answer."""

    event: Received
    keys: list[ObjectKey]
    """Remaining keys, the next one last."""
    visit: Callable[[ObjectKey, float], int | None]
    end: Callable[[float], msgspec.Struct]

    @property
    def connection(self) -> Hashable:
        return self.event.connection


class KeyScans:
    """Scans that are under way. A clock of the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._scans: deque[KeyScan] = deque()
        """The scan whose turn is next comes first."""
        self._slice_at: float | None = None
        self.on_end: Callable[[msgspec.Struct, msgspec.Struct], None] = lambda message, reply: None
        """Called with requests that were not answered at once, and their answers."""

    def begin(
        self,
        event: Received,
        visit: Callable[[ObjectKey, float], int | None],
        end: Callable[[float], msgspec.Struct],
        now: float,
    ) -> msgspec.Struct | None:
        """The answer, if the first slice was enough; None: it comes later."""
        num_own = sum(scan.connection == event.connection for scan in self._scans)
        if len(self._scans) >= MAX_SCANS or num_own >= MAX_SCANS_PER_CONNECTION:
            what = f"{len(self._scans)} requests that examine all keys are under way, {num_own} of them yours"
            return Failure("unavailable", f"{what}; try again when one is answered")
        scan = KeyScan(event, list(reversed(self._catalog.objects.readable)), visit, end)
        if self._is_over(scan, now):
            return scan.end(now)
        self._scans.append(scan)
        if self._slice_at is None:
            self._slice_at = now + PAUSE_S
        return None

    def _is_over(self, scan: KeyScan, now: float) -> bool:
        """Do one slice; returns whether the scan is over."""
        left = SLICE_COST
        while scan.keys and left > 0:
            cost = scan.visit(scan.keys.pop(), now)
            if cost is None:
                scan.keys.clear()
            else:
                left -= cost
        return not scan.keys

    def deadline(self) -> float | None:
        return self._slice_at

    def expire(self, now: float) -> None:
        scan = self._scans.popleft()
        if self._is_over(scan, now):
            reply = scan.end(now)
            self.on_end(scan.event.message, reply)
            self._catalog.replies.append(
                Reply(scan.event.origin, reply, must_last=isinstance(reply, Removed))
            )
        else:
            self._scans.append(scan)
        self._slice_at = now + PAUSE_S if self._scans else None

    def check(self) -> None:
        assert len(self._scans) <= MAX_SCANS
        assert (self._slice_at is not None) == bool(self._scans)
        assert all(scan.keys for scan in self._scans)

    def __repr__(self) -> str:
        return f"<KeyScans {len(self._scans)} under way>"
