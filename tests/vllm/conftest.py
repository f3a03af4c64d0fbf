# SPDX-License-Identifier: Apache-2.0
"""Tests with the real vLLM run in the environment of ``scripts/test-vllm``; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(
        reason="NOT RUN: vLLM is not in this environment; scripts/test-vllm builds one that has it"
    )
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct as a folder of safetensors."""
    return Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model"
