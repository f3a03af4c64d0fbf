# SPDX-License-Identifier: Apache-2.0
"""``mooncake plan``: which cluster meets the objectives for a trace, and what it costs; or what a unit of
throughput costs on each of some clusters.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from mooncake.cli.output import check_writable, wide_console, write_whole
from mooncake.cli.simulation.options import (
    CLUSTER_FORMS,
    COSTS_FORMS,
    BlockTokens,
    Changes,
    Format,
    MaxSilence,
    NumRows,
    SloTbt,
    SloTtft,
    Speedup,
    Spread,
    TimeUnit,
    TraceRequests,
    TraceSpec,
    known_settings,
    offer_of,
    requests_of,
)
from mooncake.cli.simulation.report import PlainTable, costs_tables, objectives_text, render_tables
from mooncake.cli.simulation.reuse import reuse_tables
from mooncake.errors import InvalidArgument
from mooncake.sim.serving import simulate
from mooncake.sim.serving.capacity_planner import (
    MAX_NODES,
    CandidateCluster,
    CapacityPlan,
    CapacityPlanner,
    Objectives,
    Prices,
    Simulate,
)
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.cost_comparison import (
    MOST_LOAD,
    ClusterOffer,
    ComparedCluster,
    CostComparison,
    dollars_per_1000_good,
    dollars_per_unit,
)
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.results import Summary
from mooncake.sim.traces.reuse import INTERVAL, reuse_of
from mooncake.sim.traces.trace import TraceOptions

BOUND_FACTOR = 4
"""At the slow end of an interval, no more than so many times the nodes are tried: objectives that one idle
node misses there would be searched for in vain with ever more of them."""
NUM_SLICES = 32
"""Slices of a trace's time that are drawn for an interval."""
DEFAULT_COSTS = ("llama3-70b-8xA800", "llama3-70b-8xH100", "llama3-70b-8xH200")
SEARCHED = ("mode", "num_prefill", "num_decode", "pipeline_nodes", "detail")
"""Fields of a cluster that a search sets itself, or that can't hold for all clusters that it tries."""
FIGURES = (
    "nodes",
    "$/h",
    "good",
    "good per $",
    "TTFT p90 s",
    "TBT p90 ms",
    "hit rate",
    "memory",
    "network",
)
"""What ``_figures`` returns for a cluster."""
COST_FIGURES = ("relative\nthroughput", "$/h per\nunit", "$ / 1,000\ngood")
"""What ``_costs_of`` returns."""
COMPARED = (
    "good/s",
    *COST_FIGURES,
    "good",
    "TTFT\np90 s",
    "TBT\np90 ms",
    "hit\nrate",
    "inter-\nruptions",
    "good\nlost",
)
"""Figures of a cluster that is compared, at the load that it carries."""
EXAMPLE_PRICES = Prices(
    gpu={"A100": 1.69, "A800": 1.69, "H100": 2.54, "H200": 3.70},
    spot={"A100": 0.79, "H100": 1.43, "H200": 3.31},
)


