# SPDX-License-Identifier: Apache-2.0
"""Scheduling policies and admission rules on many workloads, by the simulator.

``python -m bench.policies --traces FOLDER`` runs every policy on every workload of ``policy_workloads.py``
without admission and with the default rule, and every admission rule with the default policy on those that
are more than the machines can serve. The regret of the default is what it lacks against the best: points of
good requests, and its mean TTFT over the least one of the policies whose goodput is within a point of the
best. Without ``--traces`` the workloads of published traces are skipped. ``--drawn 100 140`` takes workloads
drawn at random instead, by their numbers (``drawn_workloads.py``). The costs are the paper's, where prefill
makes the first token; with ``--first-token-at-decode`` decode makes it, as our workers and vLLM do. Virtual
time: results do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.drawn_workloads import drawn
from bench.policy_workloads import OVERLOADS, WORKLOADS, Workload
from bench.report import Result, measured, options
from mooncake.sim.serving import ClusterSpec, simulate
from mooncake.sim.serving.node_costs import NodeCosts, load_costs
from mooncake.sim.traces.trace import TraceRow

POLICIES = ("overlap", "kvcache_centric", "cache_aware", "load", "round_robin", "random")
RULES = ("goodput", "none", "baseline", "early", "predicted")
COSTS = load_costs("llama3-70b-8xA800")
QUICK = 10


class Outcome(NamedTuple):
    good: float
    "Percent of all requests."
    ttft_s: float
    "Mean."
    tbt_ms: float
    "99th percentile."
    rejected: float
    "Percent."


def run(
    workload: Workload,
    rows: Sequence[TraceRow],
    block_tokens: int,
    policy: str,
    rule: str,
    costs: NodeCosts = COSTS,
) -> Outcome:
    cluster = ClusterSpec(
        costs=costs,
        num_prefill=workload.num_prefill,
        num_decode=workload.num_decode,
        block_tokens=block_tokens,
    )
    summary = simulate(
        rows,
        cluster,
        policy,
        rule,
        speedup=workload.speedup,
        slo_ttft_s=workload.slo_ttft_s,
        slo_tbt_s=workload.slo_tbt_s,
    ).summary()
    gc.collect()
    num_rejected = summary.num_rejected + summary.num_rejected_after_prefill
    share = 100.0 / summary.num_requests
    return Outcome(
        summary.num_good * share, summary.ttft_s.mean, summary.tbt_s.p99 * 1000, num_rejected * share
    )


def regret(outcomes: dict[str, Outcome], default: str) -> tuple[float, float]:
    """Points of good requests that the default lacks against the best, and its mean TTFT over the least."""
    most = max(one.good for one in outcomes.values())
    least_s = min(one.ttft_s for one in outcomes.values() if one.good >= most - 1.0)
    return most - outcomes[default].good, outcomes[default].ttft_s / least_s if least_s else 1.0


def compare(
    result: Result, given: argparse.Namespace, workloads: Sequence[Workload], names: Sequence[str], rule: str
) -> None:
    """One row for each workload and name, then the default's regrets. The first name is the default.

    ``names``: policies, with the admission ``rule``; or rules when that is "".
    """
    is_rule = not rule
    what = "rule" if is_rule else "policy"
    how = "without admission" if rule == "none" else f"with admission by {rule}"
    table = result.table(
        "workload",
        "half",
        what,
        ("good, %", 2),
        ("TTFT mean, s", 3),
        ("TBT p99, ms", 0),
        ("rejected, %", 1),
        title="Admission rules in overload, with overlap" if is_rule else f"Policies, {how}",
    )
    found: dict[Workload, tuple[float, float]] = {}
    for workload in workloads:
        read = workload.read(given.traces, QUICK if given.quick else 1)
        if read is None:
            where = f"is not in {given.traces}" if given.traces else "needs --traces FOLDER"
            result.note(f"skipped: {workload.name}: {workload.file} {where}")
            continue
        half = "tuned" if workload.is_tuned else "judged"
        outcomes: dict[str, Outcome] = {}
        for name in names:
            costs = msgspec.structs.replace(COSTS, decode_makes_first_token=given.first_token_at_decode)
            outcome = run(workload, *read, *(("overlap", name) if is_rule else (name, rule)), costs)
            outcomes[name] = outcome
            table.add(workload.name, half, name, *outcome, num_samples=len(read[0]))
        found[workload] = regret(outcomes, names[0])
    regrets = result.table(
        "workload",
        "half",
        ("good, points short", 2),
        *(() if is_rule else (("TTFT over the least", 2),)),
        title=f"Regret of {names[0]} against the best {what}" + ("" if is_rule else f", {how}"),
    )
    for workload, (points, ratio) in found.items():
        half = "tuned" if workload.is_tuned else "judged"
        regrets.add(workload.name, half, points, *(() if is_rule else (ratio,)))
    for is_tuned in (True, False):
        some = [one for workload, one in found.items() if workload.is_tuned is is_tuned]
        if some:
            half, short, slow = ("tuned" if is_tuned else "judged"), max(some)[0], max(one[1] for one in some)
            line = f"{half}: {len(some)} workloads, {names[0]} at most {short:.2f} points short"
            result.note(
                f"rule, {line}"
                if is_rule
                else f"policy {how}, {line}, TTFT at most {slow:.2f} times the least"
            )


def main() -> None:
    parser = options(__doc__, "bench.policies")
    parser.add_argument("--traces", type=Path, default=None, help="folder of the published traces")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="the first is the default")
    parser.add_argument("--rules", nargs="*", default=list(RULES), help="the first is the default")
    parser.add_argument("--drawn", nargs=2, type=int, default=[0, 0], help="numbers of drawn workloads")
    parser.add_argument("--only", default="", help="only workloads with this in their names")
    parser.add_argument(
        "--first-token-at-decode", action="store_true", help="decode makes the first token, not prefill"
    )
    given = parser.parse_args()
    gc.disable()  # a run has no cycles; searching for some takes a third of the time
    words = [f"--traces {given.traces.name}"] if given.traces else []
    words += ["--quick"] if given.quick else []
    words += ["--first-token-at-decode"] if given.first_token_at_decode else []
    workloads: Sequence[Workload] = WORKLOADS
    if given.drawn[1]:
        words.append(f"--drawn {given.drawn[0]} {given.drawn[1]}")
        workloads = [drawn(number, COSTS) for number in range(*given.drawn)]
    command = " ".join(["python -m bench.policies", *words])
    name = "policies-drawn" if given.drawn[1] else "policies"
    name += "-decode-first" if given.first_token_at_decode else ""
    with measured(name, given, command) as result:
        for kind, names, rule in (
            (workloads, given.policies, "none"),
            *((workloads, given.policies, rule) for rule in given.rules[:1]),
            (() if given.drawn[1] else OVERLOADS, given.rules, ""),
        ):
            chosen = [one for one in kind if given.only in one.name]
            if names and chosen:
                compare(result, given, chosen, names, rule)


if __name__ == "__main__":
    main()
