# SPDX-License-Identifier: Apache-2.0
"""Pages of any number of pieces, in one object each; what a call without an answer returns, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mooncake import clock
from mooncake.connectors import pages as module
from mooncake.connectors.pages import CHUNK_BYTES, BoundedCall, BoundedCalls, Page, Pages, num_leading
from mooncake.connectors.session import PoolSettings, TransferThread
from mooncake.connectors.store_link import LinkSettings, failures
from mooncake.errors import DeadlineExceeded, InvalidArgument
from tests.connectors.held_loop import LONGEST_S, held
from tests.contract.connectors import StoreConnector

SHORT_S = 0.1

Bytes = npt.NDArray[np.uint8]


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


def test_what_no_request_waits_for_has_its_own_time_and_is_tried_at_a_store_that_failed(
    calls: BoundedCalls,
) -> None:
    async def failing(deadline: float) -> float:
        raise DeadlineExceeded("no answer")

    async def steps(deadline: float) -> float:
        return deadline

    assert calls.look_up("lookup", failing, 0.0).wait() == 0.0
    assert calls.look_up("lookup", steps, 0.0).wait() == 0.0
    before = clock.monotonic()
    assert calls.insist("forget", steps, 0.0, LONGEST_S).wait() >= before + LONGEST_S


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


def test_closing_once_more_while_the_loop_was_blocked_since(
    thread: TransferThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_stopped = threading.Event()
    with held(thread.loop) as hold, ThreadPoolExecutor(1) as engine:
        monkeypatch.setattr("mooncake.connectors.session.CLOSING_S", SHORT_S)
        thread.close()
        monkeypatch.setattr("mooncake.connectors.session.CLOSING_S", LONGEST_S)
        call_soon = thread.loop.call_soon_threadsafe

        def observed(callback: Callable[..., object], *arguments: object, **named: Any) -> object:
            try:
                return call_soon(callback, *arguments, **named)
            finally:
                has_stopped.set()

        monkeypatch.setattr(thread.loop, "call_soon_threadsafe", observed)
        closing = engine.submit(thread.close)
        assert has_stopped.wait(LONGEST_S), "the second call has given the loop its work"
        hold.release()
        closing.result(LONGEST_S)
    assert thread.has_released_memory() and thread.loop.is_closed()


@pytest.fixture
def pages(daemon: StoreConnector, request: pytest.FixtureRequest) -> Iterator[Pages]:
    pool = PoolSettings(daemon.address, tenant=str(request.node.name))
    client = Pages(pool, LinkSettings(lookup_timeout_s=20.0, load_timeout_s=20.0))
    yield client
    client.close()


def page(key: str, pieces: list[Bytes]) -> Page:
    return Page(key, [(piece.ctypes.data, piece.nbytes) for piece in pieces])


def noise(sizes: list[int], seed: int) -> list[Bytes]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]


@pytest.mark.processes
@pytest.mark.parametrize(
    "sizes",
    [[1], [4096] * 7, [3000, 2000], [5 * CHUNK_BYTES + 1], [CHUNK_BYTES - 1, 2 * CHUNK_BYTES], [10, 1, 100]],
    ids=str,
)
def test_pieces_of_any_size(pages: Pages, sizes: list[int]) -> None:
    written, read = noise(sizes, 1), [np.zeros(size, dtype=np.uint8) for size in sizes]
    assert pages.save([page("a", written)]) == [True]
    assert pages.load([page("a", read)]) == [True]
    assert all(np.array_equal(one, other) for one, other in zip(written, read, strict=True))


@pytest.mark.processes
def test_a_page_of_another_size_is_a_miss(pages: Pages) -> None:
    assert pages.save([page("a", noise([100, 50], 1)), page("b", noise([100, 20], 2))]) == [True, True]
    short = [np.zeros(100, dtype=np.uint8), np.zeros(20, dtype=np.uint8)]
    assert pages.load([page("a", short), page("b", short)]) == [False, True]
    assert np.array_equal(short[0], noise([100, 20], 2)[0])


@pytest.mark.processes
def test_a_page_without_room_is_not_saved(pages: Pages) -> None:
    large, small = np.zeros(96 << 20, dtype=np.uint8), noise([1000], 1)
    assert pages.save([page("large", [large]), page("small", small)]) == [False, True]
    assert pages.find(["large", "small"]) == [False, True]


@pytest.mark.processes
def test_calls_from_many_threads(pages: Pages) -> None:
    def turn(number: int) -> bool:
        pieces = [noise([512] * 3, number * 10 + index) for index in range(4)]
        keys = [f"{number} {index}" for index in range(4)]
        into = [[np.zeros(512, dtype=np.uint8) for _ in range(3)] for _ in keys]
        is_saved = pages.save([page(key, one) for key, one in zip(keys, pieces, strict=True)])
        is_loaded = pages.load([page(key, one) for key, one in zip(keys, into, strict=True)])
        return all(is_saved + is_loaded) and bool(np.array_equal(pieces, into))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(turn, range(24)))


@pytest.mark.processes
def test_removed_and_forgotten_pages_are_gone(pages: Pages) -> None:
    keys = ["kv/a/1", "kv/a/2", "kv/b/1"]
    assert all(pages.save([page(key, noise([100], 1)) for key in keys]))
    assert pages.remove(["kv/a/1", "none"]) == [True, False]
    assert pages.forget(["kv/a/", "kv/c/"]) == [1, 0]
    assert pages.find(keys) == [False, False, True]
    assert pages.forget(["kv/a/"]) == [0]
    pages.close()
    assert pages.forget(["kv/b/"]) == [None], "unknown"


def test_several_prefixes_are_forgotten_at_once(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    have_begun = asyncio.Barrier(2)

    async def forget(prefix: str, _: float) -> int:
        await have_begun.wait()
        return len(prefix)

    monkeypatch.setattr(pages, "_forget", forget)
    assert pages.forget(["a", "bc"]) == [1, 2]


@pytest.mark.processes
def test_empty_batches(pages: Pages) -> None:
    assert (pages.find([]), pages.load([]), pages.save([])) == ([], [], [])
    assert [num_leading(flags) for flags in ([], [True], [False, True], [True, False])] == [0, 1, 0, 1]


# A paused operation must not continue in memory that the engine has got back

PATIENT_S = 1.0
GIVEN_UP_S = 3.0
"""Much longer than the timeouts of the clients below."""


@pytest.fixture
def impatient(daemon: StoreConnector, request: pytest.FixtureRequest) -> Iterator[Pages]:
    """A client with short timeouts; its loop can be blocked for longer."""
    pool = PoolSettings(daemon.address, tenant=str(request.node.name))
    client = Pages(pool, LinkSettings(lookup_timeout_s=0.15, load_timeout_s=PATIENT_S))
    client.find(["anything"])  # it is connected after that
    yield client
    client.close()


def used_again_at_once(client: Pages, move: Callable[[], list[bool]], memory: Bytes, byte: int) -> list[bool]:
    """Move while the loop is blocked; the engine fills memory that it gets back with ``byte`` at once."""
    loop, is_back = client._session.loop, threading.Event()

    def engine() -> list[bool]:
        flags = move()
        if flags != [True] or byte == PREFIX_B:
            memory[:] = byte
        is_back.set()
        return flags

    with held(loop) as hold, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(engine)
        is_back.wait(GIVEN_UP_S)
        hold.release()
        return answer.result(60.0)


def at_rest(client: Pages) -> None:
    """Wait until everything that was begun before has ended."""

    async def others() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=5.0)

    asyncio.run_coroutine_threadsafe(others(), client._session.loop).result(60.0)


PREFIX_A, PREFIX_B, COMPUTED = 0xA1, 0xB2, 0xEE


@pytest.mark.processes
def test_a_page_that_is_reused_after_an_abandoned_save_is_not_saved_with_its_new_bytes(
    impatient: Pages, pages: Pages
) -> None:
    memory = np.full(1 << 20, PREFIX_A, dtype=np.uint8)
    impatient.register([(memory.ctypes.data, memory.nbytes)])
    used_again_at_once(impatient, lambda: impatient.save([page("A", [memory])]), memory, PREFIX_B)
    at_rest(impatient)
    found = np.zeros(1 << 20, dtype=np.uint8)
    if pages.load([page("A", [found])]) == [True]:
        assert set(found.tolist()) == {PREFIX_A}, "another prefix's bytes under the key of A"
    assert set(memory.tolist()) == {PREFIX_B}


@pytest.mark.processes
def test_a_page_that_is_reused_after_an_abandoned_load_is_not_overwritten(
    impatient: Pages, pages: Pages
) -> None:
    saved = np.full(1 << 20, PREFIX_A, dtype=np.uint8)
    assert pages.save([page("A", [saved])]) == [True]
    memory = np.zeros(1 << 20, dtype=np.uint8)
    impatient.register([(memory.ctypes.data, memory.nbytes)])
    flags = used_again_at_once(impatient, lambda: impatient.load([page("A", [memory])]), memory, COMPUTED)
    at_rest(impatient)
    assert set(memory.tolist()) == {PREFIX_A if flags == [True] else COMPUTED}


@pytest.mark.processes
def test_an_abandoned_save_leaves_no_half_put_behind(
    impatient: Pages, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abandoned between the write and its end: the space is released, and the next writer can use the key."""
    memory = np.full(4096, PREFIX_A, dtype=np.uint8)
    end_puts = impatient._session.store.end_puts

    async def late(grants: Any, deadline: float) -> Any:
        await asyncio.sleep(max(0.0, deadline - clock.monotonic()))
        return await end_puts(grants, deadline)

    monkeypatch.setattr(impatient._session.store, "end_puts", late)
    assert impatient.save([page("A", [memory])]) == [False]
    at_rest(impatient)
    assert pages.find(["A"]) == [False]
    assert pages.save([page("A", [memory])]) == [True]
    assert pages.find(["A"]) == [True], "the next writer is not blocked"
