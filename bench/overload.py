# SPDX-License-Identifier: Apache-2.0
"""Admission rules in a live overload: a trace faster than a real cluster can serve it.

Command: ``python -m bench.overload --trace FILE``. For each round and rule it starts a new cluster with one
prefill and one decode worker (``mooncake up``), sends one request, and replays the trace's first rows with
lengths divided by 128. Objectives are sent along. *good*: complete within both objectives, where TBT is the
mean of the longest tenth of a request's intervals. The rules take turns, the first one changes from round to
round, so that a machine that becomes slower is to the disadvantage of each. *late*: answered, but not good.

What it can't show: more than one instance of a kind, a network, a GPU. The machine's speed drifts within
minutes, which moves the number of good requests by 10 % and more: compare sums of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.report import Result, Table, measured, not_run, options
from mooncake.cli.replay.endpoint import Endpoint
from mooncake.cli.replay.replay import Replay, TracePrompts
from mooncake.cli.simulation.options import requests_of
from mooncake.sim.serving.results import DONE, RunResults
from mooncake.sim.traces.trace import TraceOptions
from tests.cluster import Cluster, running_cluster

RULES = ("goodput", "early")
FLAGS = ("--prefill", "1", "--decode", "1", "--num-threads", "1")
DIVIDE_LENGTHS = 128
SLO_TTFT_S, SLO_TBT_S = 3.0, 0.3


@contextlib.contextmanager
def cluster_with(rule: str) -> Iterator[Cluster]:
    """A new cluster that has answered one request."""
    with running_cluster(*FLAGS, environment={"MOONCAKE_CONDUCTOR_ADMISSION": rule}) as cluster:
        assert cluster.complete("Hello", 1).status == 200, "the first request failed"
        yield cluster


def replayed(cluster: Cluster, trace: str, num_rows: int, speedup: float) -> RunResults:
    """One replay with objectives. Raises RuntimeError if a request failed."""
    requests = requests_of(trace, TraceOptions(num_rows=num_rows, divide_lengths=DIVIDE_LENGTHS))
    rows = list(requests)

    async def run() -> RunResults:
        async with Endpoint(cluster.url, "", "") as endpoint:
            replay = Replay(
                endpoint, TracePrompts(requests.block_tokens), speedup, (SLO_TTFT_S, SLO_TBT_S), True
            )
            outcome, observed = await replay.run(rows)
            if observed.errors:
                raise RuntimeError(f"requests failed: {dict(observed.errors)}")
            return outcome

    return asyncio.run(run())


def add(table: Table, number: int, speedup: float, rule: str, outcome: RunResults) -> int:
    """Add one row; returns the number of good requests."""
    summary = outcome.summary()
    done = outcome.status == DONE
    ttft_s, tbt_s = outcome.ttft_s[done].astype(np.float64), outcome.tbt_s[done].astype(np.float64)
    table.add(
        number,
        speedup,
        rule,
        summary.num_rejected,
        summary.num_done - summary.num_good,
        summary.num_good,
        summary.goodput_per_s,
        *(float(np.quantile(ttft_s, share)) for share in (0.5, 0.9, 0.99)),
        float(np.quantile(tbt_s, 0.9)) * 1e3,
        num_samples=len(ttft_s),
    )
    return summary.num_good


def compare(result: Result, given: argparse.Namespace, num_rows: int, num_rounds: int) -> None:
    table = result.table(
        "round",
        ("speed", 2),
        "rule",
        "rejected",
        "late",
        "good",
        ("good per s", 2),
        ("TTFT p50 s", 2),
        ("p90", 2),
        ("p99", 2),
        ("TBT p90 ms", 0),
        title=f"{num_rows} requests, 1 prefill and 1 decode worker: TTFT <= {SLO_TTFT_S:g} s, "
        f"TBT <= {SLO_TBT_S * 1000:g} ms",
    )
    for speedup in given.speed:
        sums = dict.fromkeys(given.rules, 0)
        num_at_least = 0
        for number in range(num_rounds):
            good: dict[str, int] = {}
            for rule in given.rules if number % 2 == 0 else given.rules[::-1]:
                with cluster_with(rule) as cluster:
                    outcome = replayed(cluster, given.trace, num_rows, speedup)
                good[rule] = add(table, number + 1, speedup, rule, outcome)
                sums[rule] += good[rule]
            first = given.rules[0]
            num_at_least += all(good[first] >= one for one in good.values())
        shown = ", ".join(f"{rule} {count}" for rule, count in sums.items())
        result.note(
            f"speed {speedup:g}: good requests of {num_rounds} rounds: {shown}; "
            f"{given.rules[0]} has the most in {num_at_least}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "bench.overload")
    parser.add_argument("--trace", help="a trace file: conversation_trace.jsonl")
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=250)
    parser.add_argument("--speed", nargs="+", type=float, default=[5.0], help="times the trace's own speed")
    given = parser.parse_args(arguments)
    if given.trace is None or not Path(given.trace).is_file():
        not_run(f"--trace {given.trace}: no such file")
    words = ["--trace", Path(given.trace).name, "--speed", *(f"{one:g}" for one in given.speed)]
    words += ["--rules", *given.rules] if tuple(given.rules) != RULES else []
    with measured("overload", given, " ".join(["python -m bench.overload", *words])) as result:
        compare(result, given, 25 if given.quick else given.rows, 1 if given.quick else given.rounds)
        result.note("can't show: more than one instance of a kind, a network, a GPU")


if __name__ == "__main__":
    main()