def plan_command(
    trace: TraceSpec,
    slo_ttft_s: SloTtft = 30.0,
    slo_tbt_s: SloTbt = 0.1,
    attainment: Annotated[
        float, typer.Option("--attainment", help="Share of requests that must meet both objectives.")
    ] = 0.9,
    prices_file: Annotated[
        Path | None,
        typer.Option(
            "--gpu-prices",
            metavar="FILE.toml",
            help="Prices in dollars per hour; without it, example prices.",
        ),
    ] = None,
    costs: Annotated[
        list[str] | None,
        typer.Option(
            "--costs",
            metavar="NAME|FILE",
            help=f"Hardware to try: {COSTS_FORMS}; may be repeated, and each pair of kinds is tried, too.",
        ),
    ] = None,
    clusters: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            metavar="[NAME=]CLUSTER",
            help="Compare such clusters at the largest load that each carries, instead of searching for one; "
            f"may be repeated: {CLUSTER_FORMS}; `:spot` behind the costs of prefill makes these nodes spot.",
        ),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(
            "--baseline",
            metavar="NAME",
            help="Cluster (or hardware) whose throughput is 1; without it, the first.",
        ),
    ] = "",
    policy: Annotated[str, typer.Option("--policy", help="Policy of the simulated clusters.")] = "overlap",
    speedup: Speedup = 1.0,
    is_spread: Spread = False,
    rows: NumRows = 0,
    trace_format: Format = "auto",
    time_unit: TimeUnit = "auto",
    block_tokens: BlockTokens = 0,
    max_silence_s: MaxSilence = 3600.0,
    ssd_tokens: Annotated[
        int, typer.Option("--ssd-tokens", min=0, help="Largest SSD per node to consider.")
    ] = 0,
    changes: Changes = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of random policies and of interruptions.")] = 0,
    shows_reuse: Annotated[
        bool,
        typer.Option(
            "--reuse/--no-reuse",
            help="Hit rate by size of the cache and tier, and times to live, of the trace.",
        ),
    ] = True,
    has_intervals: Annotated[
        bool,
        typer.Option(
            "--intervals/--no-intervals",
            help="90 % interval of the number of GPUs; needs a few more simulations of the same trace.",
        ),
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the tables as a page.")
    ] = None,
) -> None:
    """Find the smallest and the cheapest cluster that meets the objectives, by simulating candidates.

    Every candidate runs the whole trace. Beside it: the smallest cluster of colocated nodes, good
    requests per dollar of each, and what one step in every direction would change. With --cluster, compare
    these clusters by the cost per unit of throughput. What the trace itself shows comes first: the hit rate
    that a cache of each size has, by tier, and how long blocks should be kept.
    """
    check_writable(json_file, "--json")
    check_writable(html_file, "--html")
    for change in () if clusters else changes or ():
        if change.partition("=")[0].strip().replace("-", "_") in SEARCHED:
            allowed = (
                "another field, or given with --cluster: without it, plan chooses kinds and numbers of nodes"
            )
            raise InvalidArgument("--with", change, allowed)
    options = TraceOptions(
        format=trace_format,
        time_unit=time_unit,
        block_tokens=block_tokens,
        max_silence_s=max_silence_s,
        num_rows=rows,
        is_spread=is_spread,
    )
    requests = requests_of(trace, options)
    known_settings("policy", "scheduling", [policy])
    objectives = Objectives(slo_ttft_s, slo_tbt_s, attainment)
    prices = read_prices(prices_file)
    wanted = objectives_text(slo_ttft_s, slo_tbt_s)
    title = f"{requests.name}: {attainment:.0%} of requests {f'with {wanted}' if wanted else 'completed'}"
    given = [f"ssd_tokens={ssd_tokens}", *(changes or [])]
    document: dict[str, object] = {"trace": requests.name}
    plans: dict[str, CapacityPlan] = {}
    bounds: dict[str, list[CandidateCluster | None]] = {}
    if clusters:
        if costs and len(costs) > 1:
            raise InvalidArgument("--costs", costs, "given once with --cluster: the costs of forms without @")
        given = given[1:] if not ssd_tokens else given
        default_costs = costs[0] if costs else DEFAULT_COSTS[0]
        offers = [offer_of(one, default_costs, given, requests.block_tokens) for one in clusters]
        run = simulator(requests, policy, speedup, objectives, seed, scales_sessions=True)
        compared = CostComparison(
            offers, baseline or offers[0].name, objectives, prices, run, _show_load
        ).compare()
        tables = [_compared(compared, baseline or offers[0].name, requests)]
        tables += costs_tables(one.spec for one in offers)
        document["clusters"] = msgspec.to_builtins(compared)
    else:
        simulations = BoundedSimulations(requests, policy, speedup, objectives, seed)
        run = simulations.nominal
        bases = _bases(costs, given, requests.block_tokens)
        if not costs:
            bases = _with_spot_price(bases, prices)
        if baseline and baseline not in bases:
            raise InvalidArgument("--baseline", baseline, f"hardware that is tried: {', '.join(bases)}")
        for hardware, base in bases.items():

            def planner(
                how: Simulate, base: ClusterOffer = base, most_nodes: int = MAX_NODES
            ) -> CapacityPlanner:
                decode = "" if base.spec.decode_costs is None else base.decode_hardware
                return CapacityPlanner(
                    base.spec, base.hardware, objectives, prices, how, _show_tried, decode, most_nodes
                )

            plans[hardware] = planner(run).plan()
            best = plans[hardware].best
            if has_intervals:
                most_nodes = (
                    min(MAX_NODES, BOUND_FACTOR * 2 * best.num_nodes) if best is not None else MAX_NODES
                )
                bounds[hardware] = [
                    planner(simulations.optimistic, _at_bound(base, -1), most_nodes).smallest(),
                    # What does not suffice as it is does not suffice where it is slower.
                    planner(simulations.pessimistic, _at_bound(base, 1), most_nodes).smallest()
                    if best is not None
                    else None,
                ]
        tables = _planned(plans, baseline)
        if bounds:
            tables.append(_bounded(plans, bounds, bases))
            document["bounds"] = msgspec.to_builtins(bounds)
        tables += costs_tables(base.spec for base in bases.values())
        document["plans"] = msgspec.to_builtins(plans)
    if shows_reuse:
        reuse = reuse_of(requests, requests.block_tokens)
        document["reuse"] = msgspec.to_builtins(reuse)
        shown = offers[0].spec if clusters else _found_spec(plans, bases)
        tables = [*reuse_tables(reuse, *_caches(shown)), *tables]
    console = wide_console()
    console.print(title, markup=False)
    for table in tables:
        console.print(table.on_console())
    if json_file is not None:
        write_whole(json_file, json.dumps(document, indent=1) + "\n", "--json")
    if html_file is not None:
        write_whole(html_file, render_tables(title, tables), "--html")
    if plans and all(plan.best is None for plan in plans.values()):
        raise InvalidArgument(
            "--slo-ttft, --slo-tbt",
            [slo_ttft_s, slo_tbt_s],
            "objectives that some cluster can meet: even a node for each request misses them",
        )


