# SPDX-License-Identifier: Apache-2.0
"""Each cause of a miss is produced on a live cluster and named by ``explain``; so is every rejection.

One cluster with two small prefill caches and a small pool serves all tests of this module; each uses prompts
of its own.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mooncake.prefix import block_hashes, root_hash
from mooncake.store import Store, StoreSettings
from mooncake.transfer import TransferEngine, TransferSettings
from tests.cluster import Answer, Cluster, running_cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

BLOCK_TOKENS = 32
_starts = itertools.count(1000, 400)


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """A cluster whose workers each have room for 28 blocks of 32 tokens, and the pool for about as many."""
    flags = ("--prefill", "2", "--decode", "1", "--kv-cache-size", "40MiB", "--pool-size", "48MiB")
    settings = {
        "MOONCAKE_CONDUCTOR_ADMISSION": "early",
        "MOONCAKE_CONDUCTOR_AUDIT_SHARE": "0",
        "MOONCAKE_CONDUCTOR_SLOW_START_S": "0",
    }
    with running_cluster(*flags, environment=settings) as cluster:
        cluster.wait_until_routable()
        # Nothing is rejected before prompts and steps were measured: make some.
        for _ in range(10):
            assert cluster.complete(fresh(200), 4, min_tokens=4).status == 200
        yield cluster


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    small.wait_until_routable()
    return small


def fresh(num_tokens: int = 128) -> list[int]:
    """A prompt that was never sent before."""
    first = next(_starts)
    return [first + number % 397 for number in range(num_tokens)]


def explained(cluster: Cluster, name: str) -> dict[str, Any]:
    """The explanation of a request that has ended."""

    def found() -> dict[str, Any]:
        answer = cluster.get(f"/v1/requests/{name}/explain")
        assert answer.status == 200, answer.body
        [prompt] = answer.body["prompts"]
        return dict(prompt) if prompt["state"] in ("finished", "refused") else {}

    return wait_for(found, "the request's end to be reported", 20.0)


def ask(cluster: Cluster, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Send a prompt; the explanation once it is answered."""
    answer = cluster.complete(prompt, 2, min_tokens=2, **more)
    assert answer.status == 200, answer.body
    return explained(cluster, answer.body["id"])


def verdicts(found: dict[str, Any]) -> dict[str, int]:
    """Number of blocks by verdict."""
    counts: dict[str, int] = {}
    for row in found["blocks"]:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + row["num"]
    return counts


def row_of(found: dict[str, Any], verdict: str) -> dict[str, Any]:
    return next(dict(row) for row in found["blocks"] if row["verdict"] == verdict)


def prefills_of(found: dict[str, Any]) -> str:
    return str(found["prefill"])


def test_never_stored_then_hit_with_what_was_predicted_and_measured(cluster: Cluster) -> None:
    prompt = fresh()
    first = ask(cluster, prompt)
    assert verdicts(first) == {"never_stored": 4}
    second = wait_for(lambda: _if_hit(ask(cluster, prompt)), "the events to come in", 20.0)
    assert verdicts(second) == {"hit": 4}
    assert second["actual"]["cached_tokens"] + second["actual"]["loaded_tokens"] == 128
    where = row_of(second, "hit")["where"]
    assert where in (f"{prefills_of(second)} device", "pool")
    for found in (first, second):
        assert found["candidates"] and found["prediction"]["ttft_s"] > 0
        assert found["actual"]["ttft_s"] > 0 and found["actual"]["prefill_s"] > 0
        assert found["admission"]["rule"] == "early" and found["admission"]["is_admitted"]


def _if_hit(found: dict[str, Any]) -> dict[str, Any]:
    return found if "hit" in verdicts(found) else {}


def test_another_salt(cluster: Cluster) -> None:
    prompt = fresh()
    ask(cluster, prompt)
    assert verdicts(ask(cluster, prompt, cache_salt="mine")) == {"other_salt": 4}
    assert verdicts(ask(cluster, prompt, cache_salt="theirs")) == {"other_salt": 4}
    assert verdicts(ask(cluster, fresh(), cache_salt="mine")) == {"never_stored": 4}


