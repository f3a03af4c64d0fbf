# SPDX-License-Identifier: Apache-2.0
"""A pool with hardly any room: puts are refused, blocks are evicted, and every answer is right."""

from __future__ import annotations

import pytest

from tests.cluster import running_cluster

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]


def test_no_room_in_the_pool_costs_only_time() -> None:
    flags = ("--prefill", "1", "--decode", "1", "--pool-size", "4MiB", "--kv-cache-size", "256MiB")
    prompt = list(range(3000, 3300))
    with running_cluster(*flags) as cluster:
        answer = cluster.complete(prompt, 8, min_tokens=8)
        assert answer.status == 200, answer.body
        again = cluster.complete(prompt, 8, min_tokens=8)
        assert again.status == 200, again.body
        assert again.body["choices"][0]["token_ids"] == answer.body["choices"][0]["token_ids"]
        salted = cluster.complete(prompt, 8, min_tokens=8, cache_salt="other")
        assert salted.body["choices"][0]["token_ids"] == answer.body["choices"][0]["token_ids"]
        assert "save_refused" in cluster.log("prefill-0")
