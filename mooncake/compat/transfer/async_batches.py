"""Asynchronous batches by number, for programs that poll.

Ids count from 1 (clients take 0 and anything from 2**63 on for failure). Completions come from one queue
of the engine; whoever asks drains it, and of several that wait one drains for all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from mooncake.transfer.completion_queue import CompletionQueue
from mooncake.transfer.transports import Completion, Status

IN_FLIGHT, DONE, FAILED, TIMED_OUT = 0, 1, -1, -2
"""What ``status`` answers."""

_LOOK_S = 0.05


class AsyncBatches:
    """Thread-safe. ``ended`` is called once per batch, by whoever notices its end."""

    def __init__(self, queue: CompletionQueue, ended: Callable[[int, Completion], None]) -> None:
        self._queue = queue
        self._ended = ended
        self._ids = itertools.count(1)
        self._results: dict[int, int] = {}
        self._changed = threading.Condition()
        self._is_draining = False

    def begin(self, submit: Callable[[CompletionQueue, int], None]) -> int:
        """A new batch that ``submit`` puts into the queue under its id; what ``submit`` raises goes on."""
        number = next(self._ids)
        with self._changed:
            self._results[number] = IN_FLIGHT
        try:
            submit(self._queue, number)
        except BaseException:
            with self._changed:
                del self._results[number]
            raise
        return number

    def status(self, number: int) -> int:
        """Of one batch; an id that has ended is forgotten by being asked for. An unknown one has failed."""
        self._drain(0.0)
        with self._changed:
            result = self._results.get(number, FAILED)
            if result != IN_FLIGHT:
                self._results.pop(number, None)
            return result

    def wait(self, numbers: Sequence[int]) -> bool:
        """Until all have ended, which they do at their deadline if not before. True: all are well."""
        while True:
            with self._changed:
                if all(self._results.get(number, FAILED) != IN_FLIGHT for number in numbers):
                    results = [self._results.pop(number, FAILED) for number in dict.fromkeys(numbers)]
                    return all(result == DONE for result in results)
            self._drain(_LOOK_S)

    def _drain(self, timeout_s: float) -> None:
        with self._changed:
            if self._is_draining:
                if timeout_s:
                    self._changed.wait(timeout_s)
                return
            self._is_draining = True
        try:
            done = self._queue.drain(timeout_s=timeout_s)
        finally:
            with self._changed:
                self._is_draining = False
                self._changed.notify_all()
        for completion in done:
            self._ended(completion.token, completion)
        with self._changed:
            for completion in done:
                result = {Status.OK: DONE, Status.TIMED_OUT: TIMED_OUT}.get(completion.status, FAILED)
                self._results[completion.token] = result
            self._changed.notify_all()