def _bases(costs: list[str] | None, changes: list[str], block_tokens: int) -> dict[str, ClusterOffer]:
    """A cluster of each kind of hardware, and, of kinds that were asked for, one of each pair whose nodes
    can read each other's KV."""
    alike = {one: offer_of("1P1D", one, changes, block_tokens) for one in costs or DEFAULT_COSTS}
    bases = dict(alike)
    for prefill, decode in itertools.permutations(costs or (), 2):
        first, second = alike[prefill].spec, alike[decode].spec
        kv, other_kv = ((one.costs.kv_bytes_per_token, one.costs.num_layers) for one in (first, second))
        if kv == other_kv and first.decode_costs is None and second.decode_costs is None:
            spec = dataclasses.replace(first, decode_costs=second.costs)
            hardware, decode_hardware = alike[prefill].hardware, alike[decode].decode_hardware
            name = f"{prefill}+{decode}"
            bases[name] = ClusterOffer(name, spec, hardware, decode_hardware)
    return bases


def _found_spec(plans: dict[str, CapacityPlan], bases: dict[str, ClusterOffer]) -> ClusterSpec:
    """The cluster of the first plan that has one, with all the memory of its hardware; else a node of each
    kind."""
    for hardware, plan in plans.items():
        if plan.best is not None:
            return dataclasses.replace(bases[hardware].spec, num_prefill=plan.best.num_prefill)
    return next(iter(bases.values())).spec


def _caches(spec: ClusterSpec) -> tuple[NodeCosts, int]:
    """Costs with the cache of one node, and how many nodes have one: colocated ones have theirs in device
    memory."""
    costs = spec.node_costs
    if spec.mode == "disaggregated":
        return costs, spec.num_prefill
    return msgspec.structs.replace(
        costs, cache_tokens=costs.device_tokens
    ), spec.num_prefill + spec.num_decode


def _with_spot_price(bases: dict[str, ClusterOffer], prices: Prices) -> dict[str, ClusterOffer]:
    """The default hardware without those that are to be spot instances and have no such price; all of it
    where none has one."""
    missing = []
    for name, base in bases.items():
        if base.spec.spot == "none":
            continue
        try:
            prices.of_gpu(base.hardware, is_spot=True)
        except InvalidArgument as error:
            if error.field != "--gpu-prices":  # it has one, which is wrong
                raise
            missing.append(name)
    if len(missing) == len(bases):
        return bases
    for name in missing:
        typer.echo(f"note: {name} is left out: it has no spot price ([spot] of --gpu-prices)", err=True)
    return {name: base for name, base in bases.items() if name not in missing}


