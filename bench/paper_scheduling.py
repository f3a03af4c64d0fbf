# SPDX-License-Identifier: Apache-2.0
"""The papers' tables about whole clusters: policies, colocated serving, overload, for ``bench/paper.py``.

Nothing in the simulator was adjusted to them: costs are the fits of FAST'25 Fig 14, links are as in Fig 12,
caches 3M tokens a prefill node, and a trace is replayed at its own speed unless a title says otherwise.
What is not in the papers (the split of 16 nodes, the balancing threshold, objectives of the overload
runs) is said in the notes.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.paper_table import Check, Table
from mooncake.sim.serving import ClusterSpec, simulate
from mooncake.sim.serving.cluster import Mode
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.serving.results import RunResults
from mooncake.sim.traces.trace import TraceOptions, read_trace

CONVERSATION, SURROGATE = "conversation_trace.jsonl", "arxiv_surrogate.jsonl"
AGENTIC = "agentic_kvct_sample.jsonl.gz"
COSTS = load_costs("llama3-70b-8xA800")
APART = ClusterSpec(costs=COSTS, num_prefill=8, num_decode=8)
SLO_TTFT_S = 30.0


def run(
    path: Path, cluster: ClusterSpec, scheduling: str, admission: str = "none", **more: Any
) -> RunResults:
    trace = read_trace(str(path), TraceOptions())
    cluster = dataclasses.replace(cluster, block_tokens=trace.block_tokens)
    was_collecting = gc.isenabled()
    gc.disable()  # nothing here has cycles; searching for some takes a third of the time
    try:
        return simulate(trace, cluster, scheduling, admission, **more)
    finally:
        if was_collecting:
            gc.enable()


def policies(folder: Path) -> Table:
    """FAST'25 Fig 5."""
    published = {"random": 19.65, "load": 5.27, "cache_aware": 3.58, "kvcache_centric": 3.07}
    path = folder / CONVERSATION
    runs = {name: run(path, APART, name).summary() for name in (*published, "overlap")}
    mean_s = {name: summary.ttft_s.mean for name, summary in runs.items()}
    base = mean_s["kvcache_centric"]
    checks = [
        Check(what=f"mean TTFT s, {name}", paper=published.get(name), ours=value, digits=2)
        for name, value in mean_s.items()
    ]
    orders = [("random", "load"), ("load", "cache_aware"), ("cache_aware", "kvcache_centric")]
    for slower, faster in orders:
        paper, ours = published[slower] / published[faster], mean_s[slower] / mean_s[faster]
        what = f"{slower} / {faster}"
        checks.append(Check(what=what, paper=paper, ours=ours, low=1.000001, digits=2))
    for name, low in (("random", 4.0), ("load", 1.4)):
        paper, ours = published[name] / published["kvcache_centric"], mean_s[name] / base
        checks.append(Check(what=f"{name} / kvcache_centric", paper=paper, ours=ours, low=low, digits=2))
    bound = runs["overlap"].prefill_gpu_s / base
    checks.append(Check(what="computing alone / kvcache_centric", ours=bound, digits=2))
    checks.append(Check(what="overlap / kvcache_centric", ours=mean_s["overlap"] / base, digits=2))
    for title, speedup, num_nodes in (("x1.75", 1.75, 1), ("pipelines of 4", 1.0, 4)):
        cluster = dataclasses.replace(APART, pipeline_nodes=num_nodes)
        theirs, ours = (
            run(path, cluster, name, speedup=speedup).summary().ttft_s.mean
            for name in ("kvcache_centric", "overlap")
        )
        checks.append(Check(what=f"mean TTFT s, kvcache_centric, {title}", ours=theirs, digits=2))
        what = f"overlap / kvcache_centric, {title}"
        checks.append(Check(what=what, ours=ours / theirs, high=0.85, digits=2))
    title = "FAST'25 Fig 5: mean TTFT by policy, conversation, 8 prefill + 8 decode"
    return Table(title, checks, POLICIES_NOTE)


