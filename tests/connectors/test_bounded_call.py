# SPDX-License-Identifier: Apache-2.0
"""The result of a call without an answer, and when the engine gets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake import clock
from mooncake.connectors import bounded_call as module
from mooncake.connectors.bounded_call import BoundedCall, BoundedCalls
from mooncake.connectors.session import TransferThread
from mooncake.connectors.store_link import LinkSettings, failures
from mooncake.errors import DeadlineExceeded, InvalidArgument
from tests.connectors.held_loop import LONGEST_S, held

SHORT_S = 0.1


@pytest.fixture
def thread() -> Iterator[TransferThread]:
    running = TransferThread("127.0.0.1", ("shm",))
    yield running
    running.close()


@pytest.fixture
def calls(thread: TransferThread, monkeypatch: pytest.MonkeyPatch) -> BoundedCalls:
    monkeypatch.setattr(module, "ENDING_S", SHORT_S)
    settings = LinkSettings(lookup_timeout_s=SHORT_S, load_timeout_s=SHORT_S, retry_after_s=LONGEST_S)
    return BoundedCalls(thread, settings)


class Writer:
    """An operation that writes to some memory and ends only when the test lets it."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), asyncio.Event()
        self.has_ended = False

    async def __call__(self, deadline: float) -> str:
        self.has_begun.set()
        cancelled: BaseException | None = None
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError as error:  # as transfer does: the memory is in use
                cancelled = error
        self.has_ended = True
        if cancelled is not None:
            raise cancelled
        return "loaded"


def test_the_result_of_the_steps_is_returned(calls: BoundedCalls) -> None:
    async def steps(deadline: float) -> str:
        return "loaded"

    assert calls.move("load", steps, "miss").wait() == "loaded"


def test_every_step_gets_the_same_deadline(calls: BoundedCalls) -> None:
    async def steps(deadline: float) -> float:
        return deadline

    before = clock.monotonic()
    work = calls.move("load", steps, 0.0)
    deadline = work.wait()
    assert deadline == work.claim.deadline
    assert before + SHORT_S <= deadline <= clock.monotonic() + SHORT_S


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("key"), AssertionError("broken")])
def test_a_bug_is_logged_and_counted_and_fails_no_other_call(calls: BoundedCalls, error: Exception) -> None:
    async def steps(deadline: float) -> str:
        raise error

    async def next_one(deadline: float) -> str:
        return "loaded"

    before = failures.labels("load")._value.get()
    assert calls.move("load", steps, "miss").wait() == "miss"
    assert failures.labels("load")._value.get() == before + 1
    assert calls.move("load", next_one, "miss").wait() == "loaded", "the store is not the cause"


def test_no_calls_follow_a_failure_to_reach_the_store_but_they_do_follow_a_refusal(
    calls: BoundedCalls,
) -> None:
    num_calls = 0

    def raising(error: Exception) -> BoundedCall[str]:
        async def steps(deadline: float) -> str:
            nonlocal num_calls
            num_calls += 1
            raise error

        return calls.look_up("lookup", steps, "miss")

    assert raising(InvalidArgument("key", "", "a name")).wait() == "miss"
    assert raising(DeadlineExceeded("no answer")).wait() == "miss"
    assert raising(DeadlineExceeded("no answer")).wait() == "miss"
    assert num_calls == 2


def test_memory_is_not_free_while_something_writes_to_it(calls: BoundedCalls, thread: TransferThread) -> None:
    writer = Writer()
    work = calls.move("load", writer, "miss")
    with ThreadPoolExecutor(1) as engine:
        waiting = engine.submit(work.wait)
        assert writer.has_begun.wait(LONGEST_S)
        # Far beyond the deadline, and cancelled as well.
        assert not work.claim.wait(work.claim.deadline + 4 * SHORT_S)
        assert not waiting.done() and not writer.has_ended
        thread.loop.call_soon_threadsafe(writer.may_end.set)
        assert waiting.result(LONGEST_S) == "miss" and writer.has_ended


def test_a_blocked_loop_keeps_the_memory_and_a_lookup_returns(
    calls: BoundedCalls, thread: TransferThread
) -> None:
    async def steps(deadline: float) -> str:
        return "found"

    with held(thread.loop) as hold, ThreadPoolExecutor(1) as engine:
        assert calls.look_up("lookup", steps, "miss").wait() == "miss", "it touches no memory"
        work = calls.move("load", steps, "miss")
        waiting = engine.submit(work.wait)
        assert not work.claim.wait(work.claim.deadline + 4 * SHORT_S) and not waiting.done()
        hold.release()
        assert waiting.result(LONGEST_S) in ("miss", "found") and work.claim.is_free


async def test_the_engines_own_loop_waits_as_long(calls: BoundedCalls, thread: TransferThread) -> None:
    writer = Writer()
    work = calls.move("load", writer, "miss")
    waiting = asyncio.ensure_future(work.on_this_loop())
    await asyncio.to_thread(work.claim.wait, work.claim.deadline + 4 * SHORT_S)
    waiting.cancel()
    await asyncio.to_thread(work.claim.wait, clock.monotonic() + SHORT_S)
    assert not waiting.done(), "cancelled, but the memory is in use"
    thread.loop.call_soon_threadsafe(writer.may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert writer.has_ended


async def test_the_engines_own_loop_gets_the_result(calls: BoundedCalls) -> None:
    async def steps(deadline: float) -> str:
        return "loaded"

    assert await calls.move("load", steps, "miss").on_this_loop() == "loaded"


def test_closing_ends_what_is_under_way(thread: TransferThread) -> None:
    calls = BoundedCalls(thread, LinkSettings(lookup_timeout_s=LONGEST_S, load_timeout_s=LONGEST_S))
    has_begun, results = threading.Event(), list[str]()

    async def steps(deadline: float) -> str:
        has_begun.set()
        await asyncio.sleep(LONGEST_S)
        return "loaded"

    work = calls.move("load", steps, "miss")
    work.then(results.append)
    assert has_begun.wait(LONGEST_S)
    with ThreadPoolExecutor(1) as engine:
        waiting = engine.submit(work.wait)
        thread.close()
        assert waiting.result(LONGEST_S) == "miss"
    assert results == ["miss"] and work.claim.is_free


def test_a_closed_session_answers_as_an_empty_store(thread: TransferThread) -> None:
    async def steps(deadline: float) -> str:
        return "loaded"

    thread.close()
    work = BoundedCalls(thread, LinkSettings()).move("load", steps, "miss")
    assert work.wait() == "miss" and work.claim.is_free


def test_a_session_that_was_closed_while_its_loop_is_blocked_frees_the_memory(
    calls: BoundedCalls, thread: TransferThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.connectors.session.CLOSING_S", SHORT_S)

    async def steps(deadline: float) -> str:
        return "loaded"

    with held(thread.loop), ThreadPoolExecutor(1) as engine:
        work = calls.move("load", steps, "miss")
        waiting = engine.submit(work.wait)
        thread.close()
        assert thread.has_released_memory() and waiting.result(LONGEST_S) == "miss"
