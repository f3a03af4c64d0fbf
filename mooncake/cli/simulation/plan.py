# SPDX-License-Identifier: Apache-2.0
"""``mooncake plan``: which cluster meets the objectives for a trace, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mooncake.cli.simulation.options import (
    Changes,
    NumRows,
    SloTbt,
    SloTtft,
    Speedup,
    Spread,
    TraceRequests,
    TraceSpec,
    cluster_of,
    known_settings,
    requests_of,
)
from mooncake.cli.simulation.report import wide_console, write_whole
from mooncake.errors import InvalidArgument
from mooncake.sim.serving import simulate
from mooncake.sim.serving.capacity_planner import (
    CandidateCluster,
    CapacityPlan,
    CapacityPlanner,
    Objectives,
    Prices,
    Simulate,
)
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.results import Summary
from mooncake.sim.traces.trace import TraceOptions

DEFAULT_COSTS = ("llama3-70b-8xA800", "llama3-70b-8xH100", "llama3-70b-8xH200")
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
EXAMPLE_PRICES = {"A100": 1.69, "A800": 1.69, "H100": 2.54, "H200": 3.70}


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
        typer.Option("--costs", metavar="NAME|FILE", help="Hardware to try; may be repeated."),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="Policy of the simulated clusters.")] = "overlap",
    speedup: Speedup = 1.0,
    is_spread: Spread = False,
    rows: NumRows = 0,
    ssd_tokens: Annotated[
        int, typer.Option("--ssd-tokens", min=0, help="Largest SSD per node to consider.")
    ] = 0,
    changes: Changes = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
) -> None:
    """Find the smallest and the cheapest cluster that meets the objectives, by simulating candidates.

    Every candidate runs the whole trace. Beside it: the smallest cluster of colocated nodes, good
    requests per dollar of each, and what one step in every direction would change.
    """
    requests = requests_of(trace, TraceOptions(num_rows=rows, is_spread=is_spread))
    known_settings("policy", "scheduling", [policy])
    objectives = Objectives(slo_ttft_s, slo_tbt_s, attainment)
    prices = read_prices(prices_file)
    console, progress = wide_console(), Console(stderr=True)
    plans: dict[str, CapacityPlan] = {}
    for hardware in costs or DEFAULT_COSTS:
        base = cluster_of(
            "1P1D", hardware, [f"ssd_tokens={ssd_tokens}", *(changes or [])], requests.block_tokens
        )
        planner = CapacityPlanner(
            base,
            Path(hardware).stem if Path(hardware).is_file() else hardware,
            objectives,
            prices,
            simulator(requests, policy, speedup, objectives),
            lambda one: progress.print(f"[dim]tried {_describe(one)}: {one.attainment:.1%} good[/dim]"),
        )
        plans[hardware] = planner.plan()
    wanted = f"TTFT <= {slo_ttft_s:g} s, TBT <= {slo_tbt_s * 1000:g} ms"
    console.print(f"{requests.name}: {attainment:.0%} of requests with {wanted}")
    console.print(_found(plans))
    cheapest = min(
        (plan for plan in plans.values() if plan.best is not None),
        key=lambda plan: plan.best.dollars_per_hour if plan.best is not None else 0.0,
        default=None,
    )
    if cheapest is not None and cheapest.best is not None:
        console.print(_sensitivity(cheapest.best, cheapest.sensitivity))
    if json_file is not None:
        write_whole(
            json_file,
            json.dumps({"trace": requests.name, "plans": msgspec.to_builtins(plans)}, indent=1) + "\n",
        )
    if cheapest is None:
        raise InvalidArgument(
            "--slo-ttft, --slo-tbt",
            [slo_ttft_s, slo_tbt_s],
            "objectives that some cluster can meet: even one idle node misses them",
        )


def simulator(requests: TraceRequests, policy: str, speedup: float, objectives: Objectives) -> Simulate:
    """A function that runs ``requests`` through one candidate."""

    def run(spec: ClusterSpec, load: float) -> tuple[Summary, float, float]:
        outcome = simulate(
            requests,
            spec,
            policy,
            speedup=speedup * load,
            slo_ttft_s=objectives.ttft_s,
            slo_tbt_s=objectives.tbt_s,
        )
        shares = [
            float(np.sum(outcome.is_good(ttft_s, tbt_s))) / max(1, len(outcome))
            for ttft_s, tbt_s in ((objectives.ttft_s, 0.0), (0.0, objectives.tbt_s))
        ]
        return outcome.summary(), shares[0], shares[1]

    return run


def read_prices(file: Path | None) -> Prices:
    """Raises InvalidArgument."""
    if file is None:
        return Prices(gpu=EXAMPLE_PRICES)
    try:
        return msgspec.toml.decode(file.read_bytes(), type=Prices)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument("--gpu-prices", str(file), f"a TOML file of prices ({reason})") from error


def _describe(one: CandidateCluster) -> str:
    nodes = (
        f"{one.num_prefill}P{one.num_decode}D"
        if one.mode == "disaggregated"
        else f"{one.num_nodes} x {one.mode}"
    )
    return f"{nodes} {one.hardware}"


def _found(plans: dict[str, CapacityPlan]) -> Table:
    shown = Table(
        caption="Memory and network are per node. Every row was simulated over the whole trace.",
        caption_justify="left",
    )
    for heading in ("cluster", *FIGURES):
        shown.add_column(heading, justify="left" if heading == "cluster" else "right")
    for hardware, plan in plans.items():
        for one, kind in ((plan.best, "apart"), (plan.one_pool, "one pool")):
            if one is None:
                shown.add_row(f"{hardware}, {kind}: no cluster meets the objectives")
            else:
                shown.add_row(_describe(one), *_figures(one))
    return shown


def _figures(one: CandidateCluster) -> tuple[str, ...]:
    return (
        str(one.num_nodes),
        f"{one.dollars_per_hour:.2f}",
        f"{one.attainment:.1%}",
        f"{one.good_per_dollar:.1f}",
        f"{one.ttft_p90_s:.2f}",
        f"{one.tbt_p90_s * 1000:.1f}",
        f"{one.hit_rate:.3f}",
        f"{one.cache_bytes / 1e9:,.0f} GB",
        f"{one.nic_bytes_per_s * 8 / 1e9:,.0f} Gb/s",
    )


def _sensitivity(best: CandidateCluster, rows: list[CandidateCluster]) -> Table:
    shown = Table(box=box.SIMPLE, title=f"Around the cheapest, {_describe(best)}", title_justify="left")
    for heading in ("change", *FIGURES[:3], "meets", *FIGURES[3:7]):
        shown.add_column(heading, justify="left" if heading == "change" else "right")
    for one in (msgspec.structs.replace(best, note="unchanged"), *rows):
        figures = _figures(one)
        shown.add_row(one.note, *figures[:3], "yes" if one.meets else "no", *figures[3:7])
    return shown
