# SPDX-License-Identifier: Apache-2.0
"""How a connector finds the store, and what its thread leaves behind when it is closed."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from pathlib import Path

import pytest

from mooncake.connectors.session import PoolSettings, TransferThread
from mooncake.errors import InvalidArgument
from tests.connectors.held_loop import held


def test_the_extra_configuration_has_the_address_of_the_store() -> None:
    settings = PoolSettings.read({"mooncake_store_addr": "host:50051"}, {"MOONCAKE_CONFIG_PATH": "/nowhere"})
    assert (settings.master, settings.segment_bytes, settings.transports) == ("host:50051", 0, ())


def test_a_protocol_that_is_named_is_the_only_one() -> None:
    settings = PoolSettings.read({"mooncake_store_addr": "host:1", "protocol": "tcp"}, {})
    assert settings.transports == ("tcp",)


@pytest.mark.parametrize(("mode", "segment_bytes"), [("embedded", 16 << 20), ("standalone-store", 0)])
def test_the_existing_file_has_the_address_and_the_segment_size(
    tmp_path: Path, mode: str, segment_bytes: int
) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps({
            "metadata_server": "P2PHANDSHAKE", "master_server_address": "host:50051", "protocol": "tcp",
            "device_name": "", "mode": mode, "global_segment_size": "16MB", "tenant_id": "t",
            "root_fs_dir": "/mnt/x", "cluster_id": "c",
        })
    )  # fmt: skip
    settings = PoolSettings.read({}, {"MOONCAKE_CONFIG_PATH": str(file)})
    assert (settings.master, settings.segment_bytes, settings.tenant) == ("host:50051", segment_bytes, "t")
    assert (settings.root_fs_dir, settings.cluster_id) == ("/mnt/x", "c")


def test_no_address_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="mooncake_store_addr"):
        PoolSettings.read({}, {})


def test_closing_cancels_what_was_begun_and_waits_for_its_end() -> None:
    thread, has_begun, ends = TransferThread("127.0.0.1", ("shm",)), threading.Event(), list[str]()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("work")
            thread.track(last())

    async def last() -> None:
        await asyncio.sleep(0)
        ends.append("what it began in the end")

    future = thread.start(work())
    assert has_begun.wait(20.0) and not thread.has_released_memory()
    thread.close()
    assert (
        ends == ["work", "what it began in the end"] and future.cancelled() and thread.has_released_memory()
    )


def test_without_its_thread_nothing_of_it_touches_memory() -> None:
    """In a forked process, for instance, there is no thread, and nothing may wait for it."""
    thread = TransferThread("127.0.0.1", ("shm",))
    thread.loop.call_soon_threadsafe(thread.loop.stop)
    thread._thread.join(20.0)
    assert thread.has_released_memory()
    thread.loop.close()


def test_a_loop_that_is_blocked_while_it_is_closed_leaves_no_coroutine_that_never_began(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("mooncake.connectors.session.CLOSING_S", 0.01)
    thread = TransferThread("127.0.0.1", ("shm",))

    async def work() -> None:
        await asyncio.sleep(0)

    with held(thread.loop):
        thread.start(work())
        thread.close()
        assert thread.has_released_memory()
    thread._thread.join(20.0)
    assert not thread._thread.is_alive()
    thread.loop.close()
    gc.collect()
    assert not [str(one.message) for one in recwarn if "never awaited" in str(one.message)]


def test_the_engine_of_a_connector_is_set_up_as_that_of_a_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mooncake.toml"
    file.write_text('[transfer]\ntransports = ["tcp"]\nlisten_host = "127.0.0.1,127.0.0.2"\n')
    monkeypatch.setenv("MOONCAKE_CONFIG", str(file))
    monkeypatch.setenv("MOONCAKE_TRANSFER_NUM_STREAMS", "3")
    for transports, schemes in (((), {"tcp"}), (("shm", "tcp"), {"shm", "tcp"})):
        thread = TransferThread("127.0.0.1", transports)
        try:
            endpoints = thread.transfer.describe().endpoints
            assert set(endpoints) == schemes
            assert [end.rpartition(":")[0] for end in endpoints["tcp"].split(",")] == [
                "127.0.0.1",
                "127.0.0.2",
            ]
            assert thread.transfer.num_streams == 3
        finally:
            thread.close()
