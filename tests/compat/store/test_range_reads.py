# SPDX-License-Identifier: Apache-2.0
"""Large reads are split, and bytes staged for a device reach it by a transfer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mooncake import clock
from mooncake.compat.store import batches, range_reads
from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.compat.store.store_session import StoreSession
from mooncake.compat.transfer import InnerTransferEngine
from mooncake.store.client.effects import MoveSlices, SlicesMoved
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.memory import is_device_memory
from tests.compat.store.servers import LONG_LEASES, RunningMaster, a_store
from tests.contract import cuda_double

MASTER = LONG_LEASES
CONTENT = np.random.default_rng(4).integers(0, 256, (5, 150_000), dtype=np.uint8)
KEYS = [f"partial/{row}" for row in range(5)]


@pytest.fixture
def session(store: MooncakeDistributedStore) -> StoreSession:
    assert store.put_batch(KEYS, [row.tobytes() for row in CONTENT]) == 0
    assert store._session is not None
    return store._session


def read(session: StoreSession, offset: int, length: int) -> tuple[list[bool], np.ndarray]:
    target = np.zeros((5, length), dtype=np.uint8)
    grants = [grant for grant in range_reads.open_reads(session, KEYS) if grant is not None]
    parts = [[(offset, int(row.ctypes.data), length)] for row in target]
    return range_reads.read_parts(session, grants, parts), target


@pytest.mark.parametrize(("offset", "length"), [(0, 150_000), (77, 100), (149_999, 1)])
def test_a_split_read(session: StoreSession, offset: int, length: int) -> None:
    with mock.patch.object(batches, "PART_BYTES", 200_000):
        good, target = read(session, offset, length)
    assert good == [True] * 5
    assert np.array_equal(target, CONTENT[:, offset : offset + length])


def test_staged_bytes_reach_a_device(session: StoreSession) -> None:
    """Memory of this process simulates a device; the test checks that only a transfer writes to it."""
    with (
        mock.patch.object(TransferEngine, "is_device_memory", lambda *_: True),
        mock.patch.object(ctypes, "memmove", side_effect=AssertionError),
    ):
        good, target = read(session, 77, 100)
    assert good == [True] * 5
    assert np.array_equal(target, CONTENT[:, 77:177])


@contextmanager
def slow_network(session: StoreSession, bytes_per_s: float) -> Iterator[None]:
    """Transfers fail that would not have ended before their deadlines; none waits."""
    move = session.store._move

    def move_slowly(effect: MoveSlices) -> list[SlicesMoved]:
        num_bytes = sum(int(np.sum(one.lengths)) for one in effect.transfers)
        if clock.monotonic() + num_bytes / bytes_per_s > effect.deadline:
            return [SlicesMoved(None, "timed_out", effect.deadline) for _ in effect.transfers]
        return move(effect)

    with (
        mock.patch.object(session.store, "_move", move_slowly),
        mock.patch.object(batches, "SLOW_PART_BYTES", 2 << 20),
        mock.patch.object(batches, "LATE_S", 0.0),
    ):
        yield


def test_what_a_slow_network_moves_in_time(store: MooncakeDistributedStore) -> None:
    """An object that takes longer than the timeout of a call is neither a miss nor a failed write."""
    session = store._session
    assert session is not None
    size = 3_000_001
    content = np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8)
    value = content.tobytes()
    assert size / 5e5 > session.store.settings.timeout_s
    target = np.zeros((2, size), np.uint8)
    first, second = (int(row.ctypes.data) for row in target)
    with slow_network(session, 5e5):
        assert store.put("slow/0", value) == store.put_parts("slow/1", value[:5], value[5:]) == 0
        assert store.put_from("slow/2", int(content.ctypes.data), size) == 0
        before = session.client_metrics._bytes["read"]
        assert store.get("slow/0") == value
        assert session.client_metrics._bytes["read"] == before + size
        assert store.get_batch(["slow/1", "missing", "slow/2"]) == [value, b"", value]
        handle = store.get_buffer("slow/0")
        assert handle is not None and bytes(handle) == value
        into = store.batch_get_into(["slow/0", "missing"], [first, second], [size, size])
        assert into == [size, -704] and target[0].tobytes() == value
        cut = [[first, first + 1_000_000]]
        target[:] = 0
        assert store.batch_get_into_multi_buffers(["slow/1"], cut, [[1_000_000, 2_000_001]]) == [size]
        assert target[0].tobytes() == value
    with slow_network(session, 1e3):
        assert store.get("slow/0") == b"" and store.get_into("slow/0", first, size) == -704


@pytest.fixture
def device(master: RunningMaster) -> Iterator[tuple[MooncakeDistributedStore, TransferEngine]]:
    """A store whose engine has a device, the memory of which this process can also map."""
    if not cuda_double.built():
        pytest.skip("the double of the CUDA driver is not built")
    with (
        TransferEngine(TransferSettings(cuda_library=str(cuda_double.LIBRARY))) as engine,
        a_store(master, 0, engine=InnerTransferEngine(engine)) as store,
    ):
        yield store, engine


def test_parts_of_objects_reach_a_device(
    session: StoreSession, device: tuple[MooncakeDistributedStore, TransferEngine]
) -> None:
    """Registered or not: the processor touches none of the memory, whatever protection it has."""
    store, engine = device
    memory = engine.allocate(1 << 20, device="cuda:0")
    address = memory.address
    allowed = ctypes.memmove

    def host_only(target: Any, source: Any, length: int) -> Any:
        assert not (isinstance(target, int) and is_device_memory(target, str(cuda_double.LIBRARY)))
        assert not (isinstance(source, int) and is_device_memory(source, str(cuda_double.LIBRARY)))
        return allowed(target, source, length)

    with mock.patch.object(ctypes, "memmove", host_only):
        for is_registered in (False, True):
            if is_registered:
                assert store.register_buffer(address, 1 << 20) == 0
            there = [[address, address + 100_000]]
            assert store.batch_get_into_multi_buffers(KEYS[:1], there, [[50_000, 100_000]]) == [150_000]
            assert store.get_into_ranges([address + 300_000], [[KEYS[1]]], [[[0]]], [[[5]]], [[[70]]]) == [
                [[70]]
            ]
            assert store.batch_get_session_start([KEYS[2]]) == [0]
            ranges = store.batch_get_into_multi_buffer_ranges([KEYS[2]], [[address + 400_000]], [[80]], [[7]])
            assert ranges == [80]
            data = bytearray(1 << 20)
            memory.read_into(data)
            found = np.frombuffer(data, np.uint8)
            assert np.array_equal(found[:50_000], CONTENT[0, :50_000])
            assert np.array_equal(found[100_000:200_000], CONTENT[0, 50_000:])
            assert np.array_equal(found[300_000:300_070], CONTENT[1, 5:75])
            assert np.array_equal(found[400_000:400_080], CONTENT[2, 7:87])
            memory.write_from(bytes(1 << 20))
