"""Transfers on an event loop: completions of one loop's batches, handed to the futures that wait.

The queue's eventfd wakes the loop; nothing runs in a thread of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref

from mooncake.transfer.completion_queue import BatchTransfer, CompletionQueue
from mooncake.transfer.transports import Completion


class AsyncCompletionQueue:
    """Completions of one event loop's transfers, handed to the futures that wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = CompletionQueue()
        self._loop_ref = weakref.ref(loop)
        self._futures: dict[int, asyncio.Future[Completion]] = {}
        self._tokens = itertools.count()
        loop.add_reader(self._queue.fileno(), self._arrive)

    def expect(self) -> tuple[int, asyncio.Future[Completion]]:
        token = next(self._tokens)
        loop = self._loop_ref()
        assert loop is not None
        future: asyncio.Future[Completion] = loop.create_future()
        self._futures[token] = future
        return token, future

    def forget(self, token: int) -> None:
        del self._futures[token]

    def start(self, move: BatchTransfer) -> None:
        self._queue.start(move)

    def _arrive(self) -> None:
        for completion in self._queue.drain():
            future = self._futures.pop(completion.token)
            if not future.done():
                future.set_result(completion)


async def wait_until_done(future: asyncio.Future[Completion]) -> Completion:
    """The result; a cancellation, and each that follows it, is delivered only when the transfer has ended."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        raise
