# SPDX-License-Identifier: Apache-2.0
"""The folder of a process in the shared directory: which one, how large, and what a master can't make it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from mooncake.errors import InvalidArgument, OutOfSpace, StorageError, Unavailable
from mooncake.store import messages as m
from mooncake.store.node import node as node_module
from mooncake.store.node import shared_directory
from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.node.shared_directory import SharedDirectory, choose, open_folder
from mooncake.store.node.ssd import Disk
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from mooncake.transfer import TransferEngine, TransferSettings
from tests.waiting import until

HOST = socket.gethostname()
MIB = 1 << 20
MOUNTED = m.Mounted(None, 0, 1.0, 1.0)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferSettings(transports=("file",))) as engine:
        yield engine


def reply(path: str, cluster_id: str = "c", size_bytes: int = 0) -> m.Mounted:
    return msgspec.structs.replace(
        MOUNTED, root_fs_dir=path, cluster_id=cluster_id, root_fs_size_bytes=size_bytes
    )


@pytest.mark.parametrize(
    ("own", "accepts", "answer", "expected"),
    [
        (("", ""), True, MOUNTED, None),
        (("", ""), True, reply("/a", size_bytes=5), SharedDirectory("/a", "c", 5)),
        (("", ""), True, reply("/a", size_bytes=-5), SharedDirectory("/a", "c", 0)),
        (("", ""), False, reply("/a"), None),
        (("", "mine"), True, reply("/a"), SharedDirectory("/a", "mine")),
        (("/b", ""), True, reply("/a"), SharedDirectory("/b", "c")),
        (("/b", "mine"), False, reply("/a"), SharedDirectory("/b", "mine")),
        (("/b", ""), False, MOUNTED, SharedDirectory("/b", "mooncake_cluster")),
        (("", ""), True, reply("/a", ""), SharedDirectory("/a", "mooncake_cluster")),
    ],
)
def test_own_settings_come_before_the_master_s(
    own: tuple[str, str], accepts: bool, answer: m.Mounted, expected: SharedDirectory | None
) -> None:
    assert choose(*own, accepts, answer) == expected


@pytest.mark.parametrize("path", ["a", "../a", "/a/../b", "/a/..", "~/a", "/a\0b", "/a\nb"])
def test_a_master_s_path_that_is_refused(path: str) -> None:
    refused = choose("", "", True, reply(path))
    assert isinstance(refused, InvalidArgument) and refused.field == "root_fs_dir"


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/a", "../../etc", "a\n", "a" * 65, "a b", ".a"])
def test_a_master_s_cluster_that_is_refused(name: str) -> None:
    refused = choose("", "", True, reply("/a", name))
    assert isinstance(refused, InvalidArgument) and refused.field == "cluster_id"
    with pytest.raises(InvalidArgument, match="cluster_id"):
        NodeSettings(cluster_id=name)
    with pytest.raises(InvalidArgument, match="cluster_id"):
        MasterSettings(cluster_id=name)


def test_masters_and_nodes_of_earlier_releases() -> None:
    """They neither send the fields nor stumble over them."""

    class OldMounted(msgspec.Struct, frozen=True, array_like=True, tag="mounted"):
        refusal: None
        num_objects: int
        heartbeat_s: float
        rest_s: float
        wants_report: bool = False
        line: int = 0
        last_id: int = 0

    new = msgspec.msgpack.encode(reply("/a"))
    assert msgspec.msgpack.decode(new, type=OldMounted) == OldMounted(None, 0, 1.0, 1.0)
    old = msgspec.msgpack.encode(OldMounted(None, 0, 1.0, 1.0))
    assert msgspec.msgpack.decode(old, type=m.Mounted) == MOUNTED


def test_processes_of_a_host_take_the_next_folder(engine: TransferEngine, tmp_path: Path) -> None:
    place = SharedDirectory(str(tmp_path), "c", 8 * MIB)
    disks = [open_folder(engine, place) for _ in range(3)]
    assert sorted(os.listdir(tmp_path / "c")) == [HOST, f"{HOST}-2", f"{HOST}-3"]
    assert len({disk.content_id for disk in disks}) == 3
    disks[1].close()
    again = open_folder(engine, place)
    assert again.content_id == disks[1].content_id, "the second folder is free, and its content is found"
    for disk in (disks[0], disks[2], again):
        disk.close()
    for folder in (tmp_path / "c", *(tmp_path / "c").iterdir()):
        assert folder.stat().st_mode & 0o777 == 0o700


class Usage(NamedTuple):
    free: int


def free(bytes_free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(bytes_free))


def test_its_size(engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than a share of what is free, and never less than before."""

    def size_of(cluster_id: str, limit: int) -> int:
        disk = open_folder(engine, SharedDirectory(str(tmp_path), cluster_id, limit))
        disk.close()
        return disk.size_bytes

    free(100 * MIB, monkeypatch)
    assert size_of("a", 0) == 90 * MIB
    assert size_of("b", 8 * MIB) == 8 * MIB
    assert size_of("c", 1 << 62) == 90 * MIB
    free(1000 * MIB, monkeypatch)
    assert size_of("a", 0) == 90 * MIB, "what is free changes; the content keeps its id"
    assert size_of("b", 16 * MIB) == 16 * MIB, "a limit that was raised"
    assert size_of("b", 4 * MIB) == 16 * MIB
    free(0, monkeypatch)
    assert [size_of(one, 0) for one in "abc"] == [90 * MIB, 16 * MIB, 90 * MIB], "full, but it has content"
    with pytest.raises(OutOfSpace, match="make room"):
        size_of("d", 0)
    with pytest.raises(OutOfSpace, match="make room"):
        size_of("e", 8 * MIB)