def test_another_digest(cluster: Cluster) -> None:
    """The pool has objects for the same tokens by other weights."""
    prompt = fresh()
    transfer = TransferEngine(TransferSettings(listen_host="127.0.0.1"))
    store = Store(cluster.address("master"), transfer, StoreSettings())
    try:
        for block in block_hashes(prompt, BLOCK_TOKENS, root_hash()):
            store.put(f"kv/0123456789abcdef/{block.hex()}", b"numbers of other weights")
        found = wait_for(lambda: _if_other_digest(cluster, prompt), "the store's events to come in", 20.0)
    finally:
        store.close()
        transfer.close()
    assert row_of(found, "other_digest")["where"].split(", ").count("0123456789abcdef") == 1


def _if_other_digest(cluster: Cluster, prompt: list[int]) -> dict[str, Any]:

    found = ask(cluster, prompt)
    return found if "other_digest" in verdicts(found) else {}


def test_a_second_request_for_a_prompt_that_is_computed(cluster: Cluster) -> None:
    """It waits for the first one's blocks, or is computed elsewhere while they are written.

    Which of them the worker gets first is open: the one placed second may be computed, and the other one hit.
    """
    prompt = fresh(600)
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: answers.append(cluster.complete(prompt, 2, min_tokens=2)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    found = [explained(cluster, answer.body["id"]) for answer in answers]
    counts = sorted((verdicts(one) for one in found), key=lambda one: "never_stored" not in one)
    computed = next(one for one in counts if one in ({"never_stored": 18}, {"being_written": 18}))
    counts.remove(computed)
    expected = {"being_written", "hit"} if "never_stored" in computed else {"hit"}
    assert {*counts[0]} <= expected and sum(counts[0].values()) == 18


def test_evicted_when_and_by_which_rule(cluster: Cluster) -> None:
    prompt = fresh()
    ask(cluster, prompt)
    # 192 blocks, more than both workers and the pool hold; two at a time, so that neither worker is left out.
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            list(pool.map(lambda one: ask(cluster, one), [fresh(400), fresh(400)]))
    found = ask(cluster, prompt)
    assert verdicts(found).get("evicted", 0) > 0, found["blocks"]
    row = row_of(found, "evicted")
    assert row["seconds_before"] > 0
    assert row["rule"] or row["where"].startswith("pool"), row


def test_lost_with_its_instance(cluster: Cluster) -> None:
    prompts = [fresh() for _ in range(4)]
    for prompt in prompts:
        ask(cluster, prompt)
    roles = ("node", "prefill-0", "prefill-1", "decode-0")  # the pool's memory, too
    pids = {role: cluster.kill(role) for role in roles}
    for role, pid in pids.items():
        cluster.wait_until_restarted(role, pid)
    cluster.wait_until_routable()
    answers = [ask(cluster, prompt) for prompt in prompts]
    # Until the store's event has arrived, the pool is still believed to have them.
    known = [found for found in answers if "elsewhere" not in verdicts(found)]
    assert known
    for found in known:
        assert verdicts(found).keys() <= {"lost", "restarted"}, found["blocks"]


def test_every_rejection_names_the_reason_and_the_time_to_retry(cluster: Cluster) -> None:
    body = {"model": "smollm2", "prompt": fresh(600), "max_tokens": 2}
    answer = cluster.post("/v1/completions", body, {"x-slo-ttft-ms": "1"})
    assert answer.status == 429, answer.body
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.body["error"]
    assert error["code"] == "slo_ttft" and "its TTFT SLO is 0.001 s" in error["message"]
    found = explained(cluster, answer.headers["x-mooncake-id"])
    assert found["state"] == "refused"
    assert found["admission"]["reason"] == error["message"]
    assert cluster.get("/status").body["admission"]["rule"] == "early"


def test_the_command_shows_it(cluster: Cluster) -> None:
    answer = cluster.complete(fresh(), 2, min_tokens=2)
    command = [sys.executable, "-m", "mooncake", "explain", answer.body["id"], "--url", cluster.url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for word in ("admission early", "predicted", "measured", "never stored"):
        assert word in shown, shown
    as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(as_json.stdout)["id"] == answer.body["id"]
    unknown = subprocess.run(
        [*command[:4], "cmpl-unknown", *command[5:]], capture_output=True, text=True, timeout=60, check=False
    )
    assert unknown.returncode == 2 and "cmpl-unknown" in unknown.stderr
