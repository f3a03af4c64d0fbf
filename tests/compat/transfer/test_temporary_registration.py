# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.compat.transfer.temporary_registration import TemporaryRegistrations
from mooncake.errors import InvalidArgument
from mooncake.transfer.descriptor import Column
from mooncake.transfer.transports import RegionTable


@pytest.fixture
def table() -> Iterator[RegionTable]:
    table = RegionTable()
    yield table
    assert table.all() == [], "a region is still registered"


def columns(*spans: tuple[int, int]) -> tuple[Column, Column]:
    return (
        np.array([address for address, _ in spans], dtype=np.uint64),
        np.array([size for _, size in spans], dtype=np.uint64),
    )


def test_regions_end_with_their_batch_although_there_is_always_another(table: RegionTable) -> None:
    registrations = TemporaryRegistrations(table)
    memory = np.zeros(1000 * 4096, dtype=np.uint8)
    at = memory.ctypes.data
    under_way = registrations.begin(*columns((at, 4096)))
    for number in range(1, 1000):
        following = registrations.begin(*columns((at + number * 4096, 4096)))
        registrations.end(under_way)
        under_way = following
        assert len(table.all()) == 1
    registrations.end(under_way)


def test_batches_with_the_same_memory_end_each_for_itself(table: RegionTable) -> None:
    registrations = TemporaryRegistrations(table)
    memory = np.zeros(8192, dtype=np.uint8)
    at = memory.ctypes.data
    registrations.begin(*columns((at, 4096), (at + 4096, 4096), (at, 4096)), number=7)
    registrations.begin(*columns((at, 4096)), number=8)
    assert [region.address - at for region in table.all()] == [0, 0, 4096]
    registrations.end_of(7)
    assert [region.address - at for region in table.all()] == [0]
    registrations.end_of(7)
    registrations.end_of(9)  # of a batch that had registered its memory
    registrations.end_of(8)


def test_memory_that_cannot_be_read_leaves_none_registered(table: RegionTable) -> None:
    registrations = TemporaryRegistrations(table)
    memory = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(InvalidArgument, match="local memory"):
        registrations.begin(*columns((memory.ctypes.data, 4096), (1 << 40, 10)), number=7)
    registrations.end_of(7)


def test_memory_that_may_not_be_written_is_registered_read_only(table: RegionTable) -> None:
    registrations = TemporaryRegistrations(table)
    mapped = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    at = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
    regions = registrations.begin(*columns((at, 4096)))
    assert [region.is_writable for region in regions] == [False]
    registrations.end(regions)
