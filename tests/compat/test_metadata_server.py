# SPDX-License-Identifier: Apache-2.0
"""The metadata service under the existing package's names."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from mooncake.http_metadata_server import KVBootstrapServer, KVPoll


def ask(url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, method=method), timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_it_serves_from_run_to_close() -> None:
    server = KVBootstrapServer(0, "127.0.0.1")
    assert server.poll() is KVPoll.Failed and str(server.poll()) == "KVPoll.Failed"
    thread = server.run()
    assert server.run() is thread is server.thread and thread.is_alive()
    assert server.poll() is KVPoll.Success
    url = f"http://127.0.0.1:{server.port}/metadata"
    key = "?key=mooncake/rpc_meta/a"
    for missing in ("", "?key=", "?key=%20%20"):
        for method in ("GET", "PUT", "DELETE"):
            assert ask(url + missing, method, b"v") == (400, b"metadata key is required")
    assert ask(url + key) == (404, b"metadata not found")
    for body in (b"1", b"2"):  # the second, as after a restart of its owner, replaces the first
        assert ask(url + key, "PUT", body) == (200, b"metadata updated")
        assert ask(url + key) == (200, body)
    assert ask(url + key, "DELETE") == (200, b"metadata deleted")
    assert ask(url + key, "POST", b"")[0] == 405
    with pytest.raises(OSError, match="in use"):
        KVBootstrapServer(server.port, "127.0.0.1").run()
    server.close()
    server.close()
    assert server.poll() is KVPoll.Failed and not thread.is_alive()


def test_closing_before_run() -> None:
    server = KVBootstrapServer(0)
    server.close()
    assert server.poll() is KVPoll.Failed


@pytest.mark.processes
def test_the_program() -> None:
    arguments = [sys.executable, "-m", "mooncake.http_metadata_server", "--port", "0", "--host", "127.0.0.1"]
    process = subprocess.Popen([*arguments, "--log-level", "info"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        url = next(line.split("address=")[1].strip() for line in process.stderr if "ready" in line)
        assert ask(f"{url}/metadata?key=a", "PUT", b"x")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--port 70000", "--port"),
        ("--port x", "--port"),
        ("--log-level loud", "--log-level"),
        ("--log-level critical --port 65536", "0 to 65535"),
        ("--host 203.0.113.9 --port 0", "--host"),
        ("--prot 1", "--prot"),
    ],
)
def test_bad_flags(arguments: str, why: str) -> None:
    command = [sys.executable, "-m", "mooncake.http_metadata_server", *arguments.split()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and why in found.stderr and "Traceback" not in found.stderr