POLICIES_NOTE = """\
The paper does not state how its 16 nodes are split; ours are 8 + 8. Our waiting times are shorter
throughout: at this rate prefill is busy to 45-70 %, and an engine's overheads are not in the model. Ratios
are what the policies make of the same machines. At the trace's own speed Algorithm 1's mean is mostly
computing, which no policy shortens by waiting less: `computing alone` is the ratio without any queue. At
1.75 times that speed it waits as long as in the paper (3.07 s). With chunked pipeline parallelism (two
pipelines of four nodes, for both policies) a long prompt is computed by four nodes, and the queue is what
differs again."""


def one_pool(folder: Path) -> Table:
    """FAST'25, conversation on 16 nodes: share of requests with TTFT <= 30 s and TBT <= 100, 200, 300 ms."""
    limits_s = (0.1, 0.2, 0.3)
    published: dict[Mode, tuple[float, ...]] = {
        "disaggregated": (96.6, 100.0, 100.0),
        "vllm": (16.1, 38.8, 62.7),
        "prefix": (15.0, 34.3, 55.5),
        "chunked": (9.4, 28.8, 55.2),
    }
    checks: list[Check] = []
    slow = msgspec.structs.replace(COSTS, decode=msgspec.structs.replace(COSTS.decode, base_s=SLOW_STEP_S))
    shares: dict[tuple[Mode, bool], list[float]] = {}
    for is_slow in (False, True):
        for mode, values in published.items():
            is_apart = mode == "disaggregated"
            cluster = dataclasses.replace(
                APART, mode=mode, costs=slow if is_slow else COSTS, step_tokens=2048 if is_slow else 512
            )
            outcome = run(folder / CONVERSATION, cluster, "kvcache_centric" if is_apart else "load")
            good = [100 * float(outcome.is_good(SLO_TTFT_S, limit).mean()) for limit in limits_s]
            shares[mode, is_slow] = good
            for limit, paper, ours in zip(limits_s, values, good, strict=True):
                what = f"% effective, {mode}{STEP[is_slow]}, TBT <= {limit * 1000:.0f} ms"
                checks.append(Check(what=what, paper=paper, ours=ours, digits=1))
    for is_slow in (False, True):
        title = f", all with a{STEP[True][1:]}" if is_slow else ""
        for name, modes in (("plain and prefix", POOLS[:2]), ("all three", POOLS)):
            for number, (limit, paper) in enumerate(zip(limits_s, (498.0, 157.0, 59.0), strict=True)):
                best = max(shares[mode, is_slow][number] for mode in modes)
                gain = 100 * (shares["disaggregated", is_slow][number] / best - 1)
                what = f"% more than the best of {name}{title}, TBT <= {limit * 1000:.0f} ms"
                checks.append(Check(what=what, paper=paper, ours=gain, digits=0))
    return Table(
        "FAST'25 5.2: effective requests beside one-pool serving, conversation, 16 nodes", checks, POOL_NOTE
    )


POOLS: tuple[Mode, ...] = ("vllm", "prefix", "chunked")
SLOW_STEP_S = 0.060
STEP = {False: "", True: f", step {SLOW_STEP_S * 1000:.0f} ms"}
POOL_NOTE = """\
At equal costs the gain is smaller than printed, because our colocated servers pay only for what the
devices compute: a step of 27 ms and, for chunks, 512 tokens a step with no overhead of their own. vLLM
0.5.1 did not reach that. One number explains most of what was printed: with 60 ms a step, for everyone
(host-side scheduling, sampling and broadcasts between steps; the 2024 paper's own decode ran at 60-70 ms),
plain and prefix-caching serving come out within ten points of the printed shares at all three limits, and the
gain over them follows; the disaggregated system loses 2 points at 100 ms and nothing at the others. Chunked
prefill stays better here than printed, even with 2,048 tokens a step: the paper's took 22 % more GPU time
than plain prefill (Fig 8), ours takes none more. Well done, with small chunks and no overhead, it keeps TBT
within 100 ms for nearly all of this trace on 16 nodes; what is left of the gain at equal costs is the lower
TBT."""


