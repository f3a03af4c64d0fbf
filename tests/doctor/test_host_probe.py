# SPDX-License-Identifier: Apache-2.0
"""Facts of this host, which the test can know in another way."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

from mooncake.doctor.host_probe import is_here, max_files_behind, read_host

LISTEN = """
import socket, sys
one = socket.create_server(("127.0.0.1", 0))
print(one.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_the_limit_of_the_process_behind_a_port() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (77, 77))

    with subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=limit
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        port = int(process.stdout.readline())
        assert max_files_behind(port) == 77
        process.stdin.close()
        process.wait()
    assert max_files_behind(port) is None, "nothing listens there any longer"


def test_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert max_files_behind(one.getsockname()[1]) == soft


def test_addresses_of_this_host() -> None:
    assert is_here("127.0.0.1:1") and is_here("[::1]:1") and is_here("localhost:1")
    assert not is_here("192.0.2.1:80") and not is_here("etcd://127.0.0.1:1") and not is_here("one,two")
    assert not any(map(is_here, ("a..b:1", f"{'x' * 64}:1", "no-such-host.invalid:1"))), "it has no address"


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    facts = read_host(str(tmp_path))
    assert facts.disk_bytes_per_s is not None and facts.disk_bytes_per_s > 0 and not facts.disk_problem
    assert os.listdir(tmp_path) == []
    assert facts.shared_memory_bytes is not None


def test_a_disk_that_is_not_there(tmp_path: Path) -> None:
    facts = read_host(str(tmp_path / "absent"))
    assert "can't be measured" in facts.disk_problem and facts.disk_bytes_per_s is None
