# SPDX-License-Identifier: Apache-2.0
"""Asynchronous batches by number, for programs that poll.

Ids count from 1, because clients treat 0 and anything from 2**63 on as failure. Completions come from one
queue of the engine; a call for a status drains it, and of several waiting threads one drains it for all.
A batch that may have failed because its peer's descriptor was outdated is submitted once more under its id.
"""

from __future__ import annotations

import itertools
import select
import threading
from collections.abc import Callable, Sequence

from mooncake.errors import MooncakeError
from mooncake.transfer.completion_queue import STALE_DESCRIPTOR_STATUSES, CompletionQueue
from mooncake.transfer.transports import Completion, Status

IN_FLIGHT, DONE, FAILED, TIMED_OUT = 0, 1, -1, -2
"""Results of ``status``."""

_POLL_S = 0.05


class AsyncBatches:
    """Batches by id. Thread-safe. ``ended`` is called once per batch, by the thread that drains it."""

    def __init__(self, queue: CompletionQueue, ended: Callable[[int, Completion], None]) -> None:
        self._queue = queue
        self._readable = select.poll()
        self._readable.register(queue.fileno(), select.POLLIN)
        self._ended = ended
        self._ids = itertools.count(1)
        self._results: dict[int, int] = {}
        self._resubmissions: dict[int, Callable[[CompletionQueue, int], bool]] = {}
        self._changed = threading.Condition()
        self._is_draining = False

    def begin(
        self,
        submit: Callable[[CompletionQueue, int], None],
        resubmit: Callable[[CompletionQueue, int], bool],
    ) -> int:
        """Begin a batch that ``submit`` puts into the queue under its id; errors of ``submit`` propagate.

        ``resubmit`` does so again after a failure, if the peer has published another descriptor since.
        """
        number = next(self._ids)
        with self._changed:
            self._results[number] = IN_FLIGHT
            self._resubmissions[number] = resubmit
        try:
            submit(self._queue, number)
        except BaseException:
            with self._changed:
                del self._results[number], self._resubmissions[number]
            raise
        return number

    def status(self, number: int) -> int:
        """Status of one batch. Reading the final one forgets the id; an unknown id has failed."""
        self._drain(0.0)
        with self._changed:
            result = self._results.get(number, FAILED)
            if result != IN_FLIGHT:
                self._results.pop(number, None)
            return result

    def wait(self, numbers: Sequence[int]) -> bool:
        """Wait until all have ended, at the latest at their deadlines; True when all have succeeded."""
        while True:
            with self._changed:
                if all(self._results.get(number, FAILED) != IN_FLIGHT for number in numbers):
                    results = [self._results.pop(number, FAILED) for number in dict.fromkeys(numbers)]
                    return all(result == DONE for result in results)
            self._drain(_POLL_S)

    def _drain(self, timeout_s: float) -> None:
        with self._changed:
            if self._is_draining:
                if timeout_s:
                    self._changed.wait(timeout_s)
                return
            self._is_draining = True
        try:
            if timeout_s:  # an exception that is raised here, such as by Ctrl-C, loses no completion
                self._readable.poll(timeout_s * 1000)
            done = self._queue.drain()
        finally:
            with self._changed:
                self._is_draining = False
                self._changed.notify_all()
        ended = [completion for completion in done if not self._resubmit(completion)]
        for completion in ended:
            self._ended(completion.token, completion)
        with self._changed:
            for completion in ended:
                result = {Status.OK: DONE, Status.TIMED_OUT: TIMED_OUT}.get(completion.status, FAILED)
                self._results[completion.token] = result
            self._changed.notify_all()

    def _resubmit(self, completion: Completion) -> bool:
        """Submit a failed batch again, at most once; False when it has ended."""
        with self._changed:
            resubmit = self._resubmissions.pop(completion.token, None)
        if resubmit is None or completion.status not in STALE_DESCRIPTOR_STATUSES:
            return False
        try:
            return resubmit(self._queue, completion.token)
        except MooncakeError:  # local memory was unregistered meanwhile: the first failure stands
            return False
