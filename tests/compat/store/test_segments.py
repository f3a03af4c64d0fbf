# SPDX-License-Identifier: Apache-2.0
"""Segments of new memory and of files, mounted and unmounted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.compat.store import segments
from mooncake.errors import Unavailable
from mooncake.security import Identity, SecuritySettings, install_identity
from mooncake.security.keys import format_secret
from mooncake.store import MooncakeDistributedStore
from tests.compat.store.servers import RunningMaster, a_store
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def alone() -> MooncakeDistributedStore:
    return MooncakeDistributedStore()


def test_new_memory_is_mounted_and_unmounted() -> None:
    master = RunningMaster()
    with a_store(master, segment_bytes=0) as store:
        assert store.put("k", b"v") == -200, "there is no memory at all"
        outcome = store.allocate_and_mount_segment(MIB)
        assert (outcome["ret"], outcome["allocated_size"]) == (0, MIB)
        (segment_id,) = outcome["segment_ids"]
        first, second = map(int, segment_id.split("-"))
        assert 0 <= first < 1 << 64 and 0 <= second < 1 << 64
        assert store.put("k", b"v") == 0 and store.get("k") == b"v"
        assert store.unmount_and_free_segment([segment_id]) == 0
        assert store.unmount_segment([segment_id]) == -1, "it is already unmounted"
        assert (store.is_exist("k"), store.put("k", b"v")) == (0, -200)
    master.close()


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    master = RunningMaster()
    file = tmp_path / "private"
    file.write_bytes(bytes(MIB))
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe")
    with a_store(master, segment_bytes=0) as store:
        for name in ("link", "pipe"):
            assert store.mount_segment(str(tmp_path / name), MIB)["ret"] == -1
    master.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    master = RunningMaster()
    file = tmp_path / "foreign"
    file.write_bytes(bytes(MIB))
    os.chown(file, 12345, 12345)
    with a_store(master, segment_bytes=0) as store:
        assert store.mount_segment(str(file), MIB)["ret"] == -1
    master.close()


def test_a_file_becomes_a_segment(tmp_path: Path) -> None:
    master = RunningMaster()
    file = tmp_path / "segment"
    file.write_bytes(bytes(2 * MIB))
    with a_store(master, segment_bytes=0) as store:
        outcome = store.mount_segment(str(file), MIB, MIB)
        assert outcome["ret"] == 0
        value = os.urandom(100_000)
        assert store.put("k", value) == 0 and store.get("k") == value
        assert value in file.read_bytes()[MIB:]
        assert store.unmount_segment(outcome["segment_ids"]) == 0
    master.close()


def test_no_memory_is_mounted_twice(tmp_path: Path) -> None:
    """Two segments of the same memory would write over each other's objects."""
    master = RunningMaster()
    file = tmp_path / "segment"
    file.write_bytes(bytes(4 * MIB))
    (tmp_path / "other name").hardlink_to(file)
    path = str(file)
    with a_store(master, segment_bytes=0) as store, a_store(master, segment_bytes=0) as other:
        first = store.mount_segment(path, 2 * MIB)
        assert first["ret"] == 0
        assert store.mount_segment(path, 2 * MIB)["ret"] == -1
        assert store.mount_segment(path, 2 * MIB, MIB)["ret"] == -1, "they overlap"
        assert store.mount_segment(str(tmp_path / "other name"), MIB)["ret"] == -1
        assert other.mount_segment(path, MIB)["ret"] == -1
        assert other.mount_segment(path, 2 * MIB, 2 * MIB)["ret"] == 0, "another part of the file"
        assert other.mount_segment(path, 5 * MIB)["ret"] == other.mount_segment(path, 100)["ret"] == -1
        assert store.unmount_segment(first["segment_ids"]) == 0
        assert other.mount_segment(path, MIB)["ret"] == 0
    with a_store(master, segment_bytes=0) as store:
        (segment_id,) = store.mount_segment(path, 4 * MIB)["segment_ids"]
        assert store.unmount_segment([segment_id], 60) == 0
        assert store.mount_segment(path, 4 * MIB)["ret"] == -1, "its objects are still read"
        store.close()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master.address)
        assert store.setup(*arguments) == 0
        assert store.mount_segment(path, 4 * MIB)["ret"] == 0
    master.close()


def test_memory_that_another_process_has_mounted_is_refused(tmp_path: Path) -> None:
    """A child that was forked off holds nothing of its parent's, and releases nothing."""
    master = RunningMaster()
    file = tmp_path / "segment"
    file.write_bytes(bytes(MIB))
    locking = (
        "import fcntl, os, sys; from mooncake.compat.store.segments import _lock;"
        "_lock(os.open(sys.argv[1], os.O_RDWR), fcntl.F_WRLCK, 0, 4096)"
    )
    other = [sys.executable, "-c", locking, str(file)]
    with a_store(master, segment_bytes=0) as store:
        (segment_id,) = store.mount_segment(str(file), MIB)["segment_ids"]
        assert subprocess.run(other, stderr=subprocess.DEVNULL).returncode == 1
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            store.close()
            os.read(reading, 1)
            os._exit(0)
        assert subprocess.run(other, stderr=subprocess.DEVNULL).returncode == 1
        assert store.unmount_segment([segment_id]) == 0
        assert subprocess.run(other, stderr=subprocess.DEVNULL).returncode == 0
        os.write(writing, b"x")
        os.waitpid(child, 0)
    master.close()


