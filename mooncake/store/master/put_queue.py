# SPDX-License-Identifier: Apache-2.0
"""Puts that wait for space which demotion is about to free.

Where objects without a copy on SSD may not be evicted (``evict_undemoted`` off), full memory is not full for
long: objects are being copied to SSD, and leave when they are there. A writer with a waiting time
(``PutStart.wait_s``; clients set it for durable puts) is not refused meanwhile. Its put is tried again
whenever a demotion ends, in order of arrival, and refused when its time is over or when no demotion is under
way, because then waiting is useless.

A writer counts the time for writing from its request, so a put waits no longer than for half of ``put_s``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import msgspec

from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received, Reply

MAX_WAITING = 1024


@dataclasses.dataclass(slots=True, eq=False)
class _WaitingPut:
    event: Received
    until: float
    retry: Callable[[float], bool]
    """Try the missing keys again; returns whether some are still missing."""
    answer: Callable[[float], m.PutStarted]
    must_last: bool
    """Like ``Catalog.must_last``: one of the objects exists already, and is durable."""


class PutQueue:
    """A clock of the catalog. ``is_freeing()``: whether demotions are under way that will free space."""

    def __init__(self, catalog: Catalog, is_freeing: Callable[[], bool]) -> None:
        self._catalog = catalog
        self._is_freeing = is_freeing
        self._waiting: list[_WaitingPut] = []
        """In order of arrival."""
        self._has_news = False
        self.on_end: Callable[[msgspec.Struct, msgspec.Struct], None] = lambda message, reply: None
        """Called with requests that were not answered at once, and their answers."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def may_wait(self, wait_s: float) -> bool:
        return wait_s > 0 and len(self._waiting) < MAX_WAITING and self._is_freeing()

    def wait(
        self,
        event: Received,
        wait_s: float,
        retry: Callable[[float], bool],
        answer: Callable[[float], m.PutStarted],
        now: float,
    ) -> None:
        until = now + min(wait_s, self._catalog.settings.put_s / 2)
        self._waiting.append(_WaitingPut(event, until, retry, answer, self._catalog.must_last))

    def demoted(self) -> None:
        """A demotion has ended, with or without success."""
        self._has_news = bool(self._waiting)

    def deadline(self) -> float | None:
        if self._has_news:
            return -math.inf
        return min((one.until for one in self._waiting), default=None)

    def expire(self, now: float) -> None:
        has_news, self._has_news = self._has_news, False
        is_freeing = self._is_freeing()
        left: list[_WaitingPut] = []
        for one in self._waiting:
            self._catalog.must_last = one.must_last
            is_missing = one.retry(now) if has_news else True
            one.must_last = self._catalog.must_last
            if is_missing and is_freeing and one.until > now:
                left.append(one)
                continue
            reply = one.answer(now)
            self.on_end(one.event.message, reply)
            self._catalog.replies.append(Reply(one.event.origin, reply, one.must_last))
        self._waiting = left

    def check(self) -> None:
        assert len(self._waiting) <= MAX_WAITING
        assert self._waiting or not self._has_news

    def __repr__(self) -> str:
        return f"<PutQueue {len(self._waiting)} waiting>"