def _show_tried(one: CandidateCluster) -> None:
    _show(f"tried {_describe(one)}: {one.attainment:.1%} good")


def _show_load(name: str, load: float, summary: Summary) -> None:
    good = summary.num_good / max(1, summary.num_requests)
    _show(f"{name} at {load:.3g} times the load: {good:.1%} good")


def _show(step: str) -> None:
    """Print one step of a long search on standard error, in a terminal only."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(step, style="dim", markup=False)


def simulator(
    requests: TraceRequests,
    policy: str,
    speedup: float,
    objectives: Objectives,
    seed: int = 0,
    *,
    scales_sessions: bool = False,
) -> Simulate:
    """A function that runs ``requests`` through one candidate. More load: all of them faster, or, with
    ``scales_sessions``, more sessions at once where they are generated."""

    def run(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        rows, faster = requests.at_load(load) if scales_sessions else (requests, load)
        # Overloaded runs take longest, and what they would still show is not needed to find a limit.
        stops_early = scales_sessions and rows.num_known
        max_missed = int((1 - objectives.attainment) * rows.num_known + 1e-6)
        outcome = simulate(
            rows,
            spec,
            policy,
            seed=seed,
            speedup=speedup * faster,
            slo_ttft_s=objectives.ttft_s,
            slo_tbt_s=objectives.tbt_s,
            max_missed=max_missed if stops_early else None,
        )
        shares = [
            float(np.sum(outcome.is_good(ttft_s, tbt_s))) / max(1, len(outcome))
            for ttft_s, tbt_s in ((objectives.ttft_s, 0.0), (0.0, objectives.tbt_s))
        ]
        return outcome.summary(), shares[0], shares[1]

    return run


class BoundedSimulations:
    """Simulations of candidates, each run once, with what another such day may show in either direction."""

    def __init__(
        self, requests: TraceRequests, policy: str, speedup: float, objectives: Objectives, seed: int
    ) -> None:
        self._requests, self._policy, self._speedup = requests, policy, speedup
        self._objectives, self._seed = objectives, seed
        self._found: dict[tuple[ClusterSpec, float], tuple[Summary, list[list[float]]]] = {}

    def nominal(self, spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        return self._at(spec, load, 0)

    def pessimistic(self, spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        return self._at(spec, load, 1)

    def optimistic(self, spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        return self._at(spec, load, 2)

    def _at(self, spec: ClusterSpec, load: float, which: int) -> tuple[Summary, float, float]:
        if (spec, load) not in self._found:
            self._found[spec, load] = self._run(spec, load)
        summary, shares = self._found[spec, load]
        good, ttft, tbt = shares[which]
        num_good = summary.num_good if not which else round(good * summary.num_requests)
        return msgspec.structs.replace(summary, num_good=num_good), ttft, tbt

    def _run(self, spec: ClusterSpec, load: float) -> tuple[Summary, list[list[float]]]:
        objectives = self._objectives
        outcome = simulate(
            self._requests,
            spec,
            self._policy,
            seed=self._seed,
            speedup=self._speedup * load,
            slo_ttft_s=objectives.ttft_s,
            slo_tbt_s=objectives.tbt_s,
        )
        good = np.stack(
            [
                outcome.is_good(),
                outcome.is_good(objectives.ttft_s, 0.0),
                outcome.is_good(0.0, objectives.tbt_s),
            ]
        ).astype(np.float64)
        return outcome.summary(), share_bounds(good)


def _at_bound(offer: ClusterOffer, sign: int) -> ClusterOffer:
    """The same hardware at the fast (-1) or slow (1) end of its costs' errors, where they are known."""
    spec = offer.spec
    decode = spec.decode_costs.at_bound(sign) if spec.decode_costs is not None else None
    spec = dataclasses.replace(spec, costs=spec.costs.at_bound(sign), decode_costs=decode)
    return dataclasses.replace(offer, spec=spec)


