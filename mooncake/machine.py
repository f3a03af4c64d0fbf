# SPDX-License-Identifier: Apache-2.0
"""The contract of a core.

A core is a plain class. Events and the present instant go in, effects come out; it opens no socket,
reads no clock and starts no thread. ``driver.Driver`` runs one on asyncio, ``sim.kernel`` runs the same
object on virtual time, and a test calls it directly::

    effects = master.handle(PutStart(...), now)   # [Reply(...)]
    wake_at = master.deadline()                   # when to call back with Wake(), or None
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeVar

EventT = TypeVar("EventT", contravariant=True)
EffectT = TypeVar("EffectT")


@dataclasses.dataclass(frozen=True, slots=True)
class Wake:
    """The event that a driver delivers when the instant named by ``deadline()`` has come."""


class Machine(Protocol[EventT, EffectT]):
    """Methods of a core that a driver calls."""

    def handle(self, event: EventT | Wake, now: float) -> list[EffectT]:
        """Handle one event at instant ``now`` (seconds on a monotonic clock); return what is to be done."""
        ...

    def deadline(self) -> float | None:
        """The instant at which ``Wake()`` must be delivered, or None. May be in the past."""
        ...

    def check(self) -> None:
        """Assert every invariant. It may be slow: only tests and the simulator call it."""
        ...

    def story(self, key: str) -> list[str]:
        """The latest events of ``key`` with their reasons, oldest first; bounded."""
        ...
