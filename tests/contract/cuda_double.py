# SPDX-License-Identifier: Apache-2.0
"""The test double of the CUDA driver, compiled when a test first needs it (``native/test_cuda_driver.cpp``).

It shows that our side of device memory is right: plans, waits, ranges, lifetimes, processes. It is no
GPU: the same suite runs on a real one as ``cuda``, and is skipped where there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "native" / "test_cuda_driver.cpp"
LIBRARY = ROOT / "build" / "cuda-double" / "libcuda_double.so"


def built() -> bool:
    """Compile the double unless that was done; False where there is no compiler."""
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > SOURCE.stat().st_mtime:
        return True
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return False
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    ours = LIBRARY.with_suffix(f".{os.getpid()}")  # two test runs may build at once
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(ours), str(SOURCE), "-lpthread"]
    subprocess.run(command, check=True, timeout=120)
    ours.replace(LIBRARY)
    return True