def share_bounds(good: NDArray[np.float64]) -> list[list[float]]:
    """Means of the rows, and both ends of their 90 % intervals: slices of time are drawn with replacement."""
    num_rows = good.shape[1]
    if not num_rows:
        return [[0.0] * len(good)] * 3
    edges = np.linspace(0, num_rows, min(NUM_SLICES, num_rows) + 1).astype(np.int64)[:-1]
    sums, sizes = np.add.reduceat(good, edges, axis=1), np.diff(np.append(edges, num_rows))
    num_slices = len(edges)
    weights = np.random.default_rng(0).multinomial(num_slices, np.full(num_slices, 1 / num_slices), 400)
    drawn = (weights @ sums.T) / (weights @ sizes)[:, None]
    return [good.mean(axis=1).tolist(), *np.quantile(drawn, INTERVAL, axis=0).tolist()]


def _bounded(
    plans: dict[str, CapacityPlan],
    bounds: dict[str, list[CandidateCluster | None]],
    bases: dict[str, ClusterOffer],
) -> PlainTable:
    """The number of GPUs, and its interval."""
    rows = []
    for hardware, (low, high) in bounds.items():
        spec = bases[hardware].spec
        cells = []
        for one in (plans[hardware].best, low, high):
            if one is None:
                cells.append("none suffices")
                continue
            num_gpus = (
                one.num_prefill * spec.costs.num_gpus + one.num_decode * spec.decode_node_costs.num_gpus
            )
            cells.append(f"{num_gpus} ({_describe(one)})")
        rows.append((hardware, *cells))
    caption = (
        "low and high: what suffices at the favourable and the unfavourable end of the 90 % interval of "
    )
    caption += (
        f"the share of good requests, over slices of the trace's time. None suffices: of {BOUND_FACTOR} "
        "times the nodes or fewer."
    )
    specs = [base.spec for base in bases.values()]
    if any(spec.costs.has_errors or spec.decode_node_costs.has_errors for spec in specs):
        caption += " Costs with errors: also that much faster or slower."
    return PlainTable("Number of GPUs", ("hardware", "GPUs", "low", "high"), rows, caption)


def read_prices(file: Path | None) -> Prices:
    """Raises InvalidArgument."""
    if file is None:
        return EXAMPLE_PRICES
    try:
        return msgspec.toml.decode(file.read_bytes(), type=Prices)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, InvalidArgument) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument("--gpu-prices", str(file), f"a TOML file of prices ({reason})") from error


def _describe(one: CandidateCluster) -> str:
    stores = f"{one.num_store}S" if one.num_store else ""
    nodes = (
        f"{one.num_prefill}P{one.num_decode}D{stores}"
        if one.mode == "disaggregated"
        else f"{one.num_nodes} x {one.mode}"
    )
    spot = ":spot" if one.spot == "prefill" else ""
    decode = f"+{one.decode_hardware}" if one.decode_hardware else ""
    return f"{nodes} {one.hardware}{spot}{decode}"


def _planned(plans: dict[str, CapacityPlan], baseline: str) -> list[PlainTable]:
    """The clusters that were found, and what is around the cheapest."""
    base = _baseline_of(plans, baseline)
    rows: list[tuple[str, ...]] = []
    for hardware, plan in plans.items():
        for one, kind in ((plan.best, "apart"), (plan.one_pool, "one pool")):
            if one is not None:
                rows.append((_describe(one), *_figures(one), *_costs_of(one, base)))
            elif kind == "apart" or "+" not in hardware:
                empty = [""] * len((*FIGURES, *COST_FIGURES))
                rows.append((f"{hardware}, {kind}: no cluster meets the objectives", *empty))
    caption = "Memory and network are per node. Every row was simulated over the whole trace."
    if base is not None:
        caption += f" Relative throughput: good requests per second divided by those of {_describe(base)}."
    every = [one for plan in plans.values() for one in (plan.best, plan.one_pool) if one is not None]
    if every:
        least = min(every, key=lambda one: one.dollars_per_hour)
        caption += f" The cheapest: {_describe(least)}, {least.dollars_per_hour:.2f} dollars an hour."
    tables = [PlainTable("", ("cluster", *FIGURES, *COST_FIGURES), rows, caption)]
    found = [plan for plan in plans.values() if plan.best is not None]
    cheapest = min(found, key=lambda plan: plan.best.dollars_per_hour if plan.best else 0.0, default=None)
    if cheapest is not None and cheapest.best is not None:
        tables.append(_sensitivity(cheapest.best, cheapest.sensitivity))
    return tables


