"""What the HTTP server needs of the master's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mooncake.store.master.master import Master
from mooncake.store.settings import MasterSettings


@dataclass(frozen=True)
class Leadership:
    """The leader, as far as this master knows."""

    is_leader: bool
    state: str
    """serving, standby, or catching_up."""
    leader: str
    """``host:port`` for clients; "" when no master leads."""
    term: int


class EventPublisher(Protocol):
    """Publisher of KV events."""

    def start(self) -> None: ...

    def status(self) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class MasterContext(Protocol):
    """A master's process: answers messages as if a client had sent them."""

    settings: MasterSettings
    publisher: EventPublisher | None

    @property
    def master(self) -> Master: ...

    @property
    def leadership(self) -> Leadership: ...

    @property
    def num_clients(self) -> int:
        """Number of open connections."""
        ...

    @property
    def replication(self) -> dict[str, float]:
        """Gauges of the log and its standbys, by the existing master's names. Missing ones are 0."""
        ...

    async def ask(self, message: msgspec.Struct) -> Any:
        """Return the core's reply, or a ``Failure``."""
        ...
