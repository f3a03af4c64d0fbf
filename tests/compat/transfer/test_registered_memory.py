# SPDX-License-Identifier: Apache-2.0
"""Registered memory that calls use while it is unregistered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake.compat.transfer.registered_memory import MemoryUse, RegisteredMemory
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.transports import Region

PAGE = 4096


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(transports=("local",))) as engine:
        yield engine


def test_a_use_overlaps_what_any_of_its_spans_does(engine: TransferEngine) -> None:
    memory = np.zeros(10 * PAGE, dtype=np.uint8)
    at = memory.ctypes.data
    use = MemoryUse([(at + 8 * PAGE, PAGE), (at, 3 * PAGE), (at + PAGE, 5), (-1, 0)])

    def overlaps(page: int, num_pages: int) -> bool:
        region = engine.register((at + page * PAGE, num_pages * PAGE))
        try:
            return use.overlaps(region)
        finally:
            engine.unregister(region)

    pages = [overlaps(page, 1) for page in range(10)]
    assert pages == [True] * 3 + [False] * 5 + [True, False]
    assert overlaps(0, 10) and overlaps(3, 6) and not overlaps(3, 5)


def test_memory_that_is_late_is_taken_from_the_call_that_uses_it(engine: TransferEngine) -> None:
    memory = np.zeros(PAGE, dtype=np.uint8)
    at = memory.ctypes.data
    registered = RegisteredMemory(engine, lambda num_bytes: 0.0 if num_bytes == PAGE else 60.0)
    registered.add([at], [PAGE])
    use = registered.begin_use([(at, PAGE)])
    with ThreadPoolExecutor(1) as threads:
        threads.submit(registered.remove, [at]).result(30)
    assert engine.region_of(at, 1) is None
    registered.end_use(use)


def test_threads_that_unregister_the_memory_of_each_other_do_not_wait(engine: TransferEngine) -> None:
    memory = np.zeros(2 * PAGE, dtype=np.uint8)
    mine, other = memory.ctypes.data, memory.ctypes.data + PAGE
    registered = RegisteredMemory(engine, lambda num_bytes: 1e9)
    registered.add([mine, other], [PAGE, PAGE])

    def unregister_mine() -> None:
        use = registered.begin_use([(other, PAGE)])
        registered.remove([mine])
        registered.end_use(use)

    use = registered.begin_use([(mine, PAGE)])
    with ThreadPoolExecutor(1) as threads:
        unregistering = threads.submit(unregister_mine)
        registered.remove([other])
        unregistering.result(30)
    registered.end_use(use)
    assert engine.region_of(mine, 1) is None and engine.region_of(other, 1) is None


def test_memory_is_registered_anew_for_another_location_while_a_call_uses_it(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.zeros(PAGE, dtype=np.uint8)
    at = memory.ctypes.data
    registered = RegisteredMemory(engine, lambda num_bytes: 60.0)
    monkeypatch.setattr(registered, "_wait_and_unregister", lambda *_: None)
    use = registered.begin_use([(at, PAGE)])
    kept: list[Region | None] = []
    for location in ("*", "cpu:0", "cpu:0"):
        registered.add([at], [PAGE], location)
        kept.append(engine.region_of(at, 1))
        assert location in [one.location for one in engine.describe().regions]
        registered.remove([at])
    assert kept[1] is kept[2]
    registered.end_use(use)
    assert engine.region_of(at, 1) is None, "none of them is left"
