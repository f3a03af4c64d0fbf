# SPDX-License-Identifier: Apache-2.0
"""Put-ends that are answered when a copy is on SSD.

The object is readable at once; only its writer waits, because an answer means that the bytes
outlive the process. ``tiering.py`` plans the copy when the object becomes readable, and retries it if it
fails. A writer that would wait too long is refused, and the object stays in memory; a durable one that it
replaced is kept until it is on SSD, or restored when it is lost (``catalog.confirm``). The next durable put
of the key is refused, as it is not on SSD (``put.py``).
"""

from __future__ import annotations

import dataclasses

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.catalog_events import ObjectRemoved, ReplicaCompleted
from mooncake.store.master.effects import Received, Reply
from mooncake.store.master.objects import StoredObject
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
    """Holds those answers. A clock of the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._parked: list[PendingPutEnd] = []
        """In order of their deadlines."""
        catalog.clocks.append(self)
        catalog.observe({ReplicaCompleted: self._completed, ObjectRemoved: self._removed})

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

    def _completed(self, event: ReplicaCompleted) -> None:
        if event.extent.segment.tier is Tier.SSD and event.stored.policy.is_durable:
            self._catalog.confirm(event.stored, event.now)
            self._end(event.stored, None)

    def _removed(self, event: ObjectRemoved) -> None:
        if event.stored.policy.is_durable:
            reason = "the object was removed before a copy of it was on SSD"
            self._end(event.stored, Refusal("no_ssd", reason))

    def _end(self, stored: StoredObject, refusal: Refusal | None) -> None:
        for parked in self._parked:
            for index in parked.waiting.pop(stored.object_id, ()):
                if refusal is not None:
                    parked.outcomes[index] = refusal
            if not parked.waiting:
                answer = m.Outcomes(parked.outcomes)
                self._catalog.replies.append(Reply(parked.event.origin, answer, must_last=True))
        self._parked = [parked for parked in self._parked if parked.waiting]

    def deadline(self) -> float | None:
        return self._parked[0].deadline if self._parked else None

    def expire(self, now: float) -> None:
        late = [parked for parked in self._parked if parked.deadline <= now]
        for parked in late:
            for object_id in list(parked.waiting):
                self._end(parked.objects[object_id], Refusal("no_ssd", "no copy was on SSD in time"))
