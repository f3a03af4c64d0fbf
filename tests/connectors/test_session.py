# SPDX-License-Identifier: Apache-2.0
"""How a connector finds the store, and what its thread leaves behind when it is closed."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mooncake.compat.config_file import MooncakeConfig
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


def existing_file(folder: Path, **fields: Any) -> dict[str, str]:
    """The environment of a process with such a file."""
    file = folder / "mooncake.json"
    file.write_text(json.dumps({"master_server_address": "host:50051", "tenant_id": "t", **fields}))
    return {"MOONCAKE_CONFIG_PATH": str(file)}


def test_options_of_the_engine_replace_those_of_the_existing_file(tmp_path: Path) -> None:
    environment = existing_file(tmp_path, protocol="rdma", local_hostname="a", device_name="mlx5_0")
    unchanged = PoolSettings.read({"tenant_id": None, "protocol": ""}, environment)
    assert (unchanged.tenant, unchanged.host, unchanged.rdma_devices) == ("t", "a", ("mlx5_0",))
    extra = {"tenant_id": "team-a", "protocol": "tcp", "local_hostname": "b"}
    changed = PoolSettings.read(extra, environment)
    assert (changed.master, changed.tenant, changed.host) == ("host:50051", "team-a", "b")
    assert (changed.transports, changed.rdma_devices) == (("tcp",), ())
    assert changed.segment_bytes == unchanged.segment_bytes > 0
    only = PoolSettings.read({"protocol": "rdma"}, environment)
    assert (only.transports, only.rdma_devices) == (("rdma",), ("mlx5_0",))


def test_the_variables_of_the_existing_package_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    values = {"MASTER": "host:50051", "TENANT_ID": "team-a", "PROTOCOL": "rdma", "DEVICE": "mlx5_0"}
    values |= {"GLOBAL_SEGMENT_SIZE": "16MB", "LOCAL_HOSTNAME": "a", "ROOT_FS_DIR": "/mnt/x"}
    for name, value in values.items():
        monkeypatch.setenv(f"MOONCAKE_{name}", value)
    settings = PoolSettings.read({}, os.environ)
    assert (settings.master, settings.tenant, settings.host) == ("host:50051", "team-a", "a")
    assert (settings.segment_bytes, settings.root_fs_dir) == (16 << 20, "/mnt/x")
    assert (settings.transports[-2:], settings.rdma_devices) == (("rdma", "tcp"), ("mlx5_0",))
    changed = PoolSettings.read({"tenant_id": "team-b", "protocol": "tcp"}, os.environ)
    assert (changed.tenant, changed.transports, changed.segment_bytes) == ("team-b", ("tcp",), 16 << 20)
    alone = PoolSettings.read({"mooncake_store_addr": "other:1"}, os.environ)
    assert (alone.master, alone.tenant, alone.segment_bytes) == ("other:1", "default", 0)


def test_variables_that_are_not_set_have_the_existing_packages_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOONCAKE_MASTER", "host:50051")
    settings, existing = PoolSettings.read({}, os.environ), MooncakeConfig.load_from_env()
    assert (settings.tenant, settings.host) == (existing.tenant_id, existing.local_hostname)
    assert settings.segment_bytes == existing.global_segment_size
    assert settings.transports == ()


def test_a_file_without_an_address_takes_that_of_the_variable(tmp_path: Path) -> None:
    environment = existing_file(tmp_path, master_server_address="") | {"MOONCAKE_MASTER": "other:1"}
    settings = PoolSettings.read({}, environment)
    assert (settings.master, settings.tenant) == ("other:1", "t")


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


@pytest.mark.parametrize(("name", "devices"), [("", ()), ("mlx5_0, mlx5_1", ("mlx5_0", "mlx5_1"))])
def test_the_existing_file_may_ask_for_rdma(tmp_path: Path, name: str, devices: tuple[str, ...]) -> None:
    file = tmp_path / "mooncake.json"
    content = {"master_server_address": "host:50051", "protocol": "rdma", "device_name": name}
    file.write_text(json.dumps(content))
    settings = PoolSettings.read({}, {"MOONCAKE_CONFIG_PATH": str(file)})
    assert settings.transports.index("rdma") < settings.transports.index("tcp")
    assert settings.rdma_devices == devices


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
