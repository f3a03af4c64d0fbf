# SPDX-License-Identifier: Apache-2.0
"""Events of the catalog: all that it reports to the other parts of a master, and why replicas are removed.

A part passes functions by type of event to ``Catalog.observe``. They are called synchronously and in the
order of registration, when the catalog's own state is up to date. An event holds what the observers need
to know, so that none of them reads how the catalog came to it. Of another master's records (``snapshot.py``)
only removals are reported.

The events are structs of msgspec, because a put that evicts makes three of them, and a frozen dataclass takes
five times as long to make.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from mooncake.store.master.objects import Extent, StoredObject

EVICTED = "evicted: "
"""Begins the reason of each eviction; its rule follows."""
MOVED = "moved away"
DRAINED = "drained, and others have it"
COOLED = "cool again"
"""A hot object's further replica is no longer needed."""
DISPLACED = "displaced by a hotter object"
"""An extra replica left device memory; others have the object."""


class ObjectShown(msgspec.Struct, frozen=True):
    """Put-end: the object is readable from now on. ``stored.policy`` has the writer's wishes."""

    stored: StoredObject
    now: float


class ColdHit(msgspec.Struct, frozen=True):
    """A lookup found the object, but not in memory or faster."""

    stored: StoredObject
    now: float


class ReplicaCompleted(msgspec.Struct, frozen=True):
    """A further replica of a readable object has become complete."""

    stored: StoredObject
    extent: Extent
    now: float


class ReplicaRemoved(msgspec.Struct, frozen=True):
    """A replica of an object that was readable was removed, perhaps an incomplete one.

    If the object still is readable, it has others. Otherwise all of them are removed and ``ObjectRemoved``
    follows, or the object had been set aside for a newer one (``Catalog.show``).
    """

    stored: StoredObject
    extent: Extent
    reason: str
    """The same words are in the object's story and in the KV event."""
    now: float
    is_replayed: bool = False
    """Another master removed it."""

    @property
    def is_evicted(self) -> bool:
        """Whether it made room for others."""
        return self.reason.startswith(EVICTED)

    @property
    def is_moved(self) -> bool:
        """Whether it was removed because others have the object, and suffice."""
        return self.reason in (MOVED, DRAINED, COOLED, DISPLACED)


class ObjectRemoved(msgspec.Struct, frozen=True):
    """A readable object was removed with all its replicas."""

    stored: StoredObject
    now: float


CatalogEvent: TypeAlias = ObjectShown | ColdHit | ReplicaCompleted | ReplicaRemoved | ObjectRemoved
