# SPDX-License-Identifier: Apache-2.0
"""How fast the simulator is: a trace on 16 instances, and a day of a 1,000-node cluster.

``python -m bench.simulate --requests 300000`` simulates that many first requests of the day (agents'
sessions, half of the nodes prefill) and prints the time and memory per request; ``--requests 10000000`` is
the whole day. ``--trace FILE`` runs a trace file on 8 + 8 instances instead. Times are of the processor. What
is done once (making the nodes, checking their caches at the end) is no part of what a request costs.

A request costs more when sessions are long and caches are full, which takes half a million requests of the
day: so the day is extrapolated from the last quarter of those that were run. ``--nodes 60`` has a part of the
day's agents for so many nodes, and ``--cache-tokens 1500000`` caches that are full after a few thousand
requests.
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import sys
import time
from collections.abc import Iterable, Iterator

from bench.report import Table, measured, options
from mooncake.sim.serving import ClusterSpec, simulate
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.traces.generators import Agentic
from mooncake.sim.traces.trace import TraceOptions, TraceRow, read_trace

DAY_REQUESTS = 10_000_000
DAY_S = 86_400.0
DAY_NODES = 1000
TRACE_ROWS = 23_000
PROGRESS_REQUESTS = 250_000
"""Progress is printed to standard error each time so many more requests have arrived."""


def main() -> None:
    parser = options(__doc__, "bench.simulate")
    parser.add_argument("--trace", help="a trace file; by default the day of agents")
    parser.add_argument("--requests", type=int, help="number of requests of the day; 300,000 by default")
    parser.add_argument("--nodes", type=int, help="number of nodes; 1,000 by default")
    parser.add_argument(
        "--cache-tokens", type=int, help="tokens in each node's cache; by default as in the costs"
    )
    parser.add_argument("--block-tokens", type=int, default=512, help="of the day's prompts")
    parser.add_argument("--costs", default="llama3-70b-8xA800")
    parser.add_argument("--scheduling", nargs="+", default=["cache_aware"])
    given = parser.parse_args()
    num_requests = given.requests or (1000 if given.quick else 300_000)
    num_nodes = given.nodes or (20 if given.quick else DAY_NODES)
    # Nothing here has cycles worth collecting, and scanning millions of objects takes time.
    gc.disable()
    costs = load_costs(given.costs)
    with measured("simulate", given) as result:
        table = result.table(
            "scheduling",
            "requests",
            ("10^9 tokens", 2),
            ("virtual h", 2),
            ("took s", 1),
            ("of it once s", 1),
            "us/request",
            "at the end",
            ("memory GiB", 2),
            ("hit rate", 3),
            "of",
            ("all of it, min", 1),
            note="At the end: of the last quarter. All of it: what is done once, and as much for each of so "
            "many requests as at the end; not measured.",
        )
        for scheduling in given.scheduling:
            rows: Iterable[TraceRow]
            if given.trace:
                rows = read_trace(given.trace, TraceOptions())
                cluster = ClusterSpec(costs=costs)
            else:
                rows = day(num_requests, given.block_tokens, num_nodes)
                half = num_nodes // 2
                cluster = ClusterSpec(
                    costs=costs,
                    num_prefill=half,
                    num_decode=half,
                    block_tokens=given.block_tokens,
                    measure_s=60.0,
                    sample_s=60.0,
                )
            cluster = dataclasses.replace(cluster, cache_tokens=given.cache_tokens)
            measure(table, rows, cluster, scheduling, TRACE_ROWS if given.trace else DAY_REQUESTS)


def day(num_requests: int, block_tokens: int, num_nodes: int = DAY_NODES) -> Agentic:
    """As many concurrent agents as make ten million requests a day on ``DAY_NODES``; of them, those for
    ``num_nodes``."""
    gap_s = 27.0 + 5.2 * 2.02  # an answer, and the pause behind it on average
    return Agentic(
        sessions=max(1, round(DAY_REQUESTS / DAY_S * gap_s * num_nodes / DAY_NODES)),
        requests=num_requests,
        groups=50,
        jitter=0.3,
        ramp_s=1200.0,
        block_tokens=block_tokens,
    )


def peak_gib() -> float:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(
    table: Table, rows: Iterable[TraceRow], cluster: ClusterSpec, scheduling: str, whole: int
) -> None:
    began = first = time.process_time()
    samples: list[tuple[int, float]] = []  # requests that arrived, and the time until then

    def drawn() -> Iterator[TraceRow]:
        nonlocal first
        first = time.process_time()  # the nodes are there
        yield from rows

    def sampled(num_arrived: int, now: float) -> None:
        before = samples[-1][0] if samples else 0
        samples.append((num_arrived, time.process_time()))
        if num_arrived // PROGRESS_REQUESTS > before // PROGRESS_REQUESTS:
            minutes, gib = (samples[-1][1] - began) / 60, peak_gib()
            line = f"{scheduling}: {num_arrived:,} requests, {now / 3600:.2f} virtual h"
            print(f"{line}; {minutes:.1f} min of the processor, {gib:.2f} GiB", file=sys.stderr, flush=True)

    outcome = simulate(drawn(), cluster, scheduling, progress=sampled)
    # At the last sample every request is served.
    took_s, served_s = time.process_time() - began, samples[-1][1] - first
    num_requests = len(outcome)
    before, then = max((one for one in samples if one[0] <= 0.75 * num_requests), default=(0, first))
    tokens = int(outcome.num_input.sum(dtype="int64") + outcome.num_output.sum(dtype="int64"))
    virtual_s = float(outcome.arrival_s[-1])
    once_s, end_s = took_s - served_s, (samples[-1][1] - then) / (num_requests - before)
    table.add(
        scheduling,
        num_requests,
        tokens / 1e9,
        virtual_s / 3600,
        took_s,
        once_s,
        served_s / num_requests * 1e6,
        end_s * 1e6,
        peak_gib(),
        outcome.summary().hit_rate,
        whole,
        (once_s + end_s * whole) / 60,
    )


if __name__ == "__main__":
    main()
