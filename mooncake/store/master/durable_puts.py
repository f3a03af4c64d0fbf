# SPDX-License-Identifier: Apache-2.0
"""Put-ends that are answered when a copy is on SSD.

The object is readable at once; only its writer waits, because an answer means that the bytes
outlive the process. Another part plans the copy when the object becomes readable
(``catalog.ObjectObserver.readable``). A writer that would wait too long is refused, and the object stays
in memory; a durable one that it replaced is kept until it is on SSD, or restored when it is lost
(``catalog.confirm``). The next durable put of the key is refused, as it is not on SSD (``put.py``).
"""

from __future__ import annotations

import dataclasses

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received, Reply
from mooncake.store.master.objects import Extent, StoredObject
from mooncake.types import Tier


@dataclasses.dataclass(eq=False)
class PendingPutEnd:
    """One put-end without an answer."""

    event: Received
    outcomes: list[bool | Refusal]
    waiting: dict[int, list[int]]
    """Indices in ``outcomes`` by object id."""
    objects: dict[int, StoredObject]
    """Objects by the same ids, including those that are done."""
    deadline: float


class DurablePuts:
    """Holds those answers. An observer and a clock of the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._parked: list[PendingPutEnd] = []
        """In order of their deadlines."""
        catalog.watchers.append(self)
        catalog.clocks.append(self)
        catalog.on_complete.append(self._completed)

    def is_awaited(self, stored: StoredObject) -> bool:
        """Whether its put-end must wait."""
        return stored.policy.is_durable and not stored.complete(Tier.SSD)

    def park(
        self, event: Received, outcomes: list[bool | Refusal], waiting: dict[int, StoredObject], now: float
    ) -> None:
        places: dict[int, list[int]] = {}
        for index, stored in waiting.items():
            places.setdefault(stored.object_id, []).append(index)
        objects = {stored.object_id: stored for stored in waiting.values()}
        deadline = now + self._catalog.settings.put_s
        self._parked.append(PendingPutEnd(event, outcomes, places, objects, deadline))

    def _completed(self, stored: StoredObject, extent: Extent, now: float) -> None:
        if extent.segment.tier is Tier.SSD and stored.policy.is_durable:
            self._catalog.confirm(stored, now)
            self._end(stored, None)

    def gone(self, stored: StoredObject, now: float) -> None:
        if stored.policy.is_durable:
            self._end(stored, Refusal("no_ssd", "the object was removed before a copy of it was on SSD"))

    def _end(self, stored: StoredObject, refusal: Refusal | None) -> None:
        for parked in self._parked:
            for index in parked.waiting.pop(stored.object_id, ()):
                if refusal is not None:
                    parked.outcomes[index] = refusal
            if not parked.waiting:
                answer = m.Outcomes(parked.outcomes)
                self._catalog.replies.append(Reply(parked.event.origin, answer, must_last=True))
        self._parked = [parked for parked in self._parked if parked.waiting]

    def readable(self, stored: StoredObject, now: float) -> None:
        """No action: its put-end parks it."""

    def cold_hit(self, stored: StoredObject, now: float) -> None:
        """No action: it is on SSD, so no put-end waits for it."""

    def extent_gone(self, stored: StoredObject, extent: Extent, now: float) -> None:
        """No action: failed copies are retried by their planner."""

    def deadline(self) -> float | None:
        return self._parked[0].deadline if self._parked else None

    def expire(self, now: float) -> None:
        late = [parked for parked in self._parked if parked.deadline <= now]
        for parked in late:
            for object_id in list(parked.waiting):
                self._end(parked.objects[object_id], Refusal("no_ssd", "no copy was on SSD in time"))
