"""When an engine has its memory back: the one piece of code that says so.

An engine lends memory for one operation (a load, a save, a push from another engine) and takes it back when
the operation is over. *Over* is no matter of time: a process may be stopped, a loop held, a virtual machine
paused, a device slow, and then go on with the addresses that it has. So an operation has a ``Claim`` on its
memory. Whatever is going to touch the memory enters the claim, and leaves it when it has ended; after the
deadline, or once the claim was given up, nothing enters any more. The memory is free when the claim is closed
and everything has left. Who waits for that waits until it is so, and says so in the log each second.

It knows no store and no transfer: those who touch memory tell it.
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
"""How often a wait for memory that is overdue says so."""

overdue_seconds = Counter(
    "mooncake_connectors_memory_overdue_seconds",
    "Seconds for which an engine waited for its memory beyond the deadline of an operation.",
    ["operation"],
    registry=registry,
)


class Claim:
    """An operation's right to touch some memory of an engine. Thread-safe.

    Args:
        operation: what it is for, for the log and the metrics.
        deadline: after it nothing begins to touch the memory (``clock.monotonic``).
    """

    def __init__(self, operation: str, deadline: float) -> None:
        self.operation = operation
        self.deadline = deadline
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_closed = False
        self._tell: list[Callable[[], None]] = []

    @property
    def is_free(self) -> bool:
        """Nothing touches the memory, and nothing will."""
        return self._is_closed and not self._num_inside

    @property
    def num_inside(self) -> int:
        """How many things touch the memory, or are about to."""
        return self._num_inside

    def enter(self, now: float, count: int = 1) -> bool:
        """``count`` things are about to touch the memory. False: they may not, it is too late."""
        with self._changed:
            if self._is_closed or now >= self.deadline:
                return False
            self._num_inside += count
            return True

    def leave(self) -> None:
        """One of those that entered has ended, and touches the memory no more."""
        with self._changed:
            assert self._num_inside > 0, f"more left a {self.operation} than entered"
            self._num_inside -= 1
            told = self._settled()
        _tell_all(told)

    def close(self) -> None:
        """Nothing more enters: all that was to be done has begun, or the operation was given up."""
        with self._changed:
            self._is_closed = True
            told = self._settled()
        _tell_all(told)

    def when_free(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once the memory is free; at once if it is."""
        with self._changed:
            if not self.is_free:
                self._tell.append(tell)
                return
        _tell_all([tell])

    def wait(self, until: float) -> bool:
        """Whether the memory is free, after waiting for that until then at most."""
        with self._changed:
            while not self.is_free:
                left_s = until - clock.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def outlast(self, has_ended: Callable[[], bool] = lambda: False) -> None:
        """Wait until the memory is free, however long it takes; each second the log says so.

        ``has_ended`` is asked as often: whoever could touch the memory is no more.
        """
        while not self.wait(clock.monotonic() + LOG_EVERY_S):
            if has_ended():
                return
            self.log_overdue()

    def log_overdue(self) -> None:
        """Somebody has waited for ``LOG_EVERY_S`` more."""
        overdue_seconds.labels(self.operation).inc(LOG_EVERY_S)
        log.warning(
            "memory_kept",
            operation=self.operation,
            overdue_s=round(clock.monotonic() - self.deadline, 1),
            reason="what was begun on it has not ended",
        )

    def _settled(self) -> list[Callable[[], None]]:
        """Whom to tell; the caller holds the lock."""
        if not self.is_free:
            return []
        self._changed.notify_all()
        told, self._tell = self._tell, []
        return told

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<Claim of a {self.operation} [{state}, {self._num_inside} inside]>"


def _tell_all(told: list[Callable[[], None]]) -> None:
    for tell in told:
        try:
            tell()
        except Exception:  # the engine's own; the others are to be told all the same
            log.exception("callback_failed")
