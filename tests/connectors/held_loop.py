# SPDX-License-Identifier: Apache-2.0
"""A blocked event loop: one blocking call in it, until the test releases it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

LONGEST_S = 60.0
"""Longest block, so that a failing test does not block its loop without end."""


class Hold:
    def __init__(self) -> None:
        self._began, self._go = threading.Event(), threading.Event()

    def begin(self) -> None:
        """Block the loop; called on it."""
        self._began.set()
        self._go.wait(LONGEST_S)

    def has_begun(self) -> bool:
        return self._began.is_set()

    def wait(self) -> None:
        assert self._began.wait(LONGEST_S)

    def release(self) -> None:
        self._go.set()


@contextlib.contextmanager
def held(loop: asyncio.AbstractEventLoop) -> Iterator[Hold]:
    """Block ``loop`` until ``release``, or the end of the context."""
    hold = Hold()
    loop.call_soon_threadsafe(hold.begin)
    hold.wait()
    try:
        yield hold
    finally:
        hold.release()
