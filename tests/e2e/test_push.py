# SPDX-License-Identifier: Apache-2.0
"""KV that is pushed from prefill to decode: answers are those of the pool, also when prefill is killed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest

from tests.cluster import Answer, Cluster, running_cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

NUM_TOKENS = 12


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000, 40_000) for _ in range(length)]


@pytest.fixture(scope="module")
def pushing_cluster() -> Iterator[Cluster]:
    flags = ("--prefill", "2", "--decode", "1", "--pool-size", "512MiB", "--kv-cache-size", "256MiB")
    with running_cluster(*flags, "--kv-transfer", "push") as cluster:
        yield cluster


@pytest.fixture
def cluster(pushing_cluster: Cluster) -> Cluster:
    pushing_cluster.wait_until_routable()
    return pushing_cluster


def complete(cluster: Cluster, prompt: list[int], salt: str, n: int = 1) -> Answer:
    answer = cluster.complete(prompt, NUM_TOKENS, min_tokens=NUM_TOKENS, cache_salt=salt, n=n)
    assert answer.status == 200, answer.body
    return answer


def tokens_of(answer: Answer) -> list[int]:
    tokens: list[int] = answer.body["choices"][0]["token_ids"]
    return tokens


def count(cluster: Cluster, role: str, outcome: str) -> float:
    """Blocks with this outcome of a push at a worker."""
    page = cluster.get("/metrics", role).body
    name = rf'mooncake_inference_push_blocks_total{{outcome="{outcome}"}}'
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.M)
    return float(found.group(1)) if found else 0.0


@pytest.mark.parametrize("length", [1, 31, 64, 700])
def test_answers_are_those_of_the_pool(cluster: Cluster, length: int) -> None:
    """Several answers to one prompt are not pushed, so that they show what the pool gives."""
    prompt = prompt_of(length, length)
    received = count(cluster, "decode-0", "received")
    pushed = complete(cluster, prompt, f"push {length}")
    assert pushed.headers["x-mooncake-kv"] == "push"
    assert count(cluster, "decode-0", "received") - received == -(-length // 32)
    pooled = complete(cluster, prompt, f"pool {length}", n=2)
    assert pooled.headers["x-mooncake-kv"] == "pool"
    assert tokens_of(pushed) == tokens_of(pooled)
    assert pushed.body["usage"] == {
        **pooled.body["usage"],
        **{name: pushed.body["usage"][name] for name in ("completion_tokens", "total_tokens")},
    }
    again = complete(cluster, [*prompt, 17], f"push {length}")
    assert len(tokens_of(again)) == NUM_TOKENS, "with a prefix that both have"


def test_the_pool_has_its_copy_and_the_reason_is_explained(cluster: Cluster) -> None:
    prompt = prompt_of(5, 200)
    answer = complete(cluster, prompt, "copy")
    found = cluster.get(f"/v1/requests/{answer.body['id']}/explain").body["prompts"][0]
    assert "KV by push" in found["reason"]
    prefill = (
        "prefill-0" if answer.headers["x-mooncake-prefill"] == cluster.address("prefill-0") else "prefill-1"
    )
    pid = cluster.kill("decode-0")
    cluster.wait_until_restarted("decode-0", pid)
    cluster.wait_until_routable()
    pid = cluster.kill(prefill)
    again = complete(cluster, prompt, "copy")
    assert tokens_of(again) == tokens_of(answer)
    assert again.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    cluster.wait_until_restarted(prefill, pid)


@pytest.mark.parametrize("moment", [0.1, 0.4, 0.8])
def test_a_prefill_worker_that_is_killed_in_the_middle(cluster: Cluster, moment: float) -> None:
    prompt = prompt_of(11, 1500)
    began = time.monotonic()
    expected = tokens_of(complete(cluster, prompt, f"whole {moment}"))
    whole_s = time.monotonic() - began
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(complete(cluster, prompt, f"killed {moment}")))
    workers = {cluster.address(name): name for name in ("prefill-0", "prefill-1")}
    asking.start()

    def busy() -> str | None:
        rows = cluster.get("/status").body["instances"]
        return next(
            (workers[row["instance"]] for row in rows if row["instance"] in workers and row["num_requests"]),
            None,
        )

    role = wait_for(busy, "a prefill worker with the request", 60) or ""
    time.sleep(moment * whole_s)  # any moment is right; these are spread over the prompt
    pid = cluster.kill(role)
    asking.join(240)
    assert not asking.is_alive(), "the request hangs"
    assert tokens_of(answers[0]) == expected
    cluster.wait_until_restarted(role, pid)
    assert tokens_of(complete(cluster, prompt, f"after {moment}")) == expected
