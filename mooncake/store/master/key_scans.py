"""Requests that look at every key, a slice at a time, so that others are answered in between.

A walk begins with a list of the keys that can be read then, and looks at each in turn, at what is there by
then. What is put meanwhile may be seen or not, what goes meanwhile is not. Whatever a walk has not done in
its first slice, which is part of the request, is done in slices of about a millisecond, one per ``PAUSE_S``,
and the request is answered at the end. So heartbeats and the election's lease are never late for a walk,
however many keys there are, and a small store answers at once.

Few walks may be under way, and fewer of one connection; they take turns. One more is refused.
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
"""Of one connection."""
SLICE_COST = 1000
"""What one slice may cost, in microseconds about; a slice has one key at least."""
PAUSE_S = 0.002
"""Between two slices, of whichever walk."""


@dataclasses.dataclass(slots=True, eq=False)
class KeyScan:
    """``look(key, now)`` says what it cost, or None: that was enough. ``end(now)`` is the answer."""

    event: Received
    keys: list[ObjectKey]
    """To come, the next one last."""
    look: Callable[[ObjectKey, float], int | None]
    end: Callable[[float], msgspec.Struct]

    @property
    def connection(self) -> Hashable:
        return self.event.connection


class KeyScans:
    """Those that are under way. A clock of the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._walks: deque[KeyScan] = deque()
        """The one whose turn it is first."""
        self._slice_at: float | None = None
        self.on_end: Callable[[msgspec.Struct, msgspec.Struct], None] = lambda message, reply: None
        """Told of requests that were not answered at once, with their answers."""

    def begin(
        self,
        event: Received,
        look: Callable[[ObjectKey, float], int | None],
        end: Callable[[float], msgspec.Struct],
        now: float,
    ) -> msgspec.Struct | None:
        """The answer, if the first slice was all; None: it comes later."""
        num_own = sum(walk.connection == event.connection for walk in self._walks)
        if len(self._walks) >= MAX_SCANS or num_own >= MAX_SCANS_PER_CONNECTION:
            what = f"{len(self._walks)} requests that look at all keys are under way, {num_own} of them yours"
            return Failure("unavailable", f"{what}; ask again when one is answered")
        walk = KeyScan(event, list(reversed(self._catalog.objects.readable)), look, end)
        if self._is_over(walk, now):
            return walk.end(now)
        self._walks.append(walk)
        if self._slice_at is None:
            self._slice_at = now + PAUSE_S
        return None

    def _is_over(self, walk: KeyScan, now: float) -> bool:
        """One slice."""
        left = SLICE_COST
        while walk.keys and left > 0:
            cost = walk.look(walk.keys.pop(), now)
            if cost is None:
                walk.keys.clear()
            else:
                left -= cost
        return not walk.keys

    def deadline(self) -> float | None:
        return self._slice_at

    def expire(self, now: float) -> None:
        walk = self._walks.popleft()
        if self._is_over(walk, now):
            reply = walk.end(now)
            self.on_end(walk.event.message, reply)
            self._catalog.replies.append(
                Reply(walk.event.origin, reply, must_last=isinstance(reply, Removed))
            )
        else:
            self._walks.append(walk)
        self._slice_at = now + PAUSE_S if self._walks else None

    def check(self) -> None:
        assert len(self._walks) <= MAX_SCANS
        assert (self._slice_at is not None) == bool(self._walks)
        assert all(walk.keys for walk in self._walks)

    def __repr__(self) -> str:
        return f"<KeyScans {len(self._walks)} under way>"
