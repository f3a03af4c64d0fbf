# SPDX-License-Identifier: Apache-2.0
"""The master's ``root_fs_dir`` as seen by drop-in stores: content survives processes, clusters are apart."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.store.settings import MasterSettings
from tests.compat.store.servers import SETTINGS, RunningMaster, a_store
from tests.waiting import wait_until

HOST = socket.gethostname()
MIB = 1 << 20


@pytest.fixture
def shared(tmp_path: Path) -> MasterSettings:
    return replace(SETTINGS, root_fs_dir=str(tmp_path), root_fs_size_bytes=64 * MIB, cluster_id="c")


@pytest.fixture
def master(shared: MasterSettings) -> Iterator[RunningMaster]:
    running = RunningMaster(shared)
    yield running
    running.close()


def durable() -> ReplicateConfig:
    config = ReplicateConfig()
    config.dfs_replica_num = 1
    return config


STORE = """
import json, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup(json.load(open(sys.argv[1]))) == 0
sys.stdin.read()
"""
CONNECTOR = """
import sys
from mooncake.connectors.session import PoolSession, PoolSettings
session = PoolSession(PoolSettings.read({}, {"MOONCAKE_CONFIG_PATH": sys.argv[1]}))
session.mount_segment()
sys.stdin.read()
"""
CONTRIBUTORS = {
    "store": ("-c", STORE, "FILE"),
    "connector": ("-c", CONNECTOR, "FILE"),
    "node": ("-m", "mooncake", "node", "--config", "FILE"),
    "client": (
        *("-m", "mooncake.compat.programs.client", "--global_segment_size=16MB", "--port=0"),
        *("--host=127.0.0.1", "--master_server_address=MASTER"),
    ),
}


@contextlib.contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of Python, killed at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *words], stdin=pipe, stderr=pipe, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.mark.processes
@pytest.mark.parametrize("kind", CONTRIBUTORS)
def test_content_survives_a_killed_process(kind: str, tmp_path: Path) -> None:
    """With the existing program's flags, and its file for those contributors that read it."""
    program = "from mooncake.compat.programs.master import main; main()"
    flags = ("--port=0", "--metrics_port=0", "--rpc_address=127.0.0.1", "--root_fs_dir", str(tmp_path))
    sizes = ("--global_file_segment_size=64MB", "--default_kv_lease_ttl=100")
    with process("-c", program, *flags, "--cluster_id", "mooncake_cluster", *sizes) as master:
        assert master.stderr is not None
        port = next(line for line in master.stderr if "Master service started" in line).split()[-1]
        address, file = f"127.0.0.1:{port}", tmp_path / "mooncake.json"
        config = {"local_hostname": "127.0.0.1", "metadata_server": "etcd://127.0.0.1:2379"}
        config |= {"master_server_address": address, "cluster_id": "", "root_fs_dir": ""}
        if kind == "store":  # one that names both, as people do; the others learn them from the master
            config |= {"cluster_id": "mooncake_cluster", "root_fs_dir": str(tmp_path)}
        file.write_text(json.dumps({**config, "global_segment_size": 16 * MIB, "local_buffer_size": MIB}))
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", address) == 0
        filled = {"FILE": str(file), "MASTER": address}
        words = [filled.get(word, word.replace("MASTER", address)) for word in CONTRIBUTORS[kind]]
        with process(*words):
            wait_until(lambda: store.put("k0", bytes(100_000), durable()) == 0, "the SSD tier")
            for number in range(1, 20):
                assert store.put(f"k{number}", bytes([number]) * 100_000, durable()) == 0
        wait_until(lambda: store.is_exist("k19") == 0, "the process's loss")
        with process(*words):
            wait_until(lambda: store.is_exist("k19") == 1, "the content's return")
            for number in range(20):
                assert store.get(f"k{number}") == bytes([number]) * 100_000
        store.close()
    assert os.listdir(tmp_path / "mooncake_cluster") == [HOST]
    assert (tmp_path / "mooncake_cluster" / HOST).stat().st_mode & 0o777 == 0o700


def test_content_survives_the_master_and_the_store(master: RunningMaster, tmp_path: Path) -> None:
    with a_store(master) as store:
        assert store.put("k", b"value", durable()) == 0
    master.stop()
    master.start()
    with a_store(master) as store:
        wait_until(lambda: store.is_exist("k") == 1, "the report of the content")
        assert store.get("k") == b"value"


