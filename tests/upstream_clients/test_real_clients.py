# SPDX-License-Identifier: Apache-2.0
"""The published connectors themselves, on our store.

Their packages cannot be distributed with this one: ``scripts/test-clients`` fetches them, without their
dependencies, and runs these tests. ``MOONCAKE_TEST_CLIENTS`` names the folder; unset, it skips them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.store.servers import LONG_LEASES, RunningMaster

CLIENTS = Path(__file__).with_name("real_clients.py")
FOLDER = os.environ.get("MOONCAKE_TEST_CLIENTS", "")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FOLDER, reason="MOONCAKE_TEST_CLIENTS names no folder with the clients' packages"),
]


@pytest.fixture(scope="module")
def master() -> Iterator[RunningMaster]:
    running = RunningMaster(LONG_LEASES)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("transfer_queue", "transfer_queue"),
        ("vllm_store", "vllm"),
        ("vllm_embeddings", "vllm"),
        ("vllm_omni", "vllm_omni"),
        ("sglang_embeddings", "sglang"),
        ("sglang_embedding_cache", "sglang"),
        ("sglang_hicache", "sglang"),
        ("sglang_direct_linker", "sglang"),
        ("sglang_transfer_engine", "sglang"),
        ("lmcache", "lmcache"),
        ("lmcache_channel", "lmcache"),
        ("checkpoint_engine", "checkpoint_engine"),
    ],
)
def test_a_connector_works_with_our_store(master: RunningMaster, name: str, package: str) -> None:
    if not Path(FOLDER, package).is_dir():
        pytest.skip(f"{FOLDER} has no {package}")
    done = subprocess.run(
        [sys.executable, str(CLIENTS), name, master.address, FOLDER],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stdout[-2000:] + done.stderr[-4000:]
