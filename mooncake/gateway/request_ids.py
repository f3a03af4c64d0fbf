"""Which request was called what: by its client, in its answer, at the conductor.

Owns a bounded memory of these names and nothing of what they name.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

_MAX_NAMES = 20_000


class RequestIds(msgspec.Struct):
    """What the prompts of a request are called at the conductor."""

    id: str
    request_id: str
    is_secret: bool
    "The request id was made here."
    place_ids: list[str]
    client: str = ""
    "Whose key it came with; empty where clients have none."


class RequestIdTable:
    """Remembers the latest requests by both of their ids."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, RequestIds] = OrderedDict()

    def note(self, names: RequestIds) -> None:
        for name in (names.id, names.request_id):
            self._by_id.pop(name, None)
            self._by_id[name] = names
        while len(self._by_id) > 2 * _MAX_NAMES:
            self._by_id.popitem(last=False)

    def find(self, name: str) -> RequestIds | None:
        return self._by_id.get(name)
