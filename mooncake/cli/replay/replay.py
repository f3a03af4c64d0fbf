# SPDX-License-Identifier: Apache-2.0
"""``mooncake replay``: a trace against a live endpoint, and the simulator's prediction beside it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mooncake.cli.replay.calibrate import ApiKey, Url
from mooncake.cli.replay.endpoint import Endpoint
from mooncake.cli.replay.open_loop import Replay, ReplayAccuracy, ReplayObservations, TracePrompts, accuracy
from mooncake.cli.simulation.html_report import render_html
from mooncake.cli.simulation.options import (
    DivideLengths,
    Format,
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
from mooncake.cli.simulation.tables import ClusterRun, table, wide_console, write_whole
from mooncake.sim.serving import simulate
from mooncake.sim.serving.results import RunResults
from mooncake.sim.traces.trace import TraceOptions, TraceRow


def replay_command(
    trace: TraceSpec,
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[
        str, typer.Option("--model", help="Model to use; by default the first that the server lists.")
    ] = "",
    api_key: ApiKey = "",
    rows: NumRows = 0,
    speedup: Speedup = 1.0,
    divide_lengths: DivideLengths = 1,
    is_spread: Spread = False,
    trace_format: Format = "auto",
    slo_ttft_s: SloTtft = 30.0,
    slo_tbt_s: SloTbt = 0.1,
    sends_slo: Annotated[
        bool, typer.Option("--tell-slo", help="Send the objectives along, for servers that reject by them.")
    ] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Simulate first; print both and the prediction's errors.")
    ] = False,
    costs: Annotated[
        str, typer.Option("--costs", metavar="NAME|FILE", help="Costs file from `mooncake calibrate`.")
    ] = "costs.toml",
    cluster: Annotated[str, typer.Option("--cluster", help="The live cluster, e.g. 2P2D.")] = "2P2D",
    policy: Annotated[str, typer.Option("--policy", help="Of the live conductor.")] = "cache_aware",
    admission: Annotated[str, typer.Option("--admission", help="Of the live conductor.")] = "none",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the prompts; change it for prompts not sent before.")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="HTML report with plots.")
    ] = None,
) -> None:
    """Replay a trace against a live cluster, each request at its time, and report what clients measured.

    Prompts are generated from the trace's block ids, so that they share prefixes as in the trace. With
    --predict the same rows first run through the simulator with calibrated costs.
    """
    options = TraceOptions(
        format=trace_format, num_rows=rows, divide_lengths=divide_lengths, is_spread=is_spread
    )
    requests = requests_of(trace, options)
    objectives = (slo_ttft_s, slo_tbt_s)
    # Read whole before the first request is sent: a broken row must not end a run halfway.
    wanted = list(requests)
    runs: list[ClusterRun] = []
    if predict:
        known_settings("policy", "scheduling", [policy])
        known_settings("admission", "admission", [admission])
        spec = cluster_of(cluster, costs, [], requests.block_tokens)
        began = time.perf_counter()
        outcome = simulate(
            wanted, spec, policy, admission, speedup=speedup, slo_ttft_s=slo_ttft_s, slo_tbt_s=slo_tbt_s
        )
        runs.append(ClusterRun("predicted", outcome, outcome.summary(), time.perf_counter() - began))
    began = time.perf_counter()
    outcome, measured = asyncio.run(
        _drive(wanted, requests, url, model, api_key, speedup, objectives, sends_slo, seed)
    )
    runs.append(ClusterRun("measured", outcome, outcome.summary(), time.perf_counter() - began))
    errors = accuracy(runs[0].outcome, outcome) if predict else None
    report(requests, runs, measured, errors)
    if json_file is not None:
        write_whole(json_file, _json(requests.name, runs, measured, errors))
    if html_file is not None:
        write_whole(html_file, render_html(requests.name, runs))


async def _drive(
    wanted: list[TraceRow],
    requests: TraceRequests,
    url: str,
    model: str,
    api_key: str,
    speedup: float,
    objectives: tuple[float, float],
    sends_slo: bool,
    seed: int,
) -> tuple[RunResults, ReplayObservations]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    async with Endpoint(url, model, api_key) as endpoint:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("replaying", total=len(wanted))

            def show(sent: int, ended: int) -> None:
                bar.update(task, completed=ended, description=f"{sent - ended} under way")

            prompts = TracePrompts(requests.block_tokens, seed)
            return await Replay(endpoint, prompts, speedup, objectives, sends_slo, show).run(wanted)


def report(
    requests: TraceRequests,
    runs: list[ClusterRun],
    measured: ReplayObservations,
    errors: ReplayAccuracy | None,
) -> None:
    console = wide_console()
    console.print(table(requests.name, runs))
    if errors is not None:
        console.print(
            f"errors of the prediction over {errors.num_compared} requests: TTFT {errors.ttft_error:.1%}, "
            f"TBT {errors.tbt_error:.1%} (mean absolute error over the measured mean), hit rate "
            f"{errors.hit_rate_error:+.3f}, goodput {errors.goodput_error:+.1%}"
        )
    for reason, count in measured.errors.most_common(5):
        console.print(f"failed, {count} times: {reason}", markup=False)
    for reason, count in measured.rejections.most_common(5):
        console.print(f"rejected, {count} times: {reason}", markup=False)
    if measured.retry_after_s:
        least, most = min(measured.retry_after_s), max(measured.retry_after_s)
        console.print(f"Retry-After of the rejected: {least:g} to {most:g} s")
    if measured.num_without_retry_after:
        console.print(f"{measured.num_without_retry_after} rejections had no Retry-After")
    if measured.num_late:
        console.print(f"{measured.num_late} requests were sent late: this machine can't send that fast")


def _json(
    trace: str, runs: list[ClusterRun], measured: ReplayObservations, errors: ReplayAccuracy | None
) -> str:
    document: dict[str, object] = {
        "trace": trace,
        "runs": [{"name": run.name, **json.loads(run.outcome.to_json(rows=True))} for run in runs],
        "errors": dict(measured.errors),
        "rejections": dict(measured.rejections),
        "num_without_retry_after": measured.num_without_retry_after,
        "num_late": measured.num_late,
    }
    if errors is not None:
        document["accuracy"] = msgspec.to_builtins(errors)
    return json.dumps(document) + "\n"