def test_objects_are_read_from_it_after_memory_is_full(tmp_path: Path, shared: MasterSettings) -> None:
    """Ordinary puts are copied there, as to any SSD tier, before they leave memory."""
    master = RunningMaster(replace(shared, demote_watermark=0.0, evict_undemoted=False))
    with a_store(master, 8 * MIB) as store:

        def is_put(number: int) -> bool:
            return bool(store.put(f"k{number}", bytes([number]) * MIB) == 0)

        for number in range(24):  # three times the memory
            wait_until(functools.partial(is_put, number), "room")
        for number in range(24):
            assert store.get(f"k{number}") == bytes([number]) * MIB
    master.close()


def test_each_process_of_a_host_has_a_folder(master: RunningMaster, tmp_path: Path) -> None:
    with a_store(master) as one, a_store(master) as other:
        assert one.put("one", b"1", durable()) == other.put("other", b"2", durable()) == 0
    assert sorted(os.listdir(tmp_path / "c")) == [HOST, f"{HOST}-2"]
    with a_store(master) as one, a_store(master):
        wait_until(lambda: one.is_exist("one") == one.is_exist("other") == 1, "both contents' return")
    assert sorted(os.listdir(tmp_path / "c")) == [HOST, f"{HOST}-2"]


def test_clusters_are_apart(master: RunningMaster, shared: MasterSettings, tmp_path: Path) -> None:
    other = RunningMaster(replace(shared, cluster_id="d"))
    with a_store(master) as here, a_store(other) as there:
        assert here.put("k", b"here", durable()) == 0
        assert there.is_exist("k") == 0
        assert there.put("k", b"there", durable()) == 0
    with a_store(other) as there, a_store(master) as here:
        wait_until(lambda: here.is_exist("k") == there.is_exist("k") == 1, "both contents' return")
        assert (here.get("k"), there.get("k")) == (b"here", b"there")
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]
    other.close()


def test_a_store_s_own_directory_is_used_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: RunningMaster
) -> None:
    for folder in ("own", "variable"):
        (tmp_path / folder).mkdir()
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.address,
        "global_segment_size": "16MB",
        "root_fs_dir": str(tmp_path / "own"),
        "cluster_id": "mine",
    }
    store = MooncakeDistributedStore()
    assert store.setup(json.loads(json.dumps(config))) == 0
    assert store.put("k", b"v", durable()) == 0
    store.close()
    assert os.listdir(tmp_path / "own" / "mine") == [HOST]
    monkeypatch.setenv("MOONCAKE_ROOT_FS_DIR", str(tmp_path / "variable"))
    with a_store(master) as store:
        assert store.put("k2", b"v", durable()) == 0
    assert os.listdir(tmp_path / "variable" / "c") == [HOST], "the cluster's name comes from the master"
    assert not (tmp_path / "c").exists()


def test_a_store_may_decline(master: RunningMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_DROPIN_ACCEPT_ROOT_FS_DIR", "false")
    with a_store(master) as store:
        assert store.put("k", b"v", durable()) == -200
        assert store.put("k", b"v") == 0
    assert not os.listdir(tmp_path)


def test_a_store_without_memory_keeps_nothing(master: RunningMaster, tmp_path: Path) -> None:
    with a_store(master, 0) as store:
        assert store.health_check() == 0
    assert not os.listdir(tmp_path)


def test_an_own_ssd_tier_is_used_instead(
    master: RunningMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(64 * MIB))
    own = tmp_path / "own"
    with a_store(master, enable_ssd_offload=True, ssd_offload_path=str(own)) as store:
        assert store.put("k", b"v", durable()) == 0
    assert os.listdir(tmp_path) == ["own"]


@pytest.mark.parametrize("path", ["/proc", "/nowhere/at/all", "/dev/null"])
def test_a_directory_that_can_t_be_used(
    path: str, shared: MasterSettings, caplog: pytest.LogCaptureFixture
) -> None:
    master = RunningMaster(replace(shared, root_fs_dir=path))
    with a_store(master) as store:
        assert store.put("k", b"v") == 0 and store.get("k") == b"v"
        assert store.put("durable", b"v", durable()) == -200
    warnings = [one.getMessage() for one in caplog.records if "root_fs_dir" in one.getMessage()]
    assert len(warnings) == 2 and warnings[0] == "root_fs_dir_unusable"
    assert f"root_fs_dir is {path!r}" in warnings[1] and "start the process again" in warnings[1]
    master.close()


def test_invalid_settings_of_a_store(master: RunningMaster, caplog: pytest.LogCaptureFixture) -> None:
    config = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"}
    config["master_server_addr"] = master.address
    for wrong in ({"root_fs_dir": "relative"}, {"root_fs_dir": "/a/../b"}, {"cluster_id": "a/b"}):
        assert MooncakeDistributedStore().setup({**config, **wrong}) == -600
        assert f"{next(iter(wrong))} is" in caplog.text
        caplog.clear()
