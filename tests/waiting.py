# SPDX-License-Identifier: Apache-2.0
"""Waits for conditions that nothing announces, by polling: in a coroutine and in a thread."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

PATIENCE_S = 60.0
LONG_HEARTBEAT_S = 60.0
"""Interval of heartbeats for tests that mount a segment themselves and send one: after three missed ones the
master suspects it, and a test takes that long on a busy machine."""


async def until(
    condition: Callable[[], object],
    what: str = "it",
    timeout_s: float = PATIENCE_S,
    poke: Callable[[], object] | None = None,
) -> None:
    """Return once ``condition()``, which may be a coroutine function, is true; else fail after ``timeout_s``.

    ``what`` is said not to have happened; ``poke`` is called between two attempts.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        if poke is not None:
            poke()
        await asyncio.sleep(0.002 if poke is None else 0.01)


def wait_until(condition: Callable[[], object], what: str = "it", timeout_s: float = PATIENCE_S) -> None:
    """Do as ``until`` in a thread without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.002)
