"""Put-ends that are answered when a copy is on SSD.

The object is readable at once; only its writer waits, because an answer means that the bytes
outlive the process. ``tiers.py`` plans the copy. A writer that would wait too long, or whose copy
fails, is refused, and the object goes with it: were it left, the next put of the key would find it
and call it stored.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.catalog import Catalog
from mooncake.store.effects import Received, Reply
from mooncake.store.objects import Extent, StoredObject
from mooncake.store.tasks import Ended, Task
from mooncake.types import Tier


@dataclasses.dataclass(eq=False)
class Parked:
    """One put-end without an answer."""

    event: Received
    outcomes: list[bool | Refusal]
    waiting: dict[int, list[int]]
    """Object id -> its places in ``outcomes``."""
    objects: dict[int, StoredObject]
    """By the same ids, and those that have ended."""
    deadline: float


class MakeDurable(Protocol):
    """Plans a copy on SSD and calls ``ended`` with what came of it; or says why there can't be one."""

    def __call__(self, stored: StoredObject, now: float, ended: Ended, /) -> Refusal | None: ...


class Durable:
    """Holds those answers. A watcher and a clock of the catalog."""

    def __init__(self, catalog: Catalog, make_durable: MakeDurable) -> None:
        self._catalog = catalog
        self._make_durable = make_durable
        self._parked: list[Parked] = []
        """In the order of their deadlines."""
        catalog.watchers.append(self)
        catalog.clocks.append(self)
        catalog.on_complete.append(self._completed)

    def is_awaited(self, stored: StoredObject) -> bool:
        """Whether its put-end must wait."""
        return stored.policy.is_durable and not stored.complete(Tier.SSD)

    def answer(
        self, event: Received, outcomes: list[bool | Refusal], waiting: dict[int, StoredObject], now: float
    ) -> m.Outcomes | None:
        """The answer to a put-end; None: it comes when the objects in ``waiting``, by their places in
        ``outcomes``, are on SSD."""
        if not waiting:
            return m.Outcomes(outcomes)
        places: dict[int, list[int]] = {}
        for index, stored in waiting.items():
            places.setdefault(stored.object_id, []).append(index)
        objects = {stored.object_id: stored for stored in waiting.values()}
        known = {object_id for parked in self._parked for object_id in parked.waiting}
        deadline = now + self._catalog.settings.put_s
        self._parked.append(Parked(event, outcomes, places, objects, deadline))
        for stored in objects.values():
            if stored.object_id not in known:
                refusal = self._make_durable(stored, now, self._planned)
                if refusal is not None:
                    self._fail(stored, refusal.reason, now)
        return None

    def _planned(self, task: Task, refusal: Refusal | None, now: float) -> None:
        if refusal is not None:
            self._fail(task.stored, str(refusal), now)

    def _fail(self, stored: StoredObject, reason: str, now: float) -> None:
        if not any(stored.object_id in parked.waiting for parked in self._parked):
            return
        self._end(stored, Refusal("no_ssd", f"the copy on SSD failed: {reason}"))
        if stored.is_readable:
            self._catalog.unlink(stored, f"no copy on SSD: {reason}", now)

    def _completed(self, stored: StoredObject, extent: Extent, now: float) -> None:
        if extent.segment.tier is Tier.SSD and stored.policy.is_durable:
            self._end(stored, None)

    def gone(self, stored: StoredObject, now: float) -> None:
        if stored.policy.is_durable:
            self._end(stored, Refusal("no_ssd", "the object went before a copy of it was on SSD"))

    def _end(self, stored: StoredObject, refusal: Refusal | None) -> None:
        for parked in self._parked:
            for index in parked.waiting.pop(stored.object_id, ()):
                if refusal is not None:
                    parked.outcomes[index] = refusal
            if not parked.waiting:
                self._catalog.replies.append(Reply(parked.event.origin, m.Outcomes(parked.outcomes)))
        self._parked = [parked for parked in self._parked if parked.waiting]

    def readable(self, stored: StoredObject, now: float) -> None:
        """Nothing yet: its put-end is handled here."""

    def cold_hit(self, stored: StoredObject, now: float) -> None:
        """It is on SSD, so nobody waits for it."""

    def extent_gone(self, stored: StoredObject, extent: Extent, now: float) -> None:
        """Whoever plans copies says what becomes of them."""

    def deadline(self) -> float | None:
        return self._parked[0].deadline if self._parked else None

    def expire(self, now: float) -> None:
        late = [parked for parked in self._parked if parked.deadline <= now]
        for parked in late:
            for object_id in list(parked.waiting):
                stored = parked.objects[object_id]
                if stored.is_readable:
                    self._catalog.unlink(stored, "no copy was on SSD in time", now)
