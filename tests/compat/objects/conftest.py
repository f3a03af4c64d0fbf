# SPDX-License-Identifier: Apache-2.0
"""Stores for structured objects: the real one, and one that has only what must be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake.compat.store.store import MooncakeDistributedStore
from tests.compat.objects.plain_store import PlainStore
from tests.compat.store.servers import LONG_LEASES, RunningMaster, a_store


@pytest.fixture(scope="module")
def store() -> Iterator[MooncakeDistributedStore]:
    master = RunningMaster(LONG_LEASES)
    with a_store(master, segment_bytes=128 << 20) as store:
        yield store
    master.close()


@pytest.fixture
def plain() -> PlainStore:
    return PlainStore()
