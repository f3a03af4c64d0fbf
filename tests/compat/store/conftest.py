# SPDX-License-Identifier: Apache-2.0
"""One master for a module, and a store that contributes memory to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake.compat.store.store import MooncakeDistributedStore
from tests.compat.store.servers import SETTINGS, RunningMaster, a_store


@pytest.fixture(scope="module")
def master(request: pytest.FixtureRequest) -> Iterator[RunningMaster]:
    """A master with the ``MASTER`` settings of the test module, if it has some."""
    running = RunningMaster(getattr(request.module, "MASTER", SETTINGS))
    yield running
    running.close()


@pytest.fixture(scope="module")
def store(master: RunningMaster) -> Iterator[MooncakeDistributedStore]:
    with a_store(master) as store:
        yield store