def test_what_other_folders_may_still_fill_is_not_free(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are sparse, so the file system counts that space as free."""
    free(100 * MIB, monkeypatch)
    place = SharedDirectory(str(tmp_path), "c")
    first, second = open_folder(engine, place), open_folder(engine, place)
    assert first.size_bytes == 90 * MIB
    assert second.size_bytes == 9 * MIB, "a share of the ten that are left"
    first.provide(0, first.size_bytes)
    free(10 * MIB, monkeypatch)
    third = open_folder(engine, place)
    assert 0 < third.size_bytes < MIB, "nine of the ten are the second one's"
    free(100 * MIB, monkeypatch)
    first.close()
    grown = open_folder(engine, SharedDirectory(str(tmp_path), "c", 1 << 40))
    # What it has allocated is its own, and the others' ten are not.
    assert grown.size_bytes // MIB == int((90 + 100 - 10) * 0.9)
    for disk in (second, third, grown):
        disk.close()


def test_a_directory_of_others_is_refused(engine: TransferEngine, tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(InvalidArgument, match="others may not write"):
        open_folder(engine, SharedDirectory(str(root), "c", MIB))
    root.chmod(0o1777)
    open_folder(engine, SharedDirectory(str(root), "c", MIB)).close()
    (root / "d").mkdir(0o700)
    (root / "d").chmod(0o770)
    with pytest.raises(InvalidArgument, match="chmod go-w"):
        open_folder(engine, SharedDirectory(str(root), "d", MIB))


def test_a_missing_directory_is_not_created(engine: TransferEngine, tmp_path: Path) -> None:
    """A file system that is not mounted must not be replaced by a folder of the disk below it."""
    missing = tmp_path / "missing"
    with pytest.raises(InvalidArgument, match=str(missing)):
        open_folder(engine, SharedDirectory(str(missing), "c", MIB))
    assert not missing.exists()


def test_a_host_name_that_is_no_folder(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("..", "", "a/b", "-x"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        with pytest.raises(InvalidArgument, match="host name"):
            open_folder(engine, SharedDirectory(str(tmp_path), "c", MIB))
    assert not os.listdir(tmp_path)


def node_of(master: MasterServer, **more: Any) -> Node:
    return Node(NodeSettings(f"127.0.0.1:{master.port}", pool_size_bytes=MIB, huge_pages=False, **more))


async def test_a_node_is_mounted_with_its_folder(tmp_path: Path) -> None:
    settings = MasterSettings(port=0, heartbeat_s=0.02, root_fs_dir=str(tmp_path), root_fs_size_bytes=8 * MIB)
    master = MasterServer(settings)
    await master.start()
    node = node_of(master, name="n")
    await node.start()
    await node.mounted.wait()
    assert sorted(node.segments) == ["n", "n/ssd"]
    assert sorted(master.master.segments.mounted) == ["n", "n/ssd"]
    for connection in master.connections:  # a master that mounts it again opens no second folder
        connection.close()
    await until(lambda: not node.mounted.is_set(), "the loss")
    await node.mounted.wait()
    assert sorted(node.segments) == ["n", "n/ssd"] and node.root_fs_dir_error is None
    await node.close()
    assert os.listdir(tmp_path / "mooncake_cluster") == [HOST]
    await master.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_file_system_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """The node goes on without it meanwhile; the tier comes, or fails, when it answers."""
    answers = threading.Event()

    def slow(*arguments: Any) -> Disk:
        answers.wait(60)
        if fails:
            raise StorageError("it is gone")
        return open_folder(*arguments)

    monkeypatch.setattr(shared_directory, "open_folder", slow)
    monkeypatch.setattr(node_module, "OPEN_S", 0.01)
    settings = MasterSettings(port=0, heartbeat_s=0.02, root_fs_dir=str(tmp_path), root_fs_size_bytes=MIB)
    master = MasterServer(settings)
    await master.start()
    node = node_of(master, name="n")
    await node.start()
    await node.mounted.wait()
    assert sorted(node.segments) == ["n"] and "root_fs_dir_slow" in caplog.text
    answers.set()
    if fails:
        await until(lambda: node.root_fs_dir_error, "the failure")
    else:
        await until(lambda: "n/ssd" in master.master.segments.mounted, "the tier")
    await node.close()
    await master.close()


async def test_a_node_that_is_closed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, has_closed = threading.Event(), threading.Event()

    class LateDisk:
        def close(self) -> None:
            has_closed.set()

    def slow(*_: Any) -> Any:
        answers.wait(60)
        return LateDisk()

    monkeypatch.setattr(shared_directory, "open_folder", slow)
    monkeypatch.setattr(node_module, "OPEN_S", 0.01)
    master = MasterServer(MasterSettings(port=0, heartbeat_s=0.02, root_fs_dir=str(tmp_path)))
    await master.start()
    node = node_of(master)
    await node.start()
    await node.mounted.wait()
    await node.close()
    answers.set()
    await until(has_closed.is_set, "the folder's release")
    await master.close()


async def test_nothing_is_mounted_while_a_node_is_closed(tmp_path: Path) -> None:
    master = MasterServer(MasterSettings(port=0, heartbeat_s=0.02))
    await master.start()
    node = node_of(master, name="n")
    await node.start()
    await node.mounted.wait()
    closing = asyncio.ensure_future(node.close())
    await asyncio.sleep(0)
    node._mounted(reply(str(tmp_path)))  # a reply that was under way
    with pytest.raises(Unavailable, match="being closed"):
        node.mount_region(node._regions[0], "more")
    await closing
    assert not node.segments and node._shared is None and not os.listdir(tmp_path)
    await master.close()


HUNG = """
import asyncio, sys, threading
from mooncake.store.node import node, shared_directory
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings

async def run():
    master = MasterServer(MasterSettings(port=0, heartbeat_s=0.02, root_fs_dir=sys.argv[1]))
    await master.start()
    settings = node.NodeSettings(f"127.0.0.1:{master.port}", pool_size_bytes=1 << 20, huge_pages=False)
    one = node.Node(settings)
    await one.start()
    await one.mounted.wait()
    await one.close()
    await master.close()

shared_directory.open_folder = lambda *arguments: threading.Event().wait()
node.OPEN_S = 0.01
asyncio.run(run())
print("ended")
"""


def test_a_file_system_that_never_answers_does_not_keep_the_process(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", HUNG, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
