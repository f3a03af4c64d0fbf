# SPDX-License-Identifier: Apache-2.0
"""Decode workers that are drained under load: every answer is the undisturbed one, and hardly recomputed.

Before that an operator moves a prompt's KV to each of them.
"""

from __future__ import annotations

import re

import pytest

from tests.cluster import ADMIN_KEY, Cluster, running_cluster
from tests.kill.drains import BLOCK_TOKENS, play

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

NUM_DRAINS = 4


def move_a_prompt(cluster: Cluster) -> None:
    prompt = list(range(1000, 1000 + 4 * BLOCK_TOKENS))
    right = cluster.complete(prompt, 4)
    assert right.status == 200, right
    for name in ("decode-0", "decode-1"):
        body = {"to": cluster.address(name), "prompt": prompt}
        assert cluster.post("/v1/kv/move", body).status == 401
        moved = cluster.post("/v1/kv/move", body, {"X-API-Key": ADMIN_KEY})
        assert moved.status == 200, moved
        found = moved.body
        blocks = [found[f"blocks_{kind}"] for kind in ("local", "loaded", "computed")]
        assert found["to"] == body["to"] and sum(blocks) == found["blocks_total"] == 4, found
        again = cluster.post("/v1/kv/move", body, {"X-API-Key": ADMIN_KEY}).body
        assert again["outcome"] == "local" and again["blocks_computed"] <= 1, again
    after = cluster.complete(prompt, 4)
    assert after.body["choices"][0]["token_ids"] == right.body["choices"][0]["token_ids"]


@pytest.mark.parametrize("kv_transfer", ["push", "pool"])
def test_no_answer_notices_a_drain(kv_transfer: str) -> None:
    flags = ("--prefill", "1", "--decode", "2", "--pool-size", "512MiB", "--kv-cache-size", "256MiB")
    with running_cluster(*flags, "--kv-transfer", kv_transfer) as cluster:
        cluster.wait_until_routable()
        move_a_prompt(cluster)
        found = play(cluster, NUM_DRAINS, num_clients=3, seed=1, num_requests=6)
        page = cluster.get("/metrics").body
    assert not found.wrong and set(found.verdicts) == {"equal"}, found.wrong
    assert sum(found.outcomes.values()) >= NUM_DRAINS, found.outcomes
    if kv_transfer == "push":
        assert found.outcomes["pushed"] >= NUM_DRAINS and max(found.recomputed_tokens) <= BLOCK_TOKENS
    else:  # a block that was just completed may not be stored yet
        assert "pushed" not in found.outcomes and min(found.recomputed_tokens) <= BLOCK_TOKENS
    num_kept = re.search(r'^mooncake_gateway_moved_tokens_total{kind="kept"} (\S+)$', page, re.M)
    assert num_kept is not None and float(num_kept.group(1)) > sum(found.recomputed_tokens)
