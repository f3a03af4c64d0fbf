"""The master's part for whoever takes objects away."""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.catalog import Catalog
from mooncake.store.effects import Note, Received

LAST_LINES = 10
"""Of a key's story, in the log of an object that turned out to be wrong."""


class Removing:
    """Answers Remove and Corrupt."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def remove(self, message: m.Remove, _: Received, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        for key in message.keys:
            stored = self._catalog.objects.readable.get(key)
            if stored is None:
                outcomes.append(False)
            elif stored.lease_until > now and not message.force:
                left_s = stored.lease_until - now
                outcomes.append(Refusal("leased", f"a reader may hold it for another {left_s:.3g} s"))
            else:
                self._catalog.counts.removed_objects += 1
                self._catalog.unlink(stored, "removed by force" if message.force else "removed", now)
                outcomes.append(True)
        return m.Outcomes(outcomes)

    def corrupt(self, message: m.Corrupt, _: Received, now: float) -> m.Outcomes:
        outcomes: list[bool | Refusal] = []
        for key, object_id in zip(message.keys, message.object_ids, strict=False):
            stored = self._catalog.objects.readable.get(key)
            is_that = stored is not None and stored.object_id == object_id
            if stored is not None and is_that:
                self._catalog.counts.corrupt_objects += 1
                fields = {"key": key, "object_id": object_id, "story": self._catalog.story(key)[-LAST_LINES:]}
                self._catalog.notes.append(Note("object_corrupt", fields))
                self._catalog.unlink(stored, "a reader found wrong checksums", now)
            outcomes.append(is_that)
        return m.Outcomes(outcomes)
