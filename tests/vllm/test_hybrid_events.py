# SPDX-License-Identifier: Apache-2.0
"""Real vLLM with a hybrid model: it has cached what the index claims from its KV events."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conductor.test_cache_groups import compare
from tests.vllm_server import QUIET

PROGRAM = Path(__file__).parent / "hybrid_events.py"


@pytest.mark.parametrize("retention", ["0", "none"])
def test_vllm_had_what_the_index_claims(tmp_path: Path, retention: str) -> None:
    recording = tmp_path / "recording"
    environ = {**os.environ, **QUIET, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(PROGRAM.parent.parent.parent)
    subprocess.run([sys.executable, PROGRAM, recording, retention], env=environ, check=True, timeout=300)
    for ours in (128, 32):
        assert compare(recording, ours) > 5
