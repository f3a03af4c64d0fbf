"""The contract of a core.

A core is a plain class. Events and the present instant go in, effects come out; it opens no socket,
reads no clock, starts no thread. ``driver.Driver`` runs one on asyncio, ``sim.kernel`` runs the same
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
    """What a driver needs of a core."""

    def handle(self, event: EventT | Wake, now: float) -> list[EffectT]:
        """Take one event at instant ``now`` (seconds on a monotonic clock); say what is to be done."""
        ...

    def deadline(self) -> float | None:
        """The instant at which ``Wake()`` must be delivered, or None. May be in the past."""
        ...

    def check(self) -> None:
        """Assert every invariant. Slow is fine: tests and the simulator call it."""
        ...

    def story(self, key: str) -> list[str]:
        """What happened to ``key`` and why, oldest first. Bounded."""
        ...
