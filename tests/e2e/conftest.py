# SPDX-License-Identifier: Apache-2.0
"""End-to-end tests share one cluster, started as a user starts it; tests that kill processes restore it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster, running_cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    # Round robin, so that consecutive requests are known to land on different workers.
    memory = ("--pool-size", "512MiB", "--kv-cache-size", "256MiB")
    with running_cluster("--scheduling", "round_robin", *memory) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    shared_cluster.wait_until_routable()
    return shared_cluster
