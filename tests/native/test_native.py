# SPDX-License-Identifier: Apache-2.0
"""Builds the tests below Python without sanitizers and runs them; ``scripts/sanitize`` runs them with."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = ("test_pieces", "test_native", "test_media")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on the path")
@pytest.mark.skipif("MOONCAKE_NATIVE_TESTED" in os.environ, reason="scripts/sanitize has run these tests")
def test_native() -> None:
    folder = ROOT / "build" / "native-tests"  # kept, so that only what changed is compiled again
    for step in (
        # Not optimised: that is compiled twice as fast, and the extension that all other tests use is.
        [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(folder),
            "-DMOONCAKE_NATIVE_TESTS=ON",
            "-DCMAKE_BUILD_TYPE=Debug",
        ],
        ["cmake", "--build", str(folder), "--parallel", "2", "--target", *TESTS],
        [str(folder / "test_pieces"), "1", "30"],
        [str(folder / "test_native"), "1", "100"],
        [str(folder / "test_media"), "1", "100"],
    ):
        done = subprocess.run(step, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "all passed" in done.stdout
