# SPDX-License-Identifier: Apache-2.0
"""When a client asks its master to move the bytes of small objects, and that both move the right ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from random import Random
from urllib.request import urlopen

import pytest

from mooncake.cli.ports import free_ports
from mooncake.store import Store, StoreSettings
from mooncake.store.client.small_values import FIRST_REST, MAX_SENT_BYTES, SmallValues
from mooncake.transfer import TransferEngine, TransferSettings
from tests.store.test_processes import Processes, num_writable
from tests.waiting import wait_until


def test_nothing_is_asked_of_the_master_where_memory_is_shared() -> None:
    values = SmallValues()
    assert not values.wants() and not values.sends(1)
    values.moved(is_direct=False)
    assert values.wants() and values.sends(MAX_SENT_BYTES) and not values.sends(MAX_SENT_BYTES + 1)
    values.takes_values = True
    values.moved(is_direct=True)
    assert not values.wants() and not values.takes_values


def test_after_a_failure_it_waits_for_more_and_more_operations() -> None:
    values = SmallValues()
    values.moved(is_direct=False)
    values.takes_values = True
    for rest in (FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST):
        values.answered(is_given=False)
        assert not values.takes_values
        assert [values.wants() for _ in range(rest + 1)] == [False] * rest + [True]
    values.answered(is_given=True)
    values.answered(is_given=False)
    assert [values.wants() for _ in range(FIRST_REST + 1)] == [False] * FIRST_REST + [True]


METRICS_PORT = free_ports("127.0.0.1", 1, Random())[0]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with contextlib.closing(Processes()) as processes:
        processes.start_master("--metrics-port", str(METRICS_PORT))
        processes.start_node("one")
        yield processes


def moved_bytes() -> dict[str, float]:
    """What the master has moved, by operation."""
    lines = urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics").read().decode().splitlines()
    name = 'mooncake_master_value_bytes_total{operation="'
    found = (line.removeprefix(name).split('"} ') for line in lines if line.startswith(name))
    return {operation: float(number) for operation, number in found}


@pytest.mark.processes
def test_the_master_moves_small_objects_for_a_client_over_tcp(processes: Processes) -> None:
    """Puts and gets of both kinds; the node is killed, and its successor is used in the same way."""
    engine = TransferEngine(TransferSettings(transports=("tcp",)))
    with contextlib.closing(engine), Store(processes.address, engine, StoreSettings(timeout_s=20.0)) as store:
        wait_until(lambda: num_writable(store) == 1)
        target = engine.allocate(1 << 20, huge_pages=False)

        def round_trip(key: str, size_bytes: int) -> None:
            value = os.urandom(size_bytes)
            assert store.put(key, value) is None
            assert store.get(key) == value
            assert store.get_into(key, target) == size_bytes
            assert bytes(target.view()[:size_bytes]) == value

        def moved(operation: str) -> float:
            return moved_bytes().get(operation, 0.0)

        number = 0

        def until_moved(operation: str, before: float) -> None:
            nonlocal number
            number += 1
            round_trip(f"{operation}-{number}", 1000 + number)
            assert moved(operation) > before

        wait_until(lambda: _succeeds(lambda: until_moved("read", 0.0)))
        wait_until(lambda: _succeeds(lambda: until_moved("write", 0.0)))
        before = moved("read")
        for size_bytes in (1, 4096, 65_536, 65_537, 300_000):
            round_trip(f"size-{size_bytes}", size_bytes)
        assert before < moved("read") <= before + 2 * (1 + 4096 + 65_536)
        assert store.get("none") is None

        processes.kill("one")
        processes.start_node("one")
        wait_until(lambda: _succeeds(lambda: round_trip("again", 500)))
        before = moved("read")
        wait_until(lambda: _succeeds(lambda: until_moved("read", before)))
        engine.unregister(target)


def _succeeds(action: Callable[[], object]) -> bool:
    try:
        action()
    except AssertionError:
        return False
    return True
