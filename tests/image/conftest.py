# SPDX-License-Identifier: Apache-2.0
"""Tests in containers run where ``scripts/test-image`` has built the image; elsewhere they are skipped."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("MOONCAKE_TEST_ENGINE"):
        return
    mark = pytest.mark.skip(
        reason="NOT RUN: MOONCAKE_TEST_ENGINE names no container engine; scripts/test-image builds the "
        "image and runs these"
    )
    for item in items:
        if "tests/image/" in str(item.path):
            item.add_marker(mark)
