# SPDX-License-Identifier: Apache-2.0
"""The ids of each request: its client's, its answer's, and those at the conductor.

Owns a bounded memory of these ids and nothing of the requests themselves.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from mooncake import tracing

_MAX_NAMES = 20_000


class RequestIds(msgspec.Struct):
    """The ids of a request's prompts at the conductor."""

    id: str
    request_id: str
    is_secret: bool
    "The request id was generated here."
    place_ids: list[str]
    client: str = ""
    "Client whose key the request had; empty where clients have none."
    session: str = ""
    "The request's session as the conductor knows it; empty without one."


class RequestIdTable:
    """Remembers the latest requests by both of their ids."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, RequestIds] = OrderedDict()

    def note(self, names: RequestIds) -> None:
        tracing.note(
            mooncake__request__id=names.id,
            mooncake__client_request__id=names.request_id,
            client=names.client,
        )
        for name in (names.id, names.request_id):
            self._by_id.pop(name, None)
            self._by_id[name] = names
        while len(self._by_id) > 2 * _MAX_NAMES:
            self._by_id.popitem(last=False)

    def find(self, name: str) -> RequestIds | None:
        return self._by_id.get(name)

    def latest(self, most: int) -> list[RequestIds]:
        """The latest requests, the newest first."""
        found: dict[str, RequestIds] = {}
        for names in reversed(self._by_id.values()):
            if len(found) >= most:
                break
            found[names.id] = names
        return [*found.values()]
