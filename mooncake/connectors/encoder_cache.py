# SPDX-License-Identifier: Apache-2.0
"""An engine's scheduler and the encoder outputs in the store: what to look for, and what a request can use.

A core. Before a request is scheduled, its images (or audio clips) are looked up, and outputs that were found
are *staged*: they are in this process's memory, checked, before the scheduler counts on them. An engine that
has left out an encoder's computation cannot make up for it later in the step, so an output that may still
fail to arrive must not count as found. What is late, refused or does not fit is a miss: the encoder computes.

``EncoderCache`` knows items by the request and the name that the engine gives them, and gets their keys with
the results of lookups; it knows neither contents nor the store.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from mooncake.connectors.encoder_output import EncoderOutput
from mooncake.types import ObjectKey

LOOKING, FOUND, MISSED = "looking", "found", "missed"

MAX_LOOKUPS = 16

MAX_STORY = 1000
"""Events that are kept."""


@dataclasses.dataclass
class CachedItem:
    """One item of one request, from its first lookup to the end of the request."""

    number: int
    """Number of its lookup."""
    state: str
    deadline: float
    key: ObjectKey | None = None
    """The store's key; None before the lookup has ended, or if there is none."""
    output: EncoderOutput | None = None
    """The staged output; None also where the engine only needs to know that the store has it."""

    @property
    def size_bytes(self) -> int:
        return 0 if self.output is None else self.output.size_bytes


@dataclasses.dataclass(frozen=True)
class ItemPlan:
    """What the ranks do for an item in the step that needs it: use ``output``, or else compute it.

    ``save_key``: key under which a computed output is to be saved; None: it is not.
    """

    output: EncoderOutput | None
    save_key: ObjectKey | None