def _baseline_of(plans: dict[str, CapacityPlan], baseline: str) -> CandidateCluster | None:
    """The colocated cluster of the named hardware, else its other one; without a name, the first found."""
    named = [plans[baseline]] if baseline else list(plans.values())
    return next((one for plan in named for one in (plan.one_pool, plan.best) if one is not None), None)


def _figures(one: CandidateCluster) -> tuple[str, ...]:
    """Colocated nodes of a plan have no pool, so they need neither its memory nor its network."""
    has_pool = one.mode == "disaggregated"
    return (
        str(one.num_nodes),
        f"{one.dollars_per_hour:.2f}",
        f"{one.attainment:.1%}",
        f"{one.good_per_dollar:.1f}",
        f"{one.ttft_p90_s:.2f}",
        f"{one.tbt_p90_s * 1000:.1f}",
        f"{one.hit_rate:.3f}",
        f"{one.cache_bytes / 1e9:,.0f} GB" if has_pool else "-",
        f"{one.nic_bytes_per_s * 8 / 1e9:,.0f} Gb/s" if has_pool else "-",
    )


def _costs_of(one: CandidateCluster, base: CandidateCluster | None) -> tuple[str, ...]:
    relative = one.good_per_s / base.good_per_s if base is not None and base.good_per_s else 0.0
    return (
        f"{relative:.2f}x",
        _dollars(dollars_per_unit(one.dollars_per_hour, relative)),
        _dollars(dollars_per_1000_good(one.dollars_per_hour, one.good_per_s)),
    )


def _dollars(amount: float | None, bound: str = "") -> str:
    return "-" if amount is None else f"{bound}{amount:.2f}"


def _compared(clusters: list[ComparedCluster], baseline: str, requests: TraceRequests) -> PlainTable:
    rows: list[tuple[str, ...]] = []
    [base] = (one for one in clusters if one.name == baseline)
    for one in clusters:
        num_sessions = requests.num_sessions(one.load)
        least, most = ("≥ ", "≤ ") if one.carries_more else ("", "")
        relative = f"{least}{one.relative_throughput:.2f}x"
        unit = _dollars(one.dollars_per_unit, most)
        if one is base:
            relative, unit = "1.00x", _dollars(one.dollars_per_unit)
        elif base.carries_more:
            relative = "-" if one.carries_more else f"≤ {one.relative_throughput:.2f}x"
            unit = "-" if one.carries_more else _dollars(one.dollars_per_unit, "≥ ")
        figures = (
            least + (f"{num_sessions:,}" if num_sessions else f"{one.load:.2f}x"),
            f"{least}{one.good_per_s:.2f}",
            relative,
            unit,
            _dollars(one.dollars_per_1000_good, most),
            f"{one.attainment:.1%}",
            f"{one.ttft_p90_s:.2f}",
            f"{one.tbt_p90_s * 1000:.1f}",
            f"{one.hit_rate:.3f}",
            f"{one.num_interruptions:,}",
            f"{one.num_good_lost:,}",
        )
        none = ("none", *["-"] * (len(figures) - 1))
        rows.append((one.name, f"{one.dollars_per_hour:.2f}", *(figures if one.load else none)))
    caption = (
        "Each cluster at the largest load that it carries. Relative throughput: good/s divided by that of "
        f"{baseline}. $/h per unit: $/h divided by relative throughput."
    )
    if any(one.carries_more for one in clusters):
        caption += (
            f" ≥ and ≤: the search ends at {MOST_LOAD:,.0f} times the trace's load, which such a cluster "
            "carries; it may carry more. A trace with more requests at once shows its limit."
        )
    headings = ("cluster", "$/h", "sessions" if requests.num_sessions(1.0) else "load", *COMPARED)
    return PlainTable("", headings, rows, caption)


def _sensitivity(best: CandidateCluster, rows: list[CandidateCluster]) -> PlainTable:
    shown: list[tuple[str, ...]] = []
    for one in (msgspec.structs.replace(best, note="unchanged"), *rows):
        figures = _figures(one)
        shown.append((one.note, *figures[:3], "yes" if one.meets else "no", *figures[3:7]))
    headings = ("change", *FIGURES[:3], "meets", *FIGURES[3:7])
    return PlainTable(f"Around the cheapest disaggregated cluster, {_describe(best)}", headings, shown)
