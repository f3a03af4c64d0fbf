# SPDX-License-Identifier: Apache-2.0
"""Our plugins, loaded by the published engines themselves; see ``test_real_clients.py`` for the folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream_clients.test_real_clients import FOLDER

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FOLDER, reason="MOONCAKE_TEST_CLIENTS names no folder with the clients' packages"),
]


@pytest.mark.parametrize(("name", "packages"), [("sglang", []), ("lmcache", ["sortedcontainers"])])
def test_a_plugin_is_loaded_and_works(name: str, packages: list[str]) -> None:
    for package in (name, *packages):
        if not Path(FOLDER, package).is_dir():
            pytest.skip(f"{FOLDER} has no {package}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.upstream_clients.real_plugins", name, FOLDER],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.endswith("done\n"), done.stdout[-2000:] + done.stderr[-4000:]
