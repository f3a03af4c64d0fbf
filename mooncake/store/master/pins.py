"""The master's handlers for pins, hard and soft."""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received
from mooncake.store.master.objects import scoped_all


class PinRequests:
    """Answers Pin."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def pin(self, message: m.Pin, _: Received, now: float) -> m.Outcomes | Failure:
        ttl_s = message.ttl_s
        if ttl_s is not None and not ttl_s >= 0:
            return Failure("invalid_argument", f"pin: ttl_s {ttl_s}; at least 0")
        soft_until = now + min(ttl_s, self._catalog.settings.max_pin_s) if ttl_s else 0.0
        outcomes: list[bool | Refusal] = []
        for key in scoped_all(message.tenant, message.keys):
            stored = self._catalog.objects.readable.get(key)
            if stored is not None:
                self._catalog.pin(stored, is_hard=ttl_s is None, soft_until=soft_until, now=now)
            outcomes.append(stored is not None)
        return m.Outcomes(outcomes)
