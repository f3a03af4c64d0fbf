# SPDX-License-Identifier: Apache-2.0
"""An operation's claim on an engine's memory: the one definition of when that memory is free again.

An engine provides memory for one operation (a load, a save, a push from another engine) and reuses it when
the operation has ended. A timeout does not define that end: a process may be stopped, a loop blocked, a
virtual machine paused, a device slow, and then go on with the addresses that it has. So an operation has a
``Claim`` on its memory. Each access to the memory enters the claim before it begins, and leaves it when it
has ended; after the deadline, or once the claim is closed, nothing enters. The memory is free when the claim
is closed and all accesses have left. A wait for that has no timeout and logs a warning each second.

It knows no store and no transfer: the code that touches memory calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from prometheus_client import Counter

from mooncake import clock
from mooncake.log import get_logger
from mooncake.metrics import registry

log = get_logger(__name__)

LOG_EVERY_S = 1.0
"""Interval of the warnings while a wait for memory is overdue."""

overdue_seconds = Counter(
    "mooncake_connectors_memory_overdue_seconds",
    "Seconds for which an engine waited for its memory beyond the deadline of an operation.",
    ["operation"],
    registry=registry,
)


_overdue_lock = threading.Lock()
_overdue_s = 0.0


def take_overdue_s() -> float:
    """Seconds by which ``overdue_seconds`` has risen since the last call, for vLLM's own page of metrics.

    Its front end serves that page and does not see the registry of a rank's process.
    """
    global _overdue_s
    with _overdue_lock:
        taken, _overdue_s = _overdue_s, 0.0
    return taken


class Claim:
    """An operation's right to touch some memory of an engine. Thread-safe.

    Args:
        operation: its name in the log and the metrics.
        deadline: time after which no access to the memory begins (``clock.monotonic``).
    """

    def __init__(self, operation: str, deadline: float) -> None:
        self.operation = operation
        self.deadline = deadline
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_free(self) -> bool:
        """Whether nothing touches the memory, now and in the future."""
        return self._is_closed and not self._num_inside

    @property
    def num_inside(self) -> int:
        """Number of accesses to the memory that are under way or about to begin."""
        return self._num_inside

    def enter(self, now: float, count: int = 1) -> bool:
        """Register ``count`` accesses to the memory. False: it is too late, they must not begin."""
        with self._changed:
            if self._is_closed or now >= self.deadline:
                return False
            self._num_inside += count
            return True

    def leave(self) -> None:
        """Record the end of one access."""
        with self._changed:
            assert self._num_inside > 0, f"more left a {self.operation} than entered"
            self._num_inside -= 1
            callbacks = self._settled()
        _call_all(callbacks)

    def close(self) -> None:
        """Let nothing more enter: every access has begun, or the operation was abandoned."""
        with self._changed:
            self._is_closed = True
            callbacks = self._settled()
        _call_all(callbacks)

    def when_free(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the memory is free; at once if it is."""
        with self._changed:
            if not self.is_free:
                self._callbacks.append(callback)
                return
        _call_all([callback])

    def wait(self, until: float) -> bool:
        """Whether the memory is free, after waiting until ``until`` at most."""
        with self._changed:
            while not self.is_free:
                left_s = until - clock.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def outlast(self, has_ended: Callable[[], bool] = lambda: False) -> None:
        """Wait until the memory is free, without a timeout; each second a warning is logged.

        The wait also ends when ``has_ended``, which is checked each second, says that no process can
        touch the memory.
        """
        while not self.wait(clock.monotonic() + LOG_EVERY_S):
            if has_ended():
                return
            self.log_overdue()

    def log_overdue(self) -> None:
        """Count and log another ``LOG_EVERY_S`` of waiting."""
        global _overdue_s
        overdue_seconds.labels(self.operation).inc(LOG_EVERY_S)
        with _overdue_lock:
            _overdue_s += LOG_EVERY_S
        log.warning(
            "memory_kept",
            operation=self.operation,
            overdue_s=round(clock.monotonic() - self.deadline, 1),
            reason="an access to it has not ended",
        )

    def _settled(self) -> list[Callable[[], None]]:
        """The callbacks to call, if the memory is free; the caller holds the lock."""
        if not self.is_free:
            return []
        self._changed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<Claim of a {self.operation} [{state}, {self._num_inside} inside]>"


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # the engine's own code; the other callbacks are called all the same
            log.exception("callback_failed")
