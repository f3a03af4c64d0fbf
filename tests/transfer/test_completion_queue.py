# SPDX-License-Identifier: Apache-2.0
"""Retries while draining, with connections that fail on demand; waits for a completion on an event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import threading
import time

import numpy as np
import pytest

from mooncake.errors import InvalidArgument
from mooncake.transfer import completion_queue
from mooncake.transfer.batch import Batch, TransferColumns
from mooncake.transfer.completion_queue import (
    BatchTransfer,
    CompletionQueue,
    run_parts_at_once,
    wait_until_done,
)
from mooncake.transfer.descriptor import Column
from mooncake.transfer.transports import Completion, NativeQueue, Op, PeerConnection, Status
from mooncake.transfer.transports.tcp import TcpConnection


class Scripted(TcpConnection):
    """A connection that answers every submission with the next status of its script."""

    def __init__(self, *script: Status) -> None:
        self.script = list(script)
        self.seen: list[list[int]] = []
        self.asked: list[tuple[int, bool]] = []
        self.submit = self._submit

    def _submit(
        self,
        queue: NativeQueue,
        token: int,
        op: Op,
        local: Column,
        remote: Column,
        lengths: Column,
        timeout_s: float,
        checksum: bool,
        priority: int = 0,
        reports: bool = False,
    ) -> int:
        self.asked.append((priority, reports))
        self.seen.append(remote.tolist())
        status = self.script.pop(0)
        if status == Status.UNREGISTERED:
            return 0
        done = int(lengths.sum()) if status == Status.OK else 0
        queue.push(Completion(token, status, -1 if status == Status.OK else 0, done))
        return -1


class Reachable:
    may_be_stale = False

    def __init__(self, **carriers: Scripted | None) -> None:
        self.carriers = carriers

    def connection(self, path: str, timeout_s: float) -> PeerConnection | None:
        return self.carriers[path]


def move(segment: Reachable, shm_rows: tuple[bool, ...] | None = None, token: int = 9) -> BatchTransfer:
    rows = np.arange(3, dtype=np.uint64)
    able = {"shm": None if shm_rows is None else np.array(shm_rows), "tcp": None}
    deadline = time.monotonic() + 60
    batch = Batch(3, able, deadline, Status.ACCESS_DENIED)
    return BatchTransfer(token, Op.WRITE, segment, TransferColumns(rows, rows + 100, rows + 1), batch, False)


def outcome(queue: CompletionQueue) -> list[tuple[int, Status, int, int]]:
    return [(c.token, c.status, c.failed_slice, c.num_bytes) for c in queue.drain(timeout_s=5.0)]


def test_a_lost_path_is_replaced_while_draining() -> None:
    shm, tcp = Scripted(Status.PEER_LOST), Scripted(Status.OK)
    queue = CompletionQueue()
    queue.start(move(Reachable(shm=shm, tcp=tcp)))
    assert outcome(queue) == [], "the first path failed and the batch goes on"
    assert len(queue) == 1
    assert outcome(queue) == [(9, Status.OK, -1, 6)]
    assert shm.seen == tcp.seen == [[100, 101, 102]]
    assert len(queue) == 0


def test_only_the_part_that_failed_is_repeated() -> None:
    shm, tcp = Scripted(Status.PEER_LOST), Scripted(Status.OK, Status.OK)
    queue = CompletionQueue()
    queue.start(move(Reachable(shm=shm, tcp=tcp), (False, True, False)))
    ended: list[tuple[int, Status, int, int]] = []
    while not ended:
        ended = outcome(queue)
    assert ended == [(9, Status.OK, -1, 6)]
    assert tcp.seen == [[100, 102], [101]]


def test_when_all_paths_fail_the_last_one_is_blamed() -> None:
    queue = CompletionQueue()
    queue.start(move(Reachable(shm=Scripted(Status.PEER_LOST), tcp=Scripted(Status.TIMED_OUT))))
    assert outcome(queue) == []
    assert outcome(queue) == [(9, Status.TIMED_OUT, 0, 0)]


def test_no_path_has_a_connection() -> None:
    queue = CompletionQueue()
    queue.start(move(Reachable(shm=None, tcp=None)))
    assert outcome(queue) == [(9, Status.PEER_LOST, -1, 0)]


def test_unregistered_memory_is_an_error_only_when_nothing_was_started() -> None:
    queue = CompletionQueue()
    with pytest.raises(InvalidArgument, match="register"):
        queue.start(move(Reachable(shm=Scripted(Status.UNREGISTERED), tcp=Scripted())))
    assert len(queue) == 0
    shm, tcp = Scripted(Status.OK), Scripted(Status.UNREGISTERED)
    queue.start(move(Reachable(shm=shm, tcp=tcp), (True, False, True)))
    assert outcome(queue) == [(9, Status.UNREGISTERED, 1, 0)]


def test_progress_counts_what_is_done_and_forgets_what_failed() -> None:
    shm, tcp = Scripted(Status.PEER_LOST), Scripted(Status.OK)
    reported: list[int] = []
    urgent = dataclasses.replace(move(Reachable(shm=shm, tcp=tcp)), priority=3, progress=reported.append)
    queue = CompletionQueue()
    queue.start(urgent)
    assert outcome(queue) == [] and shm.asked == tcp.asked == [(3, True)]
    assert outcome(queue) == [(9, Status.OK, -1, 6)]
    assert urgent.moved == {0: 0, 1: 6} and reported == []


class Held(Scripted):
    """A connection whose parts end when the test allows it; ``interrupts`` raises before it takes one."""

    def __init__(self, interrupts: bool = False) -> None:
        super().__init__()
        self.under_way: list[tuple[NativeQueue, int]] = []
        self.interrupts = interrupts

    def _submit(self, queue: NativeQueue, token: int, *_: object, **__: object) -> int:
        if self.interrupts:
            raise KeyboardInterrupt
        self.under_way.append((queue, token))
        return -1

    def end(self) -> None:
        for queue, token in self.under_way:
            queue.push(Completion(token))
        self.under_way.clear()


class Stopped(Exception):
    """What the handler of a signal may raise in a program."""


def no_cancel() -> None:
    raise AssertionError("everything has ended")


def test_batches_are_run_together_and_returned() -> None:
    queue, reached = CompletionQueue(), Reachable(shm=Scripted(Status.OK, Status.OK), tcp=None)
    begins = [lambda token=token: queue.start(move(reached, token=token)) for token in (3, 4)]
    assert {done.token for done in queue.run_all(begins, 60.0, no_cancel)} == {3, 4}
    assert queue.run_all([], 60.0, no_cancel) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, Stopped, InvalidArgument("local", 0, "memory")])
def test_what_is_raised_while_batches_begin_is_raised_when_those_that_began_have_ended(
    failure: BaseException | type[BaseException],
) -> None:
    queue, held = CompletionQueue(), Held()
    has_third = False

    def fail() -> None:
        threading.Timer(0.05, held.end).start()
        raise failure

    def third() -> None:
        nonlocal has_third
        has_third = True

    begins = [lambda: queue.start(move(Reachable(shm=held, tcp=None))), fail, third]
    with pytest.raises(failure if isinstance(failure, type) else type(failure)):
        queue.run_all(begins, 60.0, no_cancel)
    assert not held.under_way and len(queue) == 0, "the memory of the first is no longer in use"
    assert not has_third


def test_a_handler_that_raises_during_the_wait_ends_no_wait() -> None:
    held = Held()
    num_signals = 0

    def handle(number: int, frame: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 3:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            held.end()
        raise Stopped

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(Stopped):
            run_parts_at_once(move(Reachable(shm=held, tcp=None)), 60.0, no_cancel)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert num_signals == 3 and not held.under_way


def test_what_an_interrupted_queue_lost_count_of_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_queue, "MAX_OVERTIME_S", 0.0)
    cancelled: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        run_parts_at_once(
            move(Reachable(shm=Held(interrupts=True), tcp=None)), 0.0, lambda: cancelled.append(True)
        )
    assert cancelled == [True], "the part may have been handed over or not"


async def test_a_cancelled_wait_ends_when_the_transfer_has() -> None:
    transfer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(wait_until_done(transfer))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done(), "its memory is in use"
    transfer.set_result(Completion(1))
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_completion_is_the_result() -> None:
    transfer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(wait_until_done(transfer))
    transfer.set_result(Completion(7))
    assert (await waiting).token == 7
