# SPDX-License-Identifier: Apache-2.0
"""Long work shows its progress in a terminal, and nothing of it where the output is piped."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.store import Store
from tests.store.test_daemon import daemon

pytestmark = pytest.mark.processes

SIMULATED = "poisson:rate=5,requests=200,input_tokens=2000"
LONG: dict[str, tuple[tuple[str, ...], bytes]] = {
    "put": (("store", "put", "large", "FILE", "--master", "MASTER"), b"storing 4 MiB"),
    "get": (("store", "get", "known", "--master", "MASTER"), b"fetching"),
    "ls": (("store", "ls", "--tree", "--master", "MASTER"), b"counting keys"),
    "rm": (("store", "rm", "--match", "^none", "--master", "MASTER"), b"removing"),
    "verify": (("store", "verify", "--all", "--master", "MASTER"), b"verifying"),
    "drain": (("store", "drain", "here", "--master", "MASTER"), b"draining"),
    "repair": (("store", "repair", "OPLOG"), b"reading"),
    "simulate": (("simulate", SIMULATED, "--cluster", "1P1D"), b"overlap"),
    "plan": (("plan", SIMULATED, "--costs", "llama3-70b-8xH100", "--slo-ttft", "30"), b"tried"),
    "bench transfer": (("bench", "transfer", "--quick", "--path", "shm", "--largest", "64KiB"), b"..."),
}
"""Commands that may take long, with a part of what each shows while it works.

``replay``, ``calibrate`` and ``p2p get`` need other servers; they show theirs by the same library."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("long")
    (folder / "content").write_bytes(b"x" * (4 << 20))
    oplog = folder / "master.oplog"
    with daemon("--capacity-dram", "0.064", "--name", "here", "--oplog", str(oplog)) as (address, _, _):
        with Store(address) as store:
            assert store.put("known", b"content") is None
        copied = folder / "copy.oplog"
        copied.write_bytes(oplog.read_bytes())
        yield {"MASTER": address, "FILE": str(folder / "content"), "OPLOG": str(copied)}


def command(places: dict[str, str], name: str) -> list[str]:
    return [sys.executable, "-m", "mooncake", *(places.get(word, word) for word in LONG[name][0])]


@pytest.mark.parametrize("name", LONG)
def test_a_terminal_shows_progress(places: dict[str, str], name: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command(places, name), stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # the other side was closed
        pass
    finally:
        os.close(ours)
        process.wait(120)
    assert LONG[name][1] in shown, shown[-2000:]


@pytest.mark.parametrize("name", ["verify", "ls", "simulate", "plan"])
def test_a_pipe_gets_none(places: dict[str, str], name: str) -> None:
    done = subprocess.run(command(places, name), capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout and done.stdout
