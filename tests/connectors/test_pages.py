# SPDX-License-Identifier: Apache-2.0
"""Pages of any number of pieces, in one object each."""

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
from mooncake.connectors.pages import CHUNK_BYTES, Page, Pages, num_leading
from mooncake.connectors.session import PoolSettings
from mooncake.connectors.store_link import LinkSettings
from tests.connectors.held_loop import held
from tests.contract.connectors import StoreConnector

pytestmark = pytest.mark.processes

Bytes = npt.NDArray[np.uint8]


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


def test_a_page_of_another_size_is_a_miss(pages: Pages) -> None:
    assert pages.save([page("a", noise([100, 50], 1)), page("b", noise([100, 20], 2))]) == [True, True]
    short = [np.zeros(100, dtype=np.uint8), np.zeros(20, dtype=np.uint8)]
    assert pages.load([page("a", short), page("b", short)]) == [False, True]
    assert np.array_equal(short[0], noise([100, 20], 2)[0])


def test_a_page_without_room_is_not_saved(pages: Pages) -> None:
    large, small = np.zeros(96 << 20, dtype=np.uint8), noise([1000], 1)
    assert pages.save([page("large", [large]), page("small", small)]) == [False, True]
    assert pages.find(["large", "small"]) == [False, True]


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


def test_removed_and_forgotten_pages_are_gone(pages: Pages) -> None:
    keys = ["kv/a/1", "kv/a/2", "kv/b/1"]
    assert all(pages.save([page(key, noise([100], 1)) for key in keys]))
    assert pages.remove(["kv/a/1", "none"]) == [True, False]
    assert pages.forget("kv/a/") == 1
    assert pages.find(keys) == [False, False, True]


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
