# SPDX-License-Identifier: Apache-2.0
"""Every process is killed once, under load: answers stay right, nothing hangs, no cleanup is needed."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest

from tests.cluster import Answer, Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

ANSWER_WITHIN_S = 120.0
PROMPTS = [
    [random.randrange(1000, 40_000) for _ in range(random.randrange(40, 160))]
    for random in map(Random, range(6))
]
"""Prompts that are repeated, so that the right answers are computed once."""


class Load:
    """Clients that send requests in a loop; every answer is kept with its prompt's number.

    Each request has a salt of its own, so that none of its blocks is cached.
    """

    def __init__(self, cluster: Cluster, num_clients: int, seed: int) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._cluster = cluster
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(Random(seed + number),)) for number in range(num_clients)
        ]

    def _ask(self, random: Random) -> None:
        while not self._stop.is_set():
            number = random.randrange(len(PROMPTS))
            answer = self._cluster.request(
                "POST",
                "/v1/completions",
                {
                    "model": "smollm2",
                    "prompt": PROMPTS[number],
                    "cache_salt": f"{random.random()}",
                    "max_tokens": 24,
                    "min_tokens": 24,
                    "temperature": 0,
                    "return_token_ids": True,
                },
                timeout_s=ANSWER_WITHIN_S,
            )
            self.answers.append((number, answer))

    def wait_for_more(self, num_answers: int) -> None:
        wanted = len(self.answers) + num_answers
        wait_for(lambda: len(self.answers) >= wanted, f"{num_answers} more answers", ANSWER_WITHIN_S)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_WITHIN_S)
            assert not thread.is_alive(), "a request hangs"


@contextmanager
def load(cluster: Cluster, seed: int, num_clients: int = 3) -> Iterator[Load]:
    clients = Load(cluster, num_clients, seed)
    clients.start()
    try:
        clients.wait_for_more(num_clients)
        yield clients
    finally:
        clients.stop()


@pytest.fixture(scope="module")
def calm(shared_cluster: Cluster) -> list[list[int]]:
    """The answers without failures, one request after the other."""
    shared_cluster.wait_until_routable()
    answers = [shared_cluster.complete(prompt, 24, min_tokens=24) for prompt in PROMPTS]
    assert all(answer.status == 200 for answer in answers), answers
    return [answer.body["choices"][0]["token_ids"] for answer in answers]


def verify(calm: list[list[int]], clients: Load) -> int:
    """Check that every answer equals the one without failures or is a proper error; count the errors."""
    num_errors = 0
    for number, answer in clients.answers:
        if answer.status != 200:
            num_errors += 1
            assert answer.status in (429, 503, 504), answer
            assert answer.body["error"]["message"], answer
            continue
        assert answer.body["choices"][0]["token_ids"] == calm[number]
    return num_errors


@pytest.mark.parametrize("role", ["prefill-0", "decode-0", "decode-1"])
def test_a_killed_worker_costs_a_retry(cluster: Cluster, calm: list[list[int]], role: str) -> None:
    with load(cluster, seed=1) as clients:
        pid = cluster.kill(role)
        clients.wait_for_more(6)
        cluster.wait_until_restarted(role, pid)
        clients.wait_for_more(3)
    cluster.wait_until_routable()
    assert verify(calm, clients) == 0, "another worker was there: no request should have failed"


def test_a_killed_daemon_costs_recomputing_and_comes_back(cluster: Cluster, calm: list[list[int]]) -> None:
    with load(cluster, seed=2) as clients:
        pid = cluster.kill("node")
        clients.wait_for_more(6)
        cluster.wait_until_restarted("node", pid)
        clients.wait_for_more(3)
    assert verify(calm, clients) == 0
    # It joined by itself: blocks computed now are put into the pool again.
    prompt, salts = list(range(2000, 2200)), itertools.count()

    def is_pooled() -> bool:
        before = saved_bytes(cluster)
        answer = cluster.complete(prompt, 1, cache_salt=f"after the daemon {next(salts)}")
        assert answer.status == 200, answer.body
        return saved_bytes(cluster) > before

    wait_for(is_pooled, "the pool to take blocks again", 60.0)


def saved_bytes(cluster: Cluster) -> float:
    """Bytes that the prefill workers have saved to the pool so far."""
    workers = [name for name in cluster.status["roles"] if name.startswith("prefill")]
    return sum(_metric(cluster, name, "mooncake_inference_kv_saved_bytes_total") for name in workers)


def _metric(cluster: Cluster, role: str, name: str) -> float:
    for line in cluster.get("/metrics", role).body.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    return 0.0


@pytest.mark.parametrize("role", ["master", "conductor", "metadata"])
def test_a_killed_control_process_disturbs_no_request(
    cluster: Cluster, calm: list[list[int]], role: str
) -> None:
    with load(cluster, seed=3) as clients:
        pid = cluster.kill(role)
        clients.wait_for_more(6)
        cluster.wait_until_restarted(role, pid)
        clients.wait_for_more(3)
    assert verify(calm, clients) == 0


def test_a_killed_gateway_is_restarted(cluster: Cluster) -> None:
    pid = cluster.kill("gateway")
    cluster.wait_until_restarted("gateway", pid)
    wait_for(lambda: cluster.complete("Hello", 2).status == 200, "an answer", ANSWER_WITHIN_S)


def test_a_stopped_worker_does_not_hold_requests_indefinitely(cluster: Cluster) -> None:
    """SIGSTOP: the connection stays up but sends nothing; probes detect this and requests go elsewhere."""
    pid = cluster.kill("decode-0", signal.SIGSTOP)
    try:
        began = time.monotonic()
        for number in range(4):
            answer = cluster.complete([100 + number] * 40, 4)
            assert answer.status == 200, answer.body
        assert time.monotonic() - began < ANSWER_WITHIN_S
    finally:
        cluster.kill("decode-0", signal.SIGCONT)
    assert cluster.pid("decode-0") == pid
    cluster.wait_until_routable()
