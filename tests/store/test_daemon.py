# SPDX-License-Identifier: Apache-2.0
"""A whole store in one process: clients of the store and of gRPC on one port, old flags, invalid flags."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli import _open_host, daemon_role
from mooncake.errors import InvalidArgument
from mooncake.store import Store
from mooncake.store.daemon import LEFT_AFTER_S, DaemonSettings, remove_left_folders
from mooncake.store.messages import PutPolicy

grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra grpc)")

pytestmark = pytest.mark.processes


@contextmanager
def daemon(*flags: str) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Its address, and its master's address."""
    command = [sys.executable, "-m", "mooncake", "daemon", "--port", "0", "--no-huge-pages", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            seen += line
            found = re.search(r"ready role=daemon address=(\S+) master=(\S+)", line)
            if found:
                yield found[1], found[2], process
                break
        else:
            pytest.fail(f"it did not start: {seen}")
    finally:
        process.kill()
        process.wait(10)


def pool_status(address: str, service: str = "mooncake.MooncakeStoreService") -> Any:
    from mooncake.store.grpc_status import make_pool, message_class

    answer = message_class(make_pool(), service.rpartition(".")[0], "PoolStatus")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            f"/{service}/GetPoolStatus",
            request_serializer=lambda nothing: nothing,
            response_deserializer=answer.FromString,
        )
        return call(b"", timeout=20)


def test_one_process_is_a_whole_store(tmp_path: Path) -> None:
    flags = ["--capacity-dram", "0.064", "--capacity-nvme", "0.128", "--nvme-path", str(tmp_path / "ssd")]
    with daemon(*flags, "--name", "here") as (address, master, process), Store(address) as store:
        assert master == address
        assert store.put("key", b"value") is None
        assert store.get("key") == b"value"
        for service in ("mooncake.MooncakeStoreService", "MooncakeStoreService"):
            status = pool_status(address, service)
            assert status.num_objects == 1
        tiers = {tier.tier: tier for tier in status.tiers}
        assert tiers["memory"].capacity_bytes == 64_000_000 // 4096 * 4096
        assert tiers["ssd"].capacity_bytes == 128_000_000 // 4096 * 4096
        assert tiers["device"].capacity_bytes == 0
        assert [node.node for node in status.nodes] == ["here"]
        assert {segment.segment for segment in status.nodes[0].segments} == {"here", "here/ssd"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    with daemon(*flags, "--name", "here") as (address, _, _), Store(address) as store:
        assert (tmp_path / "ssd" / "master.oplog").exists()


def test_a_directory_made_larger_is_refused_by_the_names_of_this_program(tmp_path: Path) -> None:
    flags = ["--nvme-path", str(tmp_path), "--capacity-dram", "0.016", "--capacity-nvme"]
    with daemon(*flags, "0.064") as (_, _, process):
        command = [sys.executable, "-m", "mooncake", "daemon", "--port", "0", *flags, "0.064"]
        command += ["--oplog", str(tmp_path / "other.oplog")]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert found.returncode == 2 and "nvme_path is" in found.stderr, found.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    command[-3] = "0.032"
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "capacity_nvme is 0.032; allowed: at least" in found.stderr, found.stderr


def test_blocks_are_logged(tmp_path: Path) -> None:
    flags = ["--capacity-dram", "0.016", "--capacity-nvme", "0.064", "--nvme-path", str(tmp_path)]
    with daemon(*flags) as (address, _, process), Store(address) as store:
        assert store.put("logged", b"value", PutPolicy(is_durable=True)) is None
        with Store(address) as reader:
            assert reader.get("logged") == b"value" and reader.get("absent") is None
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        output = process.stderr.read()
        assert re.search(r"block_write .*tier=ssd", output), output
        lines = re.findall(r"block_\w+ .* peer=.*", output)
        fields = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]
        assert [line.split()[0] for line in lines] == ["block_write", "block_write", "block_read"], output
        assert all(found["key"] == "logged" and found["bytes"] == "5" for found in fields)
        assert [found["tier"] for found in fields] == ["memory", "ssd", "memory"]
        assert fields[0]["peer"] == fields[1]["peer"] != fields[2]["peer"], "the writer and the reader"
        assert "absent" not in output


def test_reflection_finds_the_service(tmp_path: Path) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    with daemon("--capacity-dram", "0.01") as (address, _, _), grpc.insecure_channel(address) as channel:
        found = ProtoReflectionDescriptorDatabase(channel)
        assert "mooncake.MooncakeStoreService" in found.get_services()
        service = DescriptorPool(found).FindServiceByName("mooncake.MooncakeStoreService")
        method = service.methods_by_name["GetPoolStatus"]
        assert not method.input_type.fields
        assert [field.name for field in method.output_type.fields][-2:] == ["tiers", "nodes"]


