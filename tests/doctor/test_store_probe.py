# SPDX-License-Identifier: Apache-2.0
"""The probe of a store whose SSD, or whose oplog, can't be written."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mooncake.doctor import store_probe
from mooncake.doctor.facts import StoreFacts
from mooncake.doctor.store_probe import StoreProbe
from mooncake.store import messages as m
from mooncake.store.settings import MasterSettings
from tests.store.running import running_with_ssd


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[str]:
    """Address of a master that has an oplog and a node with an SSD."""
    (folder / "log").mkdir()
    settings = MasterSettings(port=0, oplog=str(folder / "log" / "oplog"), heartbeat_s=0.2)
    async with running_with_ssd(settings, folder) as server:
        yield f"127.0.0.1:{server.port}"


async def read(address: str) -> tuple[StoreFacts, int]:
    """What a probe finds, and how many objects it leaves."""

    def probe() -> tuple[StoreFacts, int]:
        opened = StoreProbe(address, 10.0)
        try:
            facts = opened.read()
            assert opened._store is not None
            return facts, opened._store.ask(m.GetMasterStatus()).num_objects
        finally:
            opened.close()

    return await asyncio.to_thread(probe)


async def test_an_ssd_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as address:
        facts, num_left = await read(address)
        assert facts.is_read_back and not facts.ssd_failures and not facts.ssd_delays and not num_left
        shutil.rmtree(tmp_path / "ssd")
        monkeypatch.setattr(store_probe, "DURABLE_S", 1.0)
        facts, num_left = await read(address)
        assert facts.is_read_back and not num_left
        assert list(facts.ssd_failures) == ["n/ssd"]
        assert str(tmp_path / "ssd") in facts.ssd_failures["n/ssd"]
        assert "given up: storage_error" in facts.ssd_failures["n/ssd"]


async def test_an_oplog_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    async with running(tmp_path) as address:
        shutil.rmtree(tmp_path / "log")
        for _ in range(2):  # the master raises at first, and then refuses
            facts, _ = await read(address)
            assert facts.put_refusal_code == "storage_error" and "oplog" in facts.put_refusal
            assert facts.is_read_back is None and not facts.ssd_failures
