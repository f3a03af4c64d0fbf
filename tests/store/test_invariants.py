# SPDX-License-Identifier: Apache-2.0
"""Durability in one process: master, node and SSD, with lost, damaged and full files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.store import AsyncStore
from mooncake.store import messages as m
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.store.running import running_with_ssd

DURABLE = m.PutPolicy(is_durable=True)


@contextlib.asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[tuple[MasterServer, AsyncStore]]:
    """All of them, over files that persist from one run to the next."""
    short: dict[str, Any] = {"lease_s": 0.3, "put_s": 5.0, "grace_s": 0.1, "heartbeat_s": 0.2}
    of_master = MasterSettings(port=0, oplog=str(folder / "oplog"), **short, **settings)
    async with (
        running_with_ssd(of_master, folder) as server,
        AsyncStore(f"127.0.0.1:{server.port}") as store,
    ):
        yield server, store


async def put(store: AsyncStore, *keys: str) -> None:
    """Put durable objects whose values are their keys."""
    assert await store.put_batch(list(keys), [key.encode() for key in keys], DURABLE) == [None] * len(keys)


async def until_found(store: AsyncStore, *keys: str) -> None:
    """Wait until the node has mounted; a missing key is named."""
    left = list(keys)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while left:
                found = await store.get_batch(left)
                left = [key for key, value in zip(left, found, strict=True) if value != key.encode()]
                await asyncio.sleep(0.02)
    assert not left


async def test_a_wrong_bit_in_the_log_is_refused_and_repaired_from_the_nodes(tmp_path: Path) -> None:
    keys = [f"k{number}" for number in range(20)]
    async with running(tmp_path) as (_, store):
        await put(store, *keys)
    log = tmp_path / "oplog"
    content = bytearray(log.read_bytes())
    content[content.index(b"object_readable") + 30] ^= 1
    log.write_bytes(bytes(content))
    with pytest.raises(InvalidArgument, match=r"bytes at offset \d+"):
        async with running(tmp_path):
            pass
    assert log.read_bytes() == bytes(content)
    async with running(tmp_path, oplog_repair=True) as (server, store):
        await until_found(store, *keys)
        server.master.check()
    assert (tmp_path / "oplog.damaged").read_bytes() == bytes(content)
    async with running(tmp_path) as (_, store):
        await until_found(store, *keys)


async def test_the_end_of_the_log_may_be_lost_and_what_nodes_hold_is_not(tmp_path: Path) -> None:
    log = tmp_path / "oplog"
    async with running(tmp_path) as (_, store):
        await put(store, "d0")
        size_bytes = log.stat().st_size
        await put(store, "d1", "d2")
    os.truncate(log, size_bytes)
    async with running(tmp_path) as (_, store):
        await until_found(store, "d0", "d1", "d2")
    async with running(tmp_path) as (_, store):
        await until_found(store, "d0", "d1", "d2")


async def test_what_was_removed_does_not_come_back_with_a_log_that_lost_its_end(tmp_path: Path) -> None:
    log = tmp_path / "oplog"
    async with running(tmp_path) as (_, store):
        await put(store, "d0", "gone")
        assert await store.remove(["gone"], force=True) == [True]
        size_bytes = log.stat().st_size
        await put(store, "d1")
    os.truncate(log, size_bytes)
    async with running(tmp_path) as (_, store):
        await until_found(store, "d0", "d1")
        assert await store.get("gone") is None


async def test_a_durable_put_is_answered_when_the_log_would_survive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flush of the log is held back; everything else continues, and the answer comes after it."""
    may_flush, sync = threading.Event(), os.fdatasync
    held: list[int] = []
    log = tmp_path / "oplog"

    def fdatasync(file: int) -> None:
        if os.path.realpath(f"/proc/self/fd/{file}") == str(log):
            held.append(file)
            may_flush.wait(20)
        sync(file)

    async with running(tmp_path) as (_, store):
        await put(store, "before")
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        putting = asyncio.create_task(put(store, "d"))
        try:
            await until_found(store, "d")
            async with asyncio.timeout(10):
                while not held:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not putting.done(), "answered before its record was on the disk"
        finally:
            may_flush.set()
        await putting


async def test_a_full_disk_under_the_log_refuses_puts_and_serves_reads_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = tmp_path / "oplog", os.write

    def full(file: int, content: Any) -> int:
        if os.path.realpath(f"/proc/self/fd/{file}") == str(log):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content)

    async with running(tmp_path) as (server, store):
        await put(store, "before")
        monkeypatch.setattr(os, "write", full)
        for number in range(3):
            with contextlib.suppress(MooncakeError):
                (outcome,) = await store.put_batch([f"refused{number}"], [b"x"])
                assert outcome is not None and "free some space" in outcome.reason
            assert not server.failed.done(), "the master ended"
            assert await store.get("before") == b"before"
        monkeypatch.undo()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(MooncakeError):
                    if await store.put_batch(["after"], [b"after"], DURABLE) == [None]:
                        break
                await asyncio.sleep(0.05)
        assert await store.get("before") == b"before"
    async with running(tmp_path) as (_, store):
        await until_found(store, "before", "after")
