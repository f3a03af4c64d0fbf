# SPDX-License-Identifier: Apache-2.0
"""Calls to the store for an engine whose own threads, or whose own loop, wait for the result.

Owns the result of a call that fails, which is the same as from an empty store; and that it is returned
only when the operation can no longer touch the engine's memory (``claim.py``). Every operation has one
deadline, made when it begins and passed to each of its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from mooncake import clock
from mooncake.connectors.claim import LOG_EVERY_S, Claim
from mooncake.connectors.session import TransferThread
from mooncake.connectors.store_link import CircuitBreaker, LinkSettings, failures
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.log import get_logger

log = get_logger(__name__)

ResultT = TypeVar("ResultT")

ENDING_S = 0.5
"""Time beyond its deadline in which an operation may report its end, before it is cancelled."""

Steps = Callable[[float], Coroutine[Any, Any, ResultT]]
"""An operation's work as a coroutine function of the deadline of all its steps."""


class BoundedCall(Generic[ResultT]):
    """One operation at the store, which always returns a result.

    The result is available once the operation can no longer touch the engine's memory, and not before:
    a blocked loop, or a process that was stopped, delays it for as long as that takes. An operation that
    touches no memory (``is_lookup``) is not waited for beyond its deadline.
    """

    def __init__(
        self, thread: TransferThread, operation: str, otherwise: ResultT, deadline: float, is_lookup: bool
    ) -> None:
        self.claim = Claim(operation, deadline)
        self._thread = thread
        self._otherwise = otherwise
        self._result = otherwise
        self._is_lookup = is_lookup
        self._task: asyncio.Task[ResultT] | None = None

    def begin(self, work: Coroutine[Any, Any, ResultT]) -> None:
        """Begin ``work`` on the session's loop."""
        is_entered = self.claim.enter(clock.monotonic())
        self.claim.close()
        if not is_entered:
            work.close()
            return
        try:
            self._thread.loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError:  # the loop is closed
            work.close()
            self.claim.leave()

    def _begin(self, work: Coroutine[Any, Any, ResultT]) -> None:
        self._task = self._thread.track(work)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ResultT]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._result = task.result()
        self.claim.leave()

    def give_up(self) -> None:
        """Cancel the operation, from any thread; its end is visible in the claim."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._thread.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def wait(self) -> ResultT:
        """Wait for the result, on any thread but the session's.

        An interrupt (Ctrl-C) is raised when the memory is free.
        """
        interrupt: BaseException | None = None
        until = self.claim.deadline + ENDING_S
        while not self.claim.is_free:
            try:
                if self.claim.wait(until):
                    break
                self.give_up()
                if not self._is_lookup:
                    self.claim.outlast(self._thread.has_released_memory)
                break
            except BaseException as error:
                interrupt, until = error, clock.monotonic()
        if interrupt is not None:
            raise interrupt
        return self._result if self.claim.is_free else self._otherwise

    async def on_this_loop(self) -> ResultT:
        """Wait for the result on the engine's own loop. Cancelling it cancels the work and awaits its end."""
        loop, is_free = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the engine's loop is closed
                loop.call_soon_threadsafe(is_free.set)

        self.claim.when_free(notify)
        interrupt: asyncio.CancelledError | None = None
        until = self.claim.deadline + ENDING_S
        while not is_free.is_set():
            try:
                async with asyncio.timeout(max(0.0, until - clock.monotonic())):
                    await is_free.wait()
            except TimeoutError:
                self.give_up()
                if self._is_lookup or self._thread.has_released_memory():
                    break
                if until > self.claim.deadline + ENDING_S:
                    self.claim.log_overdue()
                until = clock.monotonic() + LOG_EVERY_S
            except asyncio.CancelledError as error:
                interrupt = error
                self.give_up()
        if interrupt is not None:
            raise interrupt
        return self._result if self.claim.is_free else self._otherwise

    def then(self, done: Callable[[ResultT], None]) -> None:
        """Call ``done`` with the result, on the session's thread."""
        self.claim.when_free(lambda: done(self._result))


class BoundedCalls:
    """Starts operations on the session's loop. May be called from any thread."""

    def __init__(self, thread: TransferThread, settings: LinkSettings) -> None:
        self._thread = thread
        self._settings = settings
        self._breaker = CircuitBreaker(settings.retry_after_s)
        self.is_closed = False
        """Whether new operations end at once, without a call to the store."""

    def look_up(self, operation: str, steps: Steps[ResultT], otherwise: ResultT) -> BoundedCall[ResultT]:
        """Begin an operation that touches no memory of the engine."""
        return self._begin(operation, steps, otherwise, self._settings.lookup_timeout_s, is_lookup=True)

    def move(self, operation: str, steps: Steps[ResultT], otherwise: ResultT) -> BoundedCall[ResultT]:
        """Begin an operation that reads or writes memory of the engine."""
        return self._begin(operation, steps, otherwise, self._settings.load_timeout_s, is_lookup=False)

    def _begin(
        self, operation: str, steps: Steps[ResultT], otherwise: ResultT, timeout_s: float, is_lookup: bool
    ) -> BoundedCall[ResultT]:
        """``otherwise``: the result of a failed operation."""
        now = clock.monotonic()
        work = BoundedCall(self._thread, operation, otherwise, now + timeout_s, is_lookup)
        if self.is_closed or self._breaker.is_open:
            work.claim.close()
        else:
            work.begin(self._guarded(operation, steps, work.claim.deadline, otherwise))
        return work

    async def _guarded(
        self, operation: str, steps: Steps[ResultT], deadline: float, otherwise: ResultT
    ) -> ResultT:
        try:
            return await steps(deadline)
        except asyncio.CancelledError:
            failures.labels(operation).inc()
            log.warning("operation_abandoned", operation=operation)
            raise
        except (MooncakeError, TimeoutError) as error:
            failures.labels(operation).inc()
            if isinstance(error, InvalidArgument):
                log.error("operation_refused", operation=operation, error=str(error))
            else:
                self._breaker.trip(operation, error)
        except Exception:  # a bug of ours is no reason to fail the engine's request
            failures.labels(operation).inc()
            log.exception("operation_failed", operation=operation)
        return otherwise
