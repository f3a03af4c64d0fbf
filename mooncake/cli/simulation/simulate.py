# SPDX-License-Identifier: Apache-2.0
"""``mooncake simulate``: a trace through one or more clusters and policies, side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mooncake.cli.output import check_writable, wide_console, write_whole
from mooncake.cli.simulation.options import (
    CLUSTER_FORMS,
    COSTS_FORMS,
    BlockTokens,
    Changes,
    DivideLengths,
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
    cluster_of,
    known_settings,
    requests_of,
)
from mooncake.cli.simulation.report import (
    ClusterRun,
    check_html,
    costs_tables,
    render_html,
    table,
)
from mooncake.errors import InvalidArgument
from mooncake.sim.serving import simulate
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.traces.trace import TraceOptions


def simulate_command(
    trace: TraceSpec,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="How prefill and decode are chosen; may be repeated.")
    ] = None,
    clusters: Annotated[
        list[str] | None, typer.Option("--cluster", help=f"{CLUSTER_FORMS}; may be repeated.")
    ] = None,
    admissions: Annotated[
        list[str] | None, typer.Option("--admission", help="Admission rule; may be repeated.")
    ] = None,
    costs: Annotated[
        str, typer.Option("--costs", metavar="NAME|FILE", help=f"Costs of a node: {COSTS_FORMS}.")
    ] = "llama3-70b-8xA800",
    slo_ttft_s: SloTtft = 30.0,
    slo_tbt_s: SloTbt = 0.1,
    speedup: Speedup = 1.0,
    rows: NumRows = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of random policies.")] = 0,
    changes: Changes = None,
    trace_format: Format = "auto",
    time_unit: TimeUnit = "auto",
    block_tokens: BlockTokens = 0,
    max_silence_s: MaxSilence = 3600.0,
    divide_lengths: DivideLengths = 1,
    is_spread: Spread = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write summaries and timelines as JSON.")
    ] = None,
    with_rows: Annotated[
        bool, typer.Option("--json-rows", help="Include every request in the JSON.")
    ] = False,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots (extra `plot`).")
    ] = None,
) -> None:
    """Run a trace through the real conductor and simulated nodes, and print the results.

    Nothing is written unless the whole trace was read: a broken row ends the command with its number.
    """
    if with_rows and json_file is None:
        raise InvalidArgument("--json-rows", True, "left out without --json")
    check_writable(json_file, "--json")
    check_html(html_file)
    options = TraceOptions(
        format=trace_format,
        time_unit=time_unit,
        block_tokens=block_tokens,
        max_silence_s=max_silence_s,
        num_rows=rows,
        divide_lengths=divide_lengths,
        is_spread=is_spread,
    )
    requests = requests_of(trace, options)
    watched = ["watches_blocks=true"] if html_file else []
    specs = {
        text: cluster_of(text, costs, [*watched, *(changes or [])], requests.block_tokens)
        for text in clusters or ["8P8D"]
    }
    chosen = known_settings("policy", "scheduling", policies or ["overlap"])
    rules = known_settings("admission", "admission", admissions or ["none"])
    runs = [
        _run(requests, name, spec, policy, rule, seed, speedup, (slo_ttft_s, slo_tbt_s))
        for name, spec in specs.items()
        for policy in chosen
        for rule in rules
    ]
    console = wide_console()
    console.print(table(requests.name, runs))
    for costs_table in costs_tables(specs.values()):
        console.print(costs_table.on_console())
    if json_file is not None:
        write_whole(json_file, _json(requests.name, runs, with_rows), "--json")
    if html_file is not None:
        write_whole(html_file, render_html(requests.name, runs), "--html")


def _run(
    requests: TraceRequests,
    cluster: str,
    spec: ClusterSpec,
    policy: str,
    admission: str,
    seed: int,
    speedup: float,
    objectives: tuple[float, float],
) -> ClusterRun:
    name = f"{cluster} {policy}" + (f" {admission}" if admission != "none" else "")
    began = time.perf_counter()
    with _bar(name) as (progress, task):

        def show(num_arrived: int, now: float) -> None:
            text = f"{num_arrived:,} requests, {now / 3600:.2f} h"
            progress.update(task, completed=requests.share(num_arrived), text=text)

        outcome = simulate(
            requests,
            spec,
            policy,
            admission,
            seed=seed,
            speedup=speedup,
            slo_ttft_s=objectives[0],
            slo_tbt_s=objectives[1],
            progress=show,
        )
        show(len(outcome), float(outcome.time_line.at_s[-1]) if len(outcome.time_line.at_s) else 0.0)
    return ClusterRun(name, outcome, outcome.summary(), time.perf_counter() - began)


@contextmanager
def _bar(name: str) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on standard error, shown only in a terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(name, total=1.0, text="")


def _json(trace: str, runs: list[ClusterRun], with_rows: bool) -> str:
    documents = [{"name": run.name, **json.loads(run.outcome.to_json(rows=with_rows))} for run in runs]
    return msgspec.json.format(json.dumps({"trace": trace, "runs": documents}), indent=1) + "\n"
