# SPDX-License-Identifier: Apache-2.0
"""What the HTTP server needs of the master's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mooncake.store import messages as m
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


@dataclass(frozen=True)
class MasterHttp:
    """HTTP interface of a master. The program that starts the master passes it in, so that the store does
    not depend on the existing package's paths and names."""

    make_app: Callable[[MasterContext], Any]
    """Makes the ASGI application."""
    open_paths: Sequence[str]
    """Paths that need no authentication."""
    summary: Callable[[MasterContext, m.MasterStatus], str]
    """The most important values in one line, for the log."""


LoadHttp = Callable[[], MasterHttp]
"""Imports the HTTP interface, which takes half a second."""
