# SPDX-License-Identifier: Apache-2.0
"""Waits for conditions that nothing announces, by polling: in a coroutine and in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0


async def until(condition: Callable[[], object], what: str = "it", timeout_s: float = PATIENCE_S) -> None:
    """Return once ``condition()`` is true; fail after ``timeout_s``, saying that ``what`` did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], what: str = "it", timeout_s: float = PATIENCE_S) -> None:
    """Do as ``until`` in a thread without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.002)
