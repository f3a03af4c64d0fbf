# SPDX-License-Identifier: Apache-2.0
"""A program's own SSD tier: acknowledged objects survive the program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake.store import ExistOptions, MooncakeDistributedStore, ReplicateConfig
from tests.compat.store.servers import RunningMaster, a_store
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(64 * MIB))


def durable() -> ReplicateConfig:
    config = ReplicateConfig()
    config.dfs_replica_num = 1
    return config


@pytest.mark.usefixtures("small")
def test_objects_survive_a_restart(tmp_path: Path) -> None:
    master = RunningMaster()
    value = os.urandom(300_000)
    with a_store(master, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) as store:
        assert store.put("kept", value, durable()) == 0
        kinds = [copy.is_local_disk_replica() for copy in store.get_replica_desc("kept")]
        assert sorted(kinds) == [False, True]
        with a_store(master, 0, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) as other:
            assert other.health_check() == 0
        assert sorted(os.listdir(tmp_path)) == ["client-0", "client-1"], "a folder for each process"
    with a_store(master, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) as store:
        assert store.get("kept") == value
        assert store.unmount_local_disk_segment() == 0
        assert store.unmount_local_disk_segment() == 0, "there is none now"
    master.close()


@pytest.mark.usefixtures("small")
def test_a_query_may_start_a_copy_to_memory(tmp_path: Path) -> None:
    master = RunningMaster()
    value = os.urandom(300_000)
    with a_store(master, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) as store:
        assert store.put("cold", value, durable()) == 0
        assert store.batch_replica_clear(["cold"], store.get_hostname()) == ["cold"]

        def kinds() -> list[bool]:
            return sorted(copy.is_memory_replica() for copy in store.get_replica_desc("cold"))

        options = ExistOptions()
        assert store.is_exist("cold", options) == 1 and kinds() == [False]
        options.prefetch_to_memory = True
        assert store.batch_is_exist(["cold", "none"], options) == [1, 0]
        wait_until(lambda: kinds() == [False, True])
        assert store.is_exist("cold", options) == 1 and store.get("cold") == value
        with pytest.raises(TypeError):
            options.prefetch_to_memory = "yes"
    master.close()


@pytest.mark.usefixtures("small")
def test_the_environment_enables_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_ENABLED", "1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(tmp_path / "ssd"))
    master = RunningMaster()
    with a_store(master) as store:
        assert store.put("k", b"v", durable()) == 0
    assert (tmp_path / "ssd" / "client-0").is_dir()
    master.close()


def test_without_an_ssd_nothing_is_durable(store: MooncakeDistributedStore) -> None:
    assert store.put("durable", b"v", durable()) == -200
    assert store.is_exist("durable") == 0


@pytest.mark.usefixtures("small")
def test_an_invalid_path(master: RunningMaster, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address)
    for path in (str(file), str(file / "below"), "/proc/nowhere"):
        assert store.setup(*arguments, enable_ssd_offload=True, ssd_offload_path=path) == -600
        assert path in caplog.text
        assert store.close() == 0
        caplog.clear()
    assert store.setup(*arguments) == 0
    store.close()
