# SPDX-License-Identifier: Apache-2.0
"""Runs a core on asyncio: events in, effects performed, one timer re-armed from ``deadline()``.

The driver is all that stands between a core and the event loop. It is not thread-safe: everything
happens on the loop on which it was made, which is why a core needs no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from mooncake import clock
from mooncake.machine import Machine, Wake

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class Driver(Generic[EventT, EffectT]):
    """Runs one machine; ``perform`` carries out an effect and must not block."""

    def __init__(
        self,
        machine: Machine[EventT, EffectT],
        perform: Callable[[EffectT], None],
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        self.machine = machine
        self._perform = perform
        self._now = now
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for: float | None = None

    def post(self, event: EventT | Wake) -> None:
        """Deliver one event and perform its effects, in order."""
        try:
            for effect in self.machine.handle(event, self._now()):
                self._perform(effect)
        finally:
            self._arm()  # also after an error, or a machine that has one at a wake-up would not wake again

    def arm(self) -> None:
        """Begin with a deadline that the machine has before its first event."""
        self._arm()

    def close(self) -> None:
        """Cancel the timer; no event is delivered after this."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        deadline = self.machine.deadline()
        if deadline == self._armed_for and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_for = deadline
        if deadline is not None:
            delay = max(0.0, deadline - self._now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.post(Wake())
