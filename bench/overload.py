# SPDX-License-Identifier: Apache-2.0
"""Admission rules in an overload from a cold start: a trace faster than a real cluster can serve it.

Command: ``python -m bench.overload --trace FILE``. For each round and rule it starts a new cluster with one
prefill and one decode worker (``mooncake up``), sends one request, and replays the trace's first rows with
lengths divided by 128. Objectives are sent along. *good*: complete within both objectives, where TBT is the
mean of the longest tenth of a request's intervals. The rules take turns, the first one changes from round to
round, so that a machine that becomes slower is to the disadvantage of each. *late*: answered, but not good.

``--simulated`` runs the first rows of several traces (``--trace`` more than once) in the simulator instead,
on such a small cluster, with prefill or decode as the bottleneck, two pairs of objectives and three speeds:
the result does not depend on the machine.

What it can't show: more than one instance of a kind, a network, a GPU. The machine's speed drifts within
minutes, which moves the number of good requests by 10 % and more: compare sums of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.report import Result, Table, measured, not_run, options
from mooncake.cli.replay.endpoint import Endpoint
from mooncake.cli.replay.replay import Replay, TracePrompts
from mooncake.cli.simulation.options import requests_of
from mooncake.conductor.prediction import DecodeModel, PrefillModel
from mooncake.sim.serving import ClusterSpec, simulate
from mooncake.sim.serving.node_costs import NodeCosts, load_costs
from mooncake.sim.serving.results import DONE, RunResults
from mooncake.sim.traces.trace import TraceOptions
from tests.cluster import Cluster, running_cluster

RULES = ("goodput", "early")
FLAGS = ("--prefill", "1", "--decode", "1", "--num-threads", "1")
DIVIDE_LENGTHS = 128
SLO_TTFT_S, SLO_TBT_S = 3.0, 0.3

# Of the simulated ones: how many times as slow prefill and decode are, times the load that prefill can take,
# and objectives in seconds.
SLOWNESS = ((1.0, 1.0), (1.0, 0.3), (0.4, 1.0))
LOADS = (1.3, 2.0, 3.0)
OBJECTIVES = ((3.0, 0.3), (2.0, 0.15))
MEAN_PROMPT = 80
"""Tokens to which lengths are divided, by a power of two: ids stand for blocks of 512 tokens."""


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
                    outcome = replayed(cluster, given.trace[0], num_rows, speedup)
                good[rule] = add(table, number + 1, speedup, rule, outcome)
                sums[rule] += good[rule]
            first = given.rules[0]
            num_at_least += all(good[first] >= one for one in good.values())
        shown = ", ".join(f"{rule} {count}" for rule, count in sums.items())
        result.note(
            f"speed {speedup:g}: good requests of {num_rounds} rounds: {shown}; "
            f"{given.rules[0]} has the most in {num_at_least}"
        )


def small_costs(prefill: float, decode: float) -> NodeCosts:
    """Costs like those of the live cluster's workers, times these factors."""
    return msgspec.structs.replace(
        load_costs("llama3-70b-8xA800"),
        title="a small model on one core",
        source="bench/overload.py",
        kv_bytes_per_token=46_080,
        num_layers=30,
        prefill=PrefillModel(0.01 * prefill, 1e-3 * prefill, 4e-7 * prefill),
        decode=DecodeModel(0.02 * decode, 0.004 * decode, 1e-6 * decode),
        device_tokens=20_000,
        cache_tokens=40_000,
        nic_bytes_per_s=2e9,
        nic_latency_s=0.002,
        decode_makes_first_token=True,
    )


def compare_simulated(result: Result, given: argparse.Namespace, num_rows: int) -> None:
    table = result.table(
        "trace",
        "prefill, decode",
        ("load", 1),
        "objectives",
        *((f"good with {rule}, %", 1) for rule in given.rules),
        title=f"The first {num_rows} requests of traces, 1P1D, simulated",
    )
    found: list[list[float]] = []
    for trace in given.trace:
        mean = np.mean([row.num_input for row in requests_of(trace, TraceOptions(num_rows=num_rows))])
        divide = 1 << max(0, round(math.log2(float(mean) / MEAN_PROMPT)))
        requests = requests_of(trace, TraceOptions(num_rows=num_rows, divide_lengths=divide))
        rows = list(requests)
        for slowness, load, objectives in itertools.product(SLOWNESS, LOADS, OBJECTIVES):
            costs = small_costs(*slowness)
            work_s = sum(costs.prefill.seconds(0, row.num_input) for row in rows)
            speedup = load * (rows[-1].timestamp_s - rows[0].timestamp_s) / work_s
            cluster = ClusterSpec(
                costs=costs, num_prefill=1, num_decode=1, block_tokens=requests.block_tokens
            )
            good = []
            for rule in given.rules:
                outcome = simulate(
                    rows,
                    cluster,
                    "overlap",
                    rule,
                    speedup=speedup,
                    slo_ttft_s=objectives[0],
                    slo_tbt_s=objectives[1],
                )
                good.append(100.0 * outcome.summary().num_good / len(rows))
            named = f"{objectives[0]:g} s, {objectives[1] * 1000:g} ms"
            table.add(Path(trace).name, f"{slowness[0]:g}, {slowness[1]:g}", load, named, *good)
            found.append(good)
    means = ", ".join(
        f"{rule} {np.mean(column):.2f} %"
        for rule, column in zip(given.rules, zip(*found, strict=True), strict=True)
    )
    first = given.rules[0]
    behind = [max(good[1:]) - good[0] for good in found if max(good[1:]) - good[0] > 0.5]
    result.note(
        f"good requests, mean of {len(found)}: {means}; {first} is more than half a point behind another in "
        f"{len(behind)}, by {max(behind, default=0.0):.1f} points at most"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "bench.overload")
    parser.add_argument("--trace", action="append", help="a trace file: conversation_trace.jsonl")
    parser.add_argument("--simulated", action="store_true", help="in the simulator, all traces")
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=250)
    parser.add_argument("--speed", nargs="+", type=float, default=[5.0], help="times the trace's own speed")
    given = parser.parse_args(arguments)
    traces = given.trace or []
    if not traces or not all(Path(one).is_file() for one in traces):
        not_run(f"--trace {', '.join(traces)}: no such file" if traces else "it needs --trace FILE")
    words = [word for one in traces for word in ("--trace", Path(one).name)]
    words += ["--rules", *given.rules] if tuple(given.rules) != RULES else []
    words += ["--simulated"] if given.simulated else ["--speed", *(f"{one:g}" for one in given.speed)]
    command = " ".join(["python -m bench.overload", *words])
    with measured("overload-simulated" if given.simulated else "overload", given, command) as result:
        if given.simulated:
            compare_simulated(result, given, 25 if given.quick else given.rows)
        else:
            compare(result, given, 25 if given.quick else given.rows, 1 if given.quick else given.rounds)
        result.note("can't show: more than one instance of a kind, a network, a GPU")


if __name__ == "__main__":
    main()