SHORT_OF_BOTH = ClusterSpec(costs=COSTS, num_prefill=8, num_decode=2)
OVERLOAD_NOTE = """\
Objectives 30 s and 100 ms; the paper's are not printed, nor is its rule's horizon. 8 prefill and 2 decode
nodes: on 8 + 8 as in the paper decode steps take 35 ms in our model, so that decode never binds and the three
rules are one (11 of 23,608 rejected on the surrogate; 1,155 with a TBT objective of 32 ms, which few answers
meet). Rejected: at arrival or when the prompt was computed, where decode looks again under the three rules of
the paper (its section 3) and what it refuses was computed in vain. Good: done within both objectives.

The paper's order is not ours. A computed prompt that is refused costs a request only if prefill is short at
that moment, and then decode mostly is not: on the surrogate alone baseline rejects more than `early`. And a
second look can only refuse more, unless it saves such waste: `predicted` foresees the pool without bias but
not exactly (on 8 + 3 nodes with 65 ms a step: 159.0 requests where 159.5 decode, standard deviation 16). It
refused at 164 decoding where 179 fit, and what it let in by mistake was refused late. Also tried at twice the
speed, rejected by baseline / early / predicted:
  conversation, 8 + 3, 65 ms a step (as decode ran in 2024)              1,917 / 1,922 / 3,384
  the same, arrivals spread over the trace's 3 s                         1,902 / 1,829 / 3,255
  the same, not spread, prefill 1.4 times as slow                        1,401 / 1,787 / 2,884
  conversation, 8 + 4, 65 ms a step, prefill 1.4 times as slow           365 / 365 / not run
  conversation, 8 + 2, arrivals spread                                   239 / 303 / 830
  surrogate, 8 + 3, 65 ms a step, prefill 1.75 times as slow             1,235 / 1,376 / 3,062
  surrogate, 8 + 8, 65 ms a step, prefill 1.75 times as slow             912 / not run / 912
The rules of the paper consider the pool's memory as a whole. If they required a context's memory in one
instance, and its answer's, as ours does, `early` would have 10,541 good ones (conversation) and 5,588
(agentic), more than ours: what it decides when a prompt is computed needs no forecast. Ours rejects none
so late, as a rejection must have cost nothing.
"""


def overload(folder: Path) -> Table:
    """arXiv v3 Table 3: rejections at twice the speed, and the value of the rest."""
    published = {"baseline": 4183, "early": 3771, "predicted": 3589}
    checks: list[Check] = []
    for name in (CONVERSATION, SURROGATE, AGENTIC):
        workload = name.split(".")[0].removesuffix("_trace")
        rejected: dict[str, int] = {}
        good: dict[str, int] = {}
        for rule in (*published, "goodput"):
            summary = run(folder / name, SHORT_OF_BOTH, "kvcache_centric", rule, speedup=2.0).summary()
            rejected[rule] = summary.num_rejected + summary.num_rejected_after_prefill
            good[rule] = summary.num_good
            paper = published.get(rule) if name == CONVERSATION else None
            what = f"rejected, {workload}, {rule}"
            checks.append(Check(what=what, paper=paper, ours=rejected[rule], digits=0))
        for rule in good:
            checks.append(Check(what=f"good, {workload}, {rule}", ours=good[rule], digits=0))
        for more, less in (("baseline", "early"), ("early", "predicted")):
            ratio = rejected[more] / max(1, rejected[less])
            low = 1.0 if less == "predicted" else 1.000001
            what = f"rejected {more} / {less}, {workload}"
            printed = published[more] / published[less] if name == CONVERSATION else None
            is_explained = (workload, more) != ("arxiv_surrogate", "baseline")
            checks.append(
                Check(what=what, paper=printed, ours=ratio, low=low, digits=3, is_explained=is_explained)
            )
        best = max(good[rule] for rule in published)
        what = f"good, goodput / best of the three, {workload}"
        checks.append(Check(what=what, ours=good["goodput"] / max(1, best), low=1.000001, digits=3))
    return Table("arXiv v3 Table 3: rejections at twice the speed, and goodput", checks, OVERLOAD_NOTE)


def tables(folder: Path) -> Iterator[Table]:
    yield policies(folder)
    yield one_pool(folder)
    yield overload(folder)
