"""Asking the store for an engine whose own threads, or whose own loop, wait for the answer.

Owns what an engine gets when there is no answer: what it would get of an empty store. A store that could
not be reached is left alone for a moment, so that a dead one costs one short wait and not one per call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from mooncake import clock
from mooncake.connectors.blocks import LinkSettings, failures
from mooncake.connectors.session import Session
from mooncake.errors import MooncakeError
from mooncake.log import get_logger

log = get_logger(__name__)

ResultT = TypeVar("ResultT")

QUESTIONS = 10
"""More than one call asks of the master."""


class Work(Generic[ResultT]):
    """Something asked of the store, which comes to a result whatever happens."""

    def __init__(self, future: Future[ResultT], otherwise: ResultT, timeout_s: float) -> None:
        self._future = future
        self._otherwise = otherwise
        self._timeout_s = timeout_s

    def wait(self) -> ResultT:
        """From any thread but the session's."""
        try:
            # Each step has its own deadline; this one is for a loop that was stopped in between.
            return self._future.result(self._timeout_s)
        except (TimeoutError, CancelledError):
            return self._otherwise

    async def on_this_loop(self) -> ResultT:
        """From a loop of the engine's own."""
        return await asyncio.wrap_future(self._future)

    def then(self, done: Callable[[ResultT], None]) -> None:
        """``done`` is called with the result, from the session's thread."""
        self._future.add_done_callback(lambda _: done(self.wait()))


class Asking:
    """Asks on the session's loop. May be called from any thread."""

    def __init__(self, session: Session, settings: LinkSettings) -> None:
        self._session = session
        self._settings = settings
        self._silent_until = 0.0
        self.is_closed = False
        """Nothing is asked any more."""

    def begin(
        self, operation: str, ask: Callable[[], Coroutine[Any, Any, ResultT]], otherwise: ResultT
    ) -> Work[ResultT]:
        """``ask``; ``otherwise`` is what it comes to where it fails."""
        if self.is_closed or clock.monotonic() < self._silent_until:
            done = Future[ResultT]()
            done.set_result(otherwise)
        else:
            done = self._session.start(self._guarded(operation, ask, otherwise))
        timeout_s = self._settings.load_timeout_s + QUESTIONS * self._settings.lookup_timeout_s
        return Work(done, otherwise, timeout_s)

    async def _guarded(
        self, operation: str, ask: Callable[[], Coroutine[Any, Any, ResultT]], otherwise: ResultT
    ) -> ResultT:
        try:
            return await ask()
        except (MooncakeError, TimeoutError) as error:
            failures.labels(operation).inc()
            self._silent_until = clock.monotonic() + self._settings.retry_after_s
            log.warning("store_unreachable", operation=operation, error=str(error) or type(error).__name__)
            return otherwise
