# SPDX-License-Identifier: Apache-2.0
"""Processes with a cluster key in their environment, and an unauthenticated client at their ports."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.errors import MooncakeError
from mooncake.rpc import BlockingClient
from mooncake.rpc.wire import PREFACE
from mooncake.store import Store
from mooncake.store import messages as m
from mooncake.transfer.handshake import HandshakeClient

pytestmark = pytest.mark.processes

PATIENCE_S = 60.0
KEY = "mooncake-key-1 cluster - c3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3Nzc3M=\n"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a member of the cluster."""
    key = tmp_path / "cluster.key"
    key.write_text(KEY)
    key.chmod(0o600)
    return {**os.environ, "MOONCAKE_SECURITY_CLUSTER_KEY_FILE": str(key)}


@contextlib.contextmanager
def started(
    *arguments: str, environment: dict[str, str] | None = None, num_files: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process; yields it and its output until it was ready."""

    def limit() -> None:
        if num_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit,
    )
    try:
        assert process.stdout is not None
        seen, deadline = "", time.monotonic() + PATIENCE_S
        while "ready" not in seen:
            assert select.select([process.stdout], [], [], deadline - time.monotonic())[0], seen
            line = process.stdout.readline()
            assert line, f"it ended: {seen}"
            seen += line
        yield process, seen
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def master_of(seen: str) -> str:
    line = seen.splitlines()[-1]
    return next(word for word in line.split() if word.startswith("address=")).removeprefix("address=")


MASTER = ("-m", "mooncake", "master", "--port", "0", "--metrics-port", "0")


def test_a_master_with_a_key_answers_no_unauthenticated_client(environment: dict[str, str]) -> None:
    """F8: without the credential, every process that reaches the port could do these things."""
    with started(*MASTER, environment=environment) as (_, line):
        address = master_of(line)
        for message in (
            m.GetMasterStatus(),
            m.ListKeys("", 10),
            m.SetQuota("bank", 1),
            m.RemoveMatching("", True),
        ):
            client = BlockingClient(address, m.REPLIES, is_patient=False)
            with pytest.raises(MooncakeError, match="not authenticated"):
                client.call(message, PATIENCE_S)
            client.close()


def test_a_program_with_the_key_in_its_environment_is_a_member(environment: dict[str, str]) -> None:
    ask = "from mooncake.store import Store; print('ready', Store({!r}).exists(['key']))"
    with started(*MASTER, environment=environment) as (_, line):
        with started("-c", ask.format(master_of(line)), environment=environment) as (_, output):
            assert output == "ready [False]\n"
        with Store(master_of(line)) as store, pytest.raises(MooncakeError, match="not authenticated"):
            store.connect()


def test_an_engine_with_a_key_gives_no_unauthenticated_client_its_keys(environment: dict[str, str]) -> None:
    """F9: a descriptor is enough to read and write memory."""
    serve = (
        "import time\n"
        "from mooncake.transfer import TransferEngine, TransferSettings\n"
        "engine = TransferEngine(TransferSettings(transports=('tcp',), handshake_port=0))\n"
        "engine.allocate(4096)\n"
        "print('ready', engine.handshake, flush=True)\n"
        "time.sleep(600)\n"
    )
    with started("-c", serve, environment=environment) as (_, line):
        client = HandshakeClient()
        with pytest.raises(MooncakeError, match="not authenticated"):
            client.describe(line.split()[1], PATIENCE_S)
        client.close()


@pytest.mark.parametrize("has_key", [False, True], ids=["without a key", "with a key"])
def test_idle_strangers_do_not_take_the_place_of_clients(environment: dict[str, str], has_key: bool) -> None:
    """F11: more connections than the process may open files, half of them with half a greeting."""
    with started(*MASTER, environment=environment if has_key else None, num_files=256) as (_, line):
        host, _, port = master_of(line).rpartition(":")
        outsiders = []
        for number in range(400):
            outsider = socket.create_connection((host, int(port)), PATIENCE_S)
            outsider.sendall(PREFACE if number % 2 else PREFACE[:5])
            outsiders.append(outsider)
        ask = (
            "from mooncake.rpc import BlockingClient\n"
            "from mooncake.store.ha.leader_search import Leads, WhoLeads\n"
            f"client = BlockingClient({master_of(line)!r}, (Leads,), is_patient=False)\n"
            "print('ready', client.call(WhoLeads(), 20).is_here)\n"
        )
        with started("-c", ask, environment=environment if has_key else None) as (_, output):
            assert output == "ready True\n"
        for outsider in outsiders:
            outsider.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("master", "--metrics-port", "0"),
        ("node", "--master", "127.0.0.1:1"),
        ("conductor",),
        ("metadata",),
        ("daemon", "--capacity-dram", "0.01"),
        ("gateway", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_role_does_not_listen_on_all_addresses_without_a_credential(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "mooncake", *arguments, "--host", "0.0.0.0", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, output = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        pytest.fail("it listens on all addresses")
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert process.returncode == 2, output
    for word in ("0.0.0.0", "--tls-cert", "--cluster-key-file", "--insecure"):
        assert word in output
    assert "Traceback" not in output


def test_it_listens_there_when_insecure_is_set() -> None:
    with started(*MASTER, "--host", "0.0.0.0", "--insecure") as (_, line):
        assert "address=0.0.0.0:" in line


def test_a_program_of_the_existing_package_listens_and_warns_once() -> None:
    arguments = ("--port=0", "--metrics_port=0", "--rpc_address=0.0.0.0")
    run = f"from mooncake.compat.programs.master import main; main({list(arguments)})"
    with started("-c", run) as (process, seen):
        assert "address=0.0.0.0:" in seen
        assert seen.count("listening_without_credential") == 1
        process.terminate()
        rest = process.communicate(timeout=PATIENCE_S)[0]
    assert "Traceback" not in rest and "listening_without_credential" not in rest