def test_a_daemon_joins_the_store_of_another() -> None:
    with (
        daemon("--capacity-dram", "0.01", "--name", "a") as (first, _, _),
        daemon("--capacity-dram", "0.01", "--name", "b", "--master", first) as (second, master, _),
    ):
        assert master == first != second
        assert {node.node for node in pool_status(second).nodes} == {"a", "b"}


@pytest.mark.parametrize(
    ("flags", "role"),
    [
        ("", "daemon"),
        ("--port 50051 --capacity-hbm 0 --capacity-dram 256", "daemon"),
        ("--master a:1 --capacity-dram=256", "daemon"),
        ("--nvme-path=/d --capacity-nvme 1", "daemon"),
        ("--master a:1", "node"),
        ("--master=a:1 --port 7", "node"),
        ("--pool-size 64GiB", "node"),
        ("--config f.toml", "node"),
    ],
)
def test_old_flags_mean_what_they_meant(flags: str, role: str) -> None:
    assert daemon_role(flags.split(), {}) == role


def test_other_hosts_reach_the_program_unless_an_address_is_set() -> None:
    assert _open_host(["--port", "50051"], {}) == ("--host", "0.0.0.0")
    for words, environment in (
        (["--host=127.0.0.1"], {}),
        (["--host", "::1"], {}),
        (["--config", "f.toml"], {}),
        ([], {"MOONCAKE_DAEMON_HOST": "127.0.0.1"}),
    ):
        assert _open_host(words, environment) == ()


def test_the_environment_of_a_node_is_read() -> None:
    assert daemon_role([], {"MOONCAKE_NODE_MASTER": "a:1"}) == "node"
    assert daemon_role(["--capacity-dram=1"], {"MOONCAKE_NODE_MASTER": "a:1"}) == "daemon"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--capacity-dram 0", "capacity_dram"),
        ("--capacity-dram -1", "capacity_dram"),
        ("--capacity-dram lots", "capacity_dram"),
        ("--capacity-dram 0.000001", "at least"),
        ("--capacity-dram 99999", "capacity_dram is 99999.0; allowed: at most "),
        ("--capacity-nvme 1", "nvme_path"),
        ("--nvme-path /tmp", "capacity_nvme"),
        ("--nvme-path /proc/nothing --capacity-nvme 1", "nvme_path"),
        ("--port 70000", "port"),
        ("--capasity-dram 1", "--capacity-dram"),
        ("--capacity-dram 0.01 --host 203.0.113.9 --insecure", "--host"),
        ("--capacity-dram 0.01 --host 0.0.0.0", "--insecure"),
    ],
)
def test_an_error_is_one_line(flags: str, why: str) -> None:
    command = [sys.executable, "-m", "mooncake", "daemon", *flags.split()]
    command += [] if "--port" in flags else ["--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2, found.stderr
    assert why in found.stderr and "Traceback" not in found.stderr
    assert "ready" not in found.stderr or "nvme" in flags, "a master that serves already"


def test_folders_of_daemons_that_were_killed_are_removed(tmp_path: Path) -> None:
    def left(name: str, *, listens: bool = False, binds: bool = True) -> socket.socket:
        folder = tmp_path / name
        folder.mkdir()
        listener = socket.socket(socket.AF_UNIX)
        if binds:
            listener.bind(str(folder / "grpc"))
        if listens:
            listener.listen()
        else:
            listener.close()
        return listener

    left("mooncaked-killed")
    left("mooncaked-early", binds=False)
    left("another-killed")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mooncaked-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "mooncaked-file").touch()
    with left("mooncaked-alive", listens=True):
        now = (tmp_path / "mooncaked-killed").stat().st_mtime
        before = sorted(one.name for one in tmp_path.iterdir())
        remove_left_folders(tmp_path, now + LEFT_AFTER_S / 2)
        assert sorted(one.name for one in tmp_path.iterdir()) == before, "one that starts has no listener yet"
        remove_left_folders(tmp_path, now + LEFT_AFTER_S * 2)
        after = {one.name for one in tmp_path.iterdir()}
        assert set(before) - after == {"mooncaked-killed", "mooncaked-early"}


def test_half_an_ssd_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="capacity_nvme"):
        DaemonSettings(nvme_path="/d")
