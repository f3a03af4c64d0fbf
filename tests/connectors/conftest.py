# SPDX-License-Identifier: Apache-2.0
"""A store in a process of its own, for tests of engines that load from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.connectors import StoreConnector


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConnector]:
    running = StoreConnector()
    running.start(tmp_path_factory.mktemp("daemon"))
    yield running
    running.stop()
