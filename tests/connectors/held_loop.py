"""A loop that is held: one blocking call in it, until the test lets it go on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

LONGEST_S = 60.0
"""A test that fails must not hold its loop for ever."""


class Hold:
    def __init__(self) -> None:
        self._began, self._go = threading.Event(), threading.Event()

    def begin(self) -> None:
        """On the loop."""
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
    """The loop does nothing until ``release``, or the end of the block."""
    hold = Hold()
    loop.call_soon_threadsafe(hold.begin)
    hold.wait()
    try:
        yield hold
    finally:
        hold.release()
