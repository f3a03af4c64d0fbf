# SPDX-License-Identifier: Apache-2.0
"""Tests with a real Ray run in the environment of ``scripts/test-ray``; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util

import pytest

# Found by its cluster's module: a folder of this name is no package.
HAS_RAY = importlib.util.find_spec("ray") is not None and importlib.util.find_spec("ray.cluster_utils")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_RAY:
        return
    mark = pytest.mark.skip(
        reason="NOT RUN: Ray is not in this environment; scripts/test-ray installs it and runs these"
    )
    for item in items:
        if "tests/ray/" in str(item.path):
            item.add_marker(mark)
