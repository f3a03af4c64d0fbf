# SPDX-License-Identifier: Apache-2.0
"""``scripts/kill-requests``: mixed requests while workers are killed at random, and a check of every answer.

A cluster of built-in workers (2 prefill, 2 decode) answers each request undisturbed, and then again, half of
them without cached prefixes, while every few seconds one worker gets SIGKILL. Exits 1 unless every answer is
the undisturbed one or a proper error.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable
from random import Random

from mooncake.cli.bench.report import describe_machine
from tests.cluster import Cluster, running_cluster, wait_for
from tests.kill.mixed import Request, Seen, ask, requests, verdict

SHOWN = 20
RESTARTED_WITHIN_S = 240.0


@dataclasses.dataclass
class Outcome:
    """Outcomes of the requests, and the workers that were killed meanwhile."""

    verdicts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    errors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    "The words of proper errors."
    killed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    took_s: float = 0.0

    def note(self, one: Request, seen: Seen, right: Seen) -> None:
        said = verdict(seen, right)
        self.verdicts[said if said in ("equal", "error") else "wrong"] += 1
        if said == "error":
            self.errors[f"{seen.status}: {seen.error}"] += 1
        elif said != "equal":
            self.wrong.append(f"request {one.number} ({one.path}, stream {one.is_streamed}): {said}")


class Killer:
    """Kills one of the ``roles`` every ``period_s`` until it is stopped."""

    def __init__(self, kill: Callable[[str], object], roles: list[str], period_s: float, seed: int) -> None:
        self._kill, self._roles, self._period_s = kill, roles, period_s
        self._random, self._stopped = Random(seed), threading.Event()
        self.killed: collections.Counter[str] = collections.Counter()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            role = self._random.choice(self._roles)
            try:
                self._kill(role)
            except (ProcessLookupError, TypeError):
                continue  # it is down already
            self.killed[role] += 1

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._thread.join()


def answers(
    url: str,
    requests_with_salt: list[tuple[Request, str]],
    num_clients: int,
    after: Callable[[Seen], None] = lambda seen: None,
) -> list[Seen]:
    """Answers to requests with their salts, sent ``num_clients`` at a time; in their order.

    Args:
        after: called between an answer and the client's next request.
    """
    todo: queue.SimpleQueue[tuple[int, Request, str]] = queue.SimpleQueue()
    for position, (one, salt) in enumerate(requests_with_salt):
        todo.put((position, one, salt))
    found = [Seen() for _ in requests_with_salt]

    def client() -> None:
        while True:
            try:
                position, one, salt = todo.get_nowait()
            except queue.Empty:
                return
            found[position] = ask(url, one, salt)
            after(found[position])

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def play(cluster: Cluster, num: int, period_s: float, seed: int, num_clients: int) -> Outcome:
    """Send all requests undisturbed, then disturbed."""
    outcome, random = Outcome(), Random(seed)
    prompts = requests(num, seed, "smollm2")
    calm = answers(cluster.url, [(one, "") for one in prompts], num_clients)
    for one, right in zip(prompts, calm, strict=True):
        assert right.status == 200 and not right.cut and not right.error, (one, right)
    salted = [(one, f"again {seed} {one.number}" if random.random() < 0.5 else "") for one in prompts]
    roles = [name for name in cluster.status["roles"] if name.startswith(("prefill", "decode"))]

    def pause(seen: Seen) -> None:
        """Wait until workers are ready, after a client got the error that none is."""
        if seen.status == 503:
            wait_for(lambda: _has_ready(cluster), "a worker that is ready", RESTARTED_WITHIN_S)

    began = time.monotonic()
    with Killer(cluster.kill, roles, period_s, seed) as killer:
        disturbed = answers(cluster.url, salted, num_clients, pause)
    outcome.took_s, outcome.killed = time.monotonic() - began, killer.killed
    for one, seen, right in zip(prompts, disturbed, calm, strict=True):
        outcome.note(one, seen, right)
    return outcome


def _has_ready(cluster: Cluster) -> bool:
    return any(one["health"] == "ready" for one in cluster.get("/status").body["instances"])


def show(outcome: Outcome) -> None:
    killed = ", ".join(f"{role} {num}" for role, num in sorted(outcome.killed.items()))
    counts = ", ".join(f"{num} {name}" for name, num in sorted(outcome.verdicts.items()))
    print(f"{sum(outcome.verdicts.values())} requests in {outcome.took_s:.0f} s: {counts}")
    print(f"{sum(outcome.killed.values())} kills: {killed}")
    for words, num in outcome.errors.most_common(SHOWN):
        print(f"  {num} x {words}")
    for line in outcome.wrong[:SHOWN]:
        print(f"  VIOLATED {line}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill-requests", description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--period", type=float, default=10.0, help="seconds between two kills (default 10)")
    parser.add_argument("--clients", type=int, default=4, help="requests at a time (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and kills (default 0)")
    args = parser.parse_args()
    print(f"machine: {describe_machine()}")
    print(f"command: {shlex.join(['scripts/kill-requests', *sys.argv[1:]])}")
    with running_cluster("--prefill", "2", "--decode", "2") as cluster:
        cluster.wait_until_routable()
        outcome = play(cluster, args.requests, args.period, args.seed, args.clients)
    show(outcome)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
