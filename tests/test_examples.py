# SPDX-License-Identifier: Apache-2.0
"""The examples run as they are written."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mooncake.store.node.node import Node, NodeSettings
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False, cwd=EXAMPLES
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_transfer() -> None:
    out = run("transfer.py")
    assert "write: OK 1048576 bytes" in out
    assert "first of the last quarter: 0 = 0" in out
    assert "received: kv two layers are there" in out


@pytest.fixture
async def master() -> AsyncIterator[str]:
    """The address of a master with one node."""
    server = MasterServer(MasterSettings(port=0))
    port = await server.start()
    node = Node(NodeSettings(master=f"127.0.0.1:{port}", pool_size_bytes=8 << 20))
    await node.start()
    await asyncio.wait_for(node.mounted.wait(), 10)
    yield f"127.0.0.1:{port}"
    await node.close()
    await server.close()


@pytest.mark.processes
async def test_store(master: str) -> None:
    out = await asyncio.to_thread(run, "store.py", master)
    assert "put: stored" in out
    assert "1048576 bytes, equal: True" in out
    assert "exists: [True, False]" in out
    assert "remove: [True, True, True]" in out


@pytest.mark.processes
async def test_tensors(master: str) -> None:
    out = await asyncio.to_thread(run, "tensors.py", master)
    assert "get_into: True" in out
    assert "view: True" in out
    assert "put_tensor_with_tp: 0" in out
    assert "a third of it: True" in out
