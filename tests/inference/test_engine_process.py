# SPDX-License-Identifier: Apache-2.0
"""The process around an engine: when it listens, and what it publishes of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from mooncake.errors import AddressInUse
from mooncake.http.server import listen
from mooncake.inference import engine_process, fake_engine
from mooncake.inference.api import Api
from mooncake.inference.blocks import BlockPool
from mooncake.inference.engine_process import _as_kv_event
from mooncake.inference.fake_engine import FakeEngineSettings
from mooncake.kv_events import BlockRemoved
from mooncake.prefix import BlockHash
from tests.contract.metadata_servers import free_port
from tests.waiting import until

HOST = "127.0.0.1"


def is_connected(port: int) -> bool:
    """Whether a probe that opens a connection takes the engine as ready."""
    try:
        socket.create_connection((HOST, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


async def test_an_engine_listens_when_its_model_is_loaded_and_not_before() -> None:
    is_loading, is_loaded, port = asyncio.Event(), asyncio.Event(), free_port()

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Api]:
        is_loading.set()
        await is_loaded.wait()
        async with fake_engine.running(FakeEngineSettings()) as api:
            yield api

    task = asyncio.create_task(engine_process.serve(running(), HOST, port))
    await is_loading.wait()
    assert not is_connected(port)
    with socket.socket() as other, pytest.raises(OSError):  # its port is no free one meanwhile
        other.bind((HOST, port))
    is_loaded.set()
    await until(lambda: is_connected(port), "an open port")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_connected(port)


async def test_a_taken_port_is_an_error_before_the_model_is_loaded() -> None:
    is_loading = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[Api]:
        is_loading.set()
        async with fake_engine.running(FakeEngineSettings()) as api:
            yield api

    with listen(HOST, 0) as taken, pytest.raises(AddressInUse):
        await engine_process.serve(running(), HOST, taken.getsockname()[1])
    assert not is_loading.is_set()


def test_a_removal_is_published_with_its_own_reason() -> None:
    """After a flip of weights nothing was evicted: a conductor would name the wrong cause of a miss."""
    pool: BlockPool[BlockHash] = BlockPool(3, 4)
    hashes = [BlockHash(bytes([number]) * 32) for number in range(3)]
    for block_hash in hashes:  # the third needs the place of the first
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.publish(blocks, [block_hash], BlockHash(b""))
        pool.free(blocks)
    pool.clear()
    removed = [
        event
        for event in (_as_kv_event(one, 4) for one in pool.drain_events())
        if isinstance(event, BlockRemoved)
    ]
    assert [(event.block_hashes, event.reason) for event in removed] == [
        ([hashes[0]], "evicted: least recently used"),
        ([hashes[2], hashes[1]], "cleared: weights replaced"),
    ]