@pytest.fixture(params=[False, True], ids=["open", "with a key"])
def of_a_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    if request.param:
        file = tmp_path / "cluster.key"
        file.touch(0o600)
        file.write_text(format_secret(b"k" * 32))
        install_identity(Identity(SecuritySettings(cluster_key_file=str(file))))
    yield
    install_identity(None)


@pytest.mark.usefixtures("of_a_cluster")
def test_a_segment_is_drained_during_its_grace_period() -> None:
    """Draining takes the role admin, except on the connection of the node that mounted the segment."""
    master = RunningMaster()
    with a_store(master, segment_bytes=0) as store:
        (leaving,) = store.allocate_and_mount_segment(MIB)["segment_ids"]
        value = os.urandom(1000)
        assert store.put("k", value) == 0
        assert store.allocate_and_mount_segment(MIB)["ret"] == 0
        assert store.unmount_segment([leaving], 60) == 0
        assert store.unmount_segment([leaving], 60) == -1
        assert store.get("k") == value
        assert store.put("l", value) == 0
        for key in ("k", "l"):
            while leaving in str(
                [c.get_memory_descriptor().buffer_descriptor for c in store.get_replica_desc(key)]
            ):
                assert store.get("k") == value
    master.close()


def test_a_segment_whose_unmount_failed_after_its_grace_period_is_unmounted_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        patched.undo()
        raise Unavailable("the node does not answer")

    monkeypatch.setattr(segments, "RETRY_S", 0.01)
    master = RunningMaster()
    with a_store(master, segment_bytes=0) as store, pytest.MonkeyPatch.context() as patched:
        (late,) = store.allocate_and_mount_segment(MIB)["segment_ids"]
        assert store._session is not None
        patched.setattr(store._session.node(), "unmount", fail)
        assert store.unmount_segment([late], 1) == 0
        wait_until(lambda: late not in store._segments)
        assert "it is tried again" in caplog.text
    master.close()


def test_a_segment_whose_unmount_failed_can_be_unmounted_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise Unavailable("the node does not answer")

    master = RunningMaster()
    with a_store(master, segment_bytes=0) as store:
        (first,) = store.allocate_and_mount_segment(MIB)["segment_ids"]
        (second,) = store.allocate_and_mount_segment(MIB)["segment_ids"]
        session = store._session
        assert session is not None
        with monkeypatch.context() as patched:
            patched.setattr(session.node(), "unmount", fail)
            assert store.unmount_segment([first, second]) == -1 and "does not answer" in caplog.text
        assert store._has_segment(first) and store._has_segment(second)
        assert store.unmount_segment([first, first, second]) == 0
        assert not store._has_segment(first) and store.unmount_segment([second]) == -1
    master.close()


@pytest.mark.parametrize("grace", ["1", 1.5, None], ids=repr)
def test_a_grace_period_of_a_wrong_type_unmounts_nothing(store: MooncakeDistributedStore, grace: Any) -> None:
    segment_ids = store.allocate_and_mount_segment(MIB)["segment_ids"]
    with pytest.raises(TypeError, match="grace_period_seconds must be int"):
        store.unmount_segment(segment_ids, grace)
    with pytest.raises(TypeError, match="grace_period_seconds must be int"):
        store.unmount_local_disk_segment(grace)
    assert store.unmount_segment(segment_ids) == 0


def test_failed_mounts_are_logged(
    store: MooncakeDistributedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = {"ret": -1, "segment_ids": []}
    short = tmp_path / "short"
    short.write_bytes(bytes(4096))
    assert store.mount_segment(str(tmp_path / "none"), MIB) == nothing
    assert store.mount_segment(str(tmp_path), MIB) == nothing
    assert store.mount_segment(str(short), MIB) == nothing
    assert store.mount_segment(str(short), 0) == nothing
    assert store.mount_segment(str(short), 4096, 1) == nothing
    for size in (0, -1, 1 << 60):
        assert store.allocate_and_mount_segment(size) == {**nothing, "allocated_size": 0}
    assert "none" in caplog.text and "at most 4096" in caplog.text
    assert store.unmount_segment(["1-2"]) == -1
    assert store.unmount_local_disk_segment() == 0, "there is none, and that is no failure"


def test_a_small_segment_is_enlarged(store: MooncakeDistributedStore) -> None:
    outcome = store.allocate_and_mount_segment(1000)
    assert outcome["ret"] == 0 and outcome["allocated_size"] == 4096
    assert store.unmount_and_free_segment(outcome["segment_ids"]) == 0


def test_before_setup(alone: MooncakeDistributedStore) -> None:
    nothing = {"ret": -1, "segment_ids": []}
    assert alone.mount_segment("/x", MIB) == nothing
    assert alone.allocate_and_mount_segment(MIB) == {**nothing, "allocated_size": 0}
    assert alone.unmount_segment(["1-2"]) == alone.unmount_and_free_segment(["1-2"]) == -1
    assert alone.unmount_local_disk_segment() == -1
