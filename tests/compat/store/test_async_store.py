# SPDX-License-Identifier: Apache-2.0
"""Every call has an awaitable variant."""

from __future__ import annotations

import asyncio

import pytest

from mooncake.async_store import MooncakeDistributedStoreAsync
from tests.compat.store.servers import RunningMaster


async def test_calls_are_awaited() -> None:
    master = await asyncio.to_thread(RunningMaster)
    store = MooncakeDistributedStoreAsync()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", master.address)
    assert await store.async_setup(*arguments) == 0
    codes = await asyncio.gather(*(store.async_put(f"k{i}", bytes([i])) for i in range(20)))
    assert codes == [0] * 20
    assert await store.async_get_batch([f"k{i}" for i in range(20)]) == [bytes([i]) for i in range(20)]
    assert await store.async_close() == 0
    await asyncio.to_thread(master.close)


def test_unknown_names_are_attribute_errors() -> None:
    store = MooncakeDistributedStoreAsync()
    for name in ("async_nothing", "nothing", "async_"):
        with pytest.raises(AttributeError, match=name):
            getattr(store, name)
    assert "async_batch_put_from" in dir(store)
