# SPDX-License-Identifier: Apache-2.0
"""Asynchronous batches by number."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from mooncake.compat.transfer import async_batches
from mooncake.compat.transfer.async_batches import AsyncBatches
from mooncake.transfer.completion_queue import CompletionQueue
from mooncake.transfer.transports import Completion


@pytest.mark.processes
def test_a_wait_that_is_interrupted_loses_no_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next wait for the same batch would not end."""
    monkeypatch.setattr(async_batches, "_POLL_S", 60.0)  # the signal comes during the first wait
    queue, begun = CompletionQueue(), threading.Event()
    batches = AsyncBatches(queue, lambda number, completion: None)
    number = batches.begin(lambda queue, number: begun.set(), lambda queue, number: False)

    def interrupt_and_end() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        queue._parts[7] = Completion(number)
        queue._native.push(Completion(7))

    thread = threading.Timer(0.2, interrupt_and_end)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        batches.wait([number])
    thread.join(60)
    done: list[bool] = []
    waiting = threading.Thread(target=lambda: done.append(batches.wait([number])), daemon=True)
    waiting.start()
    waiting.join(30)
    assert done == [True]