class EncoderCache:
    """Decisions for one engine; all calls come from its scheduler's thread.

    Args:
        timeout_s: time after which an item whose lookup has not ended is computed.
        max_staged_bytes: limit of the outputs that are staged and not used yet.
        max_lookups: limit of the lookups at a time, because what they load is not staged yet. The items
            beyond it are looked up in a later step; their requests wait.
    """

    def __init__(self, timeout_s: float, max_staged_bytes: int, max_lookups: int = MAX_LOOKUPS) -> None:
        self._timeout_s = timeout_s
        self._max_staged_bytes = max_staged_bytes
        self._max_lookups = max_lookups
        self._num_looking = 0
        self._postponed: set[str] = set()
        """Requests with items that are not looked up yet, because of ``max_lookups``."""
        self._items: dict[tuple[str, str], CachedItem] = {}
        self._names: dict[str, list[str]] = {}
        """Request -> the names of its items above."""
        self._local: set[str] = set()
        """Names of items in the engine's own cache, which are not looked up."""
        self._lookups: dict[int, tuple[str, str]] = {}
        """Number of a lookup -> the item that it is for."""
        self._num_lookups = 0
        self._asked = ""
        self._promised: dict[str, CachedItem] = {}
        """Items that ``has`` has confirmed in this step: the engine does not compute them any longer."""
        self._events: deque[tuple[str, str]] = deque(maxlen=MAX_STORY)
        self.staged_bytes = 0

    def wants(self, request_id: str, names: Sequence[str], now: float) -> dict[str, int]:
        """Record that a request needs these items next; returns the lookups to begin: name -> number."""
        self._asked = request_id
        self._postponed.discard(request_id)
        new: dict[str, int] = {}
        for name in names:
            if name in self._local or (request_id, name) in self._items:
                continue
            if self._num_looking >= self._max_lookups:
                self._postponed.add(request_id)
                break
            self._num_looking += 1
            self._num_lookups += 1
            new[name] = self._num_lookups
            self._items[request_id, name] = CachedItem(new[name], LOOKING, now + self._timeout_s)
            self._lookups[new[name]] = (request_id, name)
            self._names.setdefault(request_id, []).append(name)
            self._record(name, f"lookup for {request_id}")
        return new

    def is_waiting(self, request_id: str, now: float) -> bool:
        """Whether a lookup for this request has not ended. One that is late has: its item is a miss."""
        is_waiting = request_id in self._postponed
        for name in self._names.get(request_id, ()):
            item = self._items[request_id, name]
            if item.state == LOOKING and now >= item.deadline:
                self._miss(name, item, "late")
            is_waiting |= item.state == LOOKING
        return is_waiting

    def found(self, number: int, key: ObjectKey, output: EncoderOutput | None) -> str:
        """Record that the store has an item, with its output if it was loaded; returns the outcome.

        ``hit``; ``refused``: it does not fit into the staged bytes; ``late``: it is being computed, or the
        request has ended, or ``forget`` was called since.
        """
        request_id, name = self._lookups.get(number, ("", ""))
        item = self._items.get((request_id, name))
        if item is None:
            return "late"
        item.key = key
        if item.state != LOOKING:
            self._record(name, "found too late")
            return "late"
        size_bytes = 0 if output is None else output.size_bytes
        if self.staged_bytes + size_bytes > self._max_staged_bytes:
            self._miss(name, item, f"refused: {size_bytes} bytes do not fit beside {self.staged_bytes}")
            return "refused"
        self._num_looking -= 1
        item.state, item.output = FOUND, output
        self.staged_bytes += size_bytes
        self._record(name, f"found, {size_bytes} bytes staged for {request_id}")
        return "hit"

    def missed(self, number: int, key: ObjectKey | None, reason: str) -> None:
        """Record that the store does not have an item. ``key`` None: a computed output is not saved."""
        request_id, name = self._lookups.get(number, ("", ""))
        item = self._items.get((request_id, name))
        if item is None:
            return
        item.key = key
        if item.state == LOOKING:
            self._miss(name, item, reason)

    def has(self, name: str) -> bool:
        """Whether the request of the latest ``wants`` can use this item without computing it."""
        item = self._items.get((self._asked, name))
        if item is None or item.state != FOUND:
            return False
        self._promised[name] = item
        return True

    def end_step(self) -> None:
        """Record that the engine has scheduled its step."""
        self._promised.clear()

    def take(self, request_id: str, name: str) -> ItemPlan:
        """The plan for an item that the engine's cache now has room for."""
        self._local.add(name)
        item = self._items.get((request_id, name))
        if item is None or item.state != FOUND:
            promised = self._promised.get(name)
            if promised is not None and promised.state == FOUND:
                item = promised  # else its key is that of another request's content
        self._drop_copies(name, item)
        if item is None:
            return ItemPlan(None, None)
        if item.state == FOUND:
            plan = ItemPlan(item.output, None)
            self._unstage(item)
            item.state = MISSED  # if it is needed again it is in the engine's own cache, or is computed
            self._record(name, f"used by {request_id}")
            return plan
        self._record(name, f"computed by {request_id}")
        return ItemPlan(None, item.key)

    def _drop_copies(self, name: str, kept: CachedItem | None) -> None:
        """Unstage what other requests have of an item: from now on it is in the engine's own cache."""
        for (_, other), item in self._items.items():
            if other == name and item.state == FOUND and item is not kept:
                self._unstage(item)
                item.state = MISSED

    def evicted(self, names: Iterable[str]) -> None:
        """Record that the engine's own cache no longer has these items."""
        self._local.difference_update(names)

    def finished(self, request_id: str) -> None:
        """Drop what was kept for a request."""
        self._postponed.discard(request_id)
        for name in self._names.pop(request_id, ()):
            item = self._items.pop((request_id, name))
            del self._lookups[item.number]
            self._num_looking -= item.state == LOOKING
            self._unstage(item)

    def forget(self) -> None:
        """Drop everything, because the engine's encoder may have changed.

        Items of requests that wait are looked up again, under keys of the new encoder; what lookups of before
        still find is not used.
        """
        self._local.clear()
        self._promised.clear()
        for request_id in list(self._names):
            self.finished(request_id)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.staged_bytes == sum(item.size_bytes for item in self._items.values())
        assert 0 <= self.staged_bytes <= self._max_staged_bytes
        assert self._num_looking == sum(item.state == LOOKING for item in self._items.values())
        assert self._num_looking <= self._max_lookups
        assert all(item.output is None or item.state == FOUND for item in self._items.values())
        known = {(request_id, name) for request_id, names in self._names.items() for name in names}
        assert known == self._items.keys() == set(self._lookups.values())
        assert all(self._lookups[item.number] == item_id for item_id, item in self._items.items())

    def story(self, name: str) -> list[str]:
        """The latest events of an item with their reasons, oldest first."""
        return [text for one, text in self._events if one == name]

    def _miss(self, name: str, item: CachedItem, reason: str) -> None:
        self._num_looking -= item.state == LOOKING
        item.state = MISSED
        self._record(name, f"missed: {reason}")

    def _unstage(self, item: CachedItem) -> None:
        self.staged_bytes -= item.size_bytes
        item.output = None

    def _record(self, name: str, text: str) -> None:
        self._events.append((name, text))
