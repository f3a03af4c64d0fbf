# SPDX-License-Identifier: Apache-2.0
"""``scripts/drains``: mixed requests while decode workers are drained, and a check of every answer.

A cluster of built-in workers (1 prefill, 2 decode) answers each request undisturbed. Then clients repeat the
requests, half of them without cached prefixes, while the busier decode worker is drained again and again with
answers in progress, leaves, and is added again. Exits 1 unless every answer is the undisturbed one, none is
an error, and no moved answer was recomputed by more than a block.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import re
import shlex
import statistics
import sys
import threading
import time
from random import Random
from typing import Any

from mooncake.cli.bench.report import describe_machine
from tests.cluster import ADMIN_KEY, Cluster, running_cluster, wait_for
from tests.kill.mixed import Request, Seen, ask, requests, verdict
from tests.kill.serving import answers

BLOCK_TOKENS = 32
"""Tokens of a block of the workers that ``mooncake up`` starts."""

WITHIN_S = 120.0
_MOVED = re.compile(r"answer_moved .*outcome=(\w+) recomputed_tokens=(\d+) gap_ms=([\d.]+)")


@dataclasses.dataclass
class Drains:
    """What happened meanwhile."""

    verdicts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    "From each drain to the worker's leave."
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recomputed_tokens: list[int] = dataclasses.field(default_factory=list)
    "Recomputed tokens by moved answer."
    gaps_ms: list[float] = dataclasses.field(default_factory=list)
    "Pauses by moved answer: from the end at one worker to the first token of the other."
    took_s: float = 0.0

    @property
    def is_good(self) -> bool:
        most = max(self.recomputed_tokens, default=0)
        return not self.wrong and set(self.verdicts) == {"equal"} and most <= BLOCK_TOKENS


class Clients:
    """Clients that repeat ``prompts``, each until ``stop``."""

    def __init__(self, url: str, prompts: list[Request], calm: list[Seen], num: int, seed: int) -> None:
        self._url, self._prompts, self._calm = url, prompts, calm
        self._random, self._lock = Random(seed), threading.Lock()
        self._numbers, self._is_over = itertools.count(), threading.Event()
        self.found = Drains()
        self._threads = [threading.Thread(target=self._run) for _ in range(num)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            with self._lock:
                number = next(self._numbers)
                salt = f"drain {number}" if self._random.random() < 0.5 else ""
            one, right = self._prompts[number % len(self._prompts)], self._calm[number % len(self._calm)]
            said = verdict(seen := ask(self._url, one, salt), right)
            with self._lock:
                self.found.verdicts[said if said in ("equal", "error") else "wrong"] += 1
                if said != "equal":
                    self.found.wrong.append(f"request {one.number} ({one.path}): {said} {seen.error}")

    def stop(self) -> Drains:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return self.found


def change(cluster: Cluster, instance: str, verb: str) -> None:
    """Drain a decode instance, or add it."""
    body = {"type": "decode", "instance": instance}
    answer = cluster.post(f"/instances/{verb}", body, {"X-API-Key": ADMIN_KEY})
    assert answer.status == 200, answer.body


def rows(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The gateway's instances by their addresses."""
    return {one["instance"]: one for one in cluster.get("/status").body["instances"]}


def busiest(cluster: Cluster) -> str:
    """Address of the decode worker with most requests; empty while there are none."""
    found = [one for one in rows(cluster).values() if one["role"] == "decode" and one["num_requests"]]
    return str(max(found, key=lambda one: int(one["num_requests"]))["instance"]) if found else ""


def drain(cluster: Cluster) -> float:
    """Drain the busiest decode worker until it leaves, and add it again; seconds that it took to leave."""
    address = wait_for(lambda: busiest(cluster), "requests at a decode worker", WITHIN_S)
    began = time.monotonic()
    change(cluster, address, "drain")
    wait_for(lambda: address not in rows(cluster), f"{address} to leave", WITHIN_S)
    seconds = time.monotonic() - began
    change(cluster, address, "add")
    wait_for(lambda: rows(cluster)[address]["health"] == "ready", f"{address} to be ready", WITHIN_S)
    return seconds


def play(
    cluster: Cluster,
    num_drains: int,
    num_clients: int,
    seed: int,
    pause_s: float = 0.0,
    num_requests: int = 40,
) -> Drains:
    """Send all requests undisturbed, then again and again during ``num_drains`` drains."""
    random = Random(seed)
    prompts = [
        dataclasses.replace(one, body={**one.body, "max_tokens": random.randrange(24, 97)})
        for one in requests(num_requests, seed, "smollm2")
    ]
    calm = answers(cluster.url, [(one, "") for one in prompts], num_clients)
    for one, right in zip(prompts, calm, strict=True):
        assert right.status == 200 and not right.cut and not right.error, (one, right)
    began, seconds = time.monotonic(), []
    clients = Clients(cluster.url, prompts, calm, num_clients, seed)
    try:
        for _ in range(num_drains):
            time.sleep(pause_s)
            seconds.append(drain(cluster))
    finally:
        found = clients.stop()
    found.took_s, found.seconds = time.monotonic() - began, seconds
    for outcome, recomputed, gap_ms in _MOVED.findall(cluster.log("gateway")):
        found.outcomes[outcome] += 1
        found.recomputed_tokens.append(int(recomputed))
        found.gaps_ms.append(float(gap_ms))
    return found


def show(found: Drains) -> None:
    def counts(counter: collections.Counter[str]) -> str:
        return ", ".join(f"{num} {name}" for name, num in sorted(counter.items()))

    print(f"{len(found.seconds)} drains in {found.took_s:.0f} s; a worker left after", end=" ")
    print(f"{statistics.median(found.seconds):.2f} s (longest {max(found.seconds):.2f} s)")
    print(f"{sum(found.verdicts.values())} answers: {counts(found.verdicts)}")
    print(f"{sum(found.outcomes.values())} moved answers: {counts(found.outcomes)}")
    if found.gaps_ms:
        tokens, gaps = found.recomputed_tokens, sorted(found.gaps_ms)
        print(
            f"recomputed: {sum(tokens)} tokens, at most {max(tokens)} of one answer (block: {BLOCK_TOKENS})"
        )
        print(f"pause of a moved answer: median {statistics.median(gaps):.0f} ms, longest {gaps[-1]:.0f} ms")
    for line in found.wrong[:20]:
        print(f"  VIOLATED {line}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/drains", description=__doc__)
    parser.add_argument("--drains", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two drains (default 2)")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default 0)")
    parser.add_argument("--kv-transfer", default="auto", help="as of `mooncake up` (default auto)")
    args = parser.parse_args()
    print(f"machine: {describe_machine()}")
    print(f"command: {shlex.join(['scripts/drains', *sys.argv[1:]])}")
    flags = ("--prefill", "1", "--decode", "2", "--kv-transfer", args.kv_transfer)
    with running_cluster(*flags) as cluster:
        cluster.wait_until_routable()
        found = play(cluster, args.drains, args.clients, args.seed, args.pause)
    show(found)
    return 0 if found.is_good and found.outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
