"""The published connectors themselves. Their packages are not ours to keep: ``MOONCAKE_TEST_CLIENTS`` names a
folder that has them (``pip install --no-deps --target FOLDER sglang lmcache ...``); without it these skip."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.compat.servers import CALM, RunningMaster

CLIENTS = Path(__file__).with_name("real_clients.py")
FOLDER = os.environ.get("MOONCAKE_TEST_CLIENTS", "")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FOLDER, reason="MOONCAKE_TEST_CLIENTS names no folder with the clients' packages"),
]


@pytest.fixture(scope="module")
def master() -> Iterator[RunningMaster]:
    running = RunningMaster(CALM)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("transfer_queue", "transfer_queue"),
        ("vllm_omni", "vllm_omni"),
        ("sglang_embeddings", "sglang"),
        ("sglang_hicache", "sglang"),
        ("lmcache", "lmcache"),
        ("checkpoint_engine", "checkpoint_engine"),
    ],
)
def test_it_works_with_our_store(master: RunningMaster, name: str, package: str) -> None:
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
