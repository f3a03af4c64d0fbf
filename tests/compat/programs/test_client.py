# SPDX-License-Identifier: Apache-2.0
"""``mooncake_client``, and workers that find the store through it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake.compat.programs.client import main, read
from mooncake.errors import InvalidArgument
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.compat.store.servers import RunningMaster, segments_of
from tests.contract.metadata_servers import free_port

MIB = 1 << 20


@pytest.fixture
def master() -> Iterator[RunningMaster]:
    running = RunningMaster()
    yield running
    running.close()


@pytest.fixture
def client(master: RunningMaster) -> Iterator[str]:
    """The address of a ``mooncake_client`` process."""
    process, address = started(master)
    read_until("ready", process)
    yield address
    stopped(process, master)


def started(master: RunningMaster) -> tuple[subprocess.Popen[str], str]:
    """A ``mooncake_client`` process, and its address."""
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mooncake.compat.programs.client",
            "-host=127.0.0.1",
            f"--port={port}",
            "--master-server-address",
            master.address,
            "--global_segment_size",
            "8 MB",
            "--metadata_server=P2PHANDSHAKE",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ".", "MOONCAKE_DROPIN_SETUP_TIMEOUT_S": "1"},
    )
    return process, f"127.0.0.1:{port}"


def read_until(word: str, process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    output = ""
    while word not in output:
        line = process.stderr.readline()
        assert line, output
        output += line


def stopped(process: subprocess.Popen[str], master: RunningMaster) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert master.server is not None and not master.server.master.segments.mounted, "it unmounted its segment"


@pytest.mark.processes
def test_it_waits_for_a_master_that_starts_later(master: RunningMaster) -> None:
    master.stop()
    process, address = started(master)
    try:
        read_until("master_awaited", process)
        master.start()
        read_until("ready", process)
        store = MooncakeDistributedStore()
        assert store.setup_dummy(MIB, MIB, address) == 0
        store.close()
        stopped(process, master)
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.processes
def test_workers_find_the_store_through_it(client: str) -> None:
    one, other = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert one.setup_dummy(4 * MIB, MIB, client) == other.setup_dummy(0, MIB, client) == 0
    assert one.health_check() == 0
    memory = one.alloc_from_mem_pool(MIB)
    assert memory and one.alloc_from_mem_pool(4 * MIB) == 0 and other.alloc_from_mem_pool(1) == 0
    config = ReplicateConfig()
    config.preferred_segment = one.get_hostname()
    assert one.put_from("k", memory, 1000, config) == 0
    assert segments_of(one, "k") == [one.get_hostname()]
    theirs = np.ones(1000, np.uint8)
    assert other.batch_get_into(["k"], [theirs.ctypes.data], [1000]) == [1000] and not theirs.any()
    assert one.close() == other.close() == 0


def test_no_client_at_the_address() -> None:
    store = MooncakeDistributedStore()
    for address in (f"127.0.0.1:{free_port()}", "nowhere", "", ":"):
        assert store.setup_dummy(MIB, MIB, address) == -1
    with pytest.raises(TypeError, match="mem_pool_size"):
        store.setup_dummy("much", MIB, "127.0.0.1:1")  # type: ignore[arg-type]


def test_defaults_are_the_existing_ones() -> None:
    arguments = read([]).arguments
    assert (arguments.local_hostname, arguments.master_server_addr) == ("0.0.0.0", "127.0.0.1:50051")
    assert (arguments.global_segment_size, arguments.local_buffer_size, arguments.protocol) == (
        4 << 30,
        0,
        "tcp",
    )
    assert (
        read(["--nostart_offload_rpc_server", "-threads=4", "--http-port", "9400"]).arguments.client_http_port
        == 9400
    )


def test_flags_of_files_and_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flags").write_text("--host=127.0.0.1\n--use_mmap_arena_allocator\n")
    monkeypatch.setenv("FLAGS_port", "4711")
    options = read([f"--flagfile={tmp_path}/flags", "--fromenv=port", "-mmap_arena_pool_size=1073741824"])
    assert (options.arguments.local_hostname, options.port) == ("127.0.0.1", 4711)


@pytest.mark.parametrize(
    "flag",
    ["--global_segment_size=much", "--port=70000", "--port=x", "--colour=red", "--global_segment_size=-1"],
)
def test_invalid_values_name_the_flag(flag: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(flag.lstrip("-").partition("=")[0])):
        read([flag])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, output in (("--help", "--global_segment_size=4 GB"), ("-version", "mooncake_client 0.")):
        with pytest.raises(SystemExit) as stop:
            main([flag])
        assert stop.value.code == 0 and output in capsys.readouterr().out
