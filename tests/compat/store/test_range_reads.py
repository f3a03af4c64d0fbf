# SPDX-License-Identifier: Apache-2.0
"""Large reads are split, and bytes staged for a device reach it by a transfer."""

from __future__ import annotations

import ctypes
from unittest import mock

import numpy as np
import pytest

from mooncake.compat.store import batches, range_reads
from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.compat.store.store_session import StoreSession
from tests.compat.store.servers import LONG_LEASES

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
        mock.patch.object(range_reads, "has_cuda", lambda: True),
        mock.patch.object(range_reads, "is_mapped", lambda *_: False),
        mock.patch.object(ctypes, "memmove", side_effect=AssertionError),
    ):
        good, target = read(session, 77, 100)
    assert good == [True] * 5
    assert np.array_equal(target, CONTENT[:, 77:177])
