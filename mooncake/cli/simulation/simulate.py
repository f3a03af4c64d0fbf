"""``mooncake simulate``: a trace through one or more clusters and policies, side by side."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mooncake.cli.simulation.asked import CLUSTER_FORMS, Requests, cluster_of, requests_of
from mooncake.cli.simulation.shown import Run, table, wide_console
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.sim.serving import simulate
from mooncake.sim.spec import ClusterSpec
from mooncake.sim.traces import TraceOptions

TRACE_HELP = "A trace file (.jsonl, .csv, .gz), or a generator: agentic:sessions=75,turns=30"
Format = Literal["auto", "mooncake", "sessions", "azure"]


def simulate_command(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help=TRACE_HELP)],
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="How prefill and decode are chosen; may be repeated.")
    ] = None,
    clusters: Annotated[
        list[str] | None, typer.Option("--cluster", help=f"{CLUSTER_FORMS}; may be repeated.")
    ] = None,
    admissions: Annotated[
        list[str] | None, typer.Option("--admission", help="Who is rejected early; may be repeated.")
    ] = None,
    costs: Annotated[
        str, typer.Option("--costs", metavar="NAME|FILE", help="What work costs on a node.")
    ] = "llama3-70b-8xA800",
    slo_ttft_s: Annotated[float, typer.Option("--slo-ttft", metavar="SECONDS", min=0)] = 30.0,
    slo_tbt_s: Annotated[float, typer.Option("--slo-tbt", metavar="SECONDS", min=0)] = 0.1,
    speedup: Annotated[float, typer.Option("--speedup", help="Requests come that many times as fast.")] = 1.0,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Only the first ones; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of policies that draw lots.")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="FIELD=VALUE", help="Of the cluster: cache_tokens=3000000; repeated."),
    ] = None,
    trace_format: Annotated[Format, typer.Option("--format", help="Of the trace file.")] = "auto",
    divide_lengths: Annotated[int, typer.Option("--divide-lengths", min=1)] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write summaries and time lines.")
    ] = None,
    with_rows: Annotated[bool, typer.Option("--json-rows", help="And every request.")] = False,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots (extra `plot`).")
    ] = None,
) -> None:
    """Run a trace through the real conductor and simulated nodes, and say how well it went.

    Nothing is written unless the whole trace was read: a broken row ends the command with its number.
    """
    options = TraceOptions(format=trace_format, num_rows=rows, divide_lengths=divide_lengths)
    requests = requests_of(trace, options)
    watched = ["watches_blocks=true"] if html_file else []
    specs = {
        text: cluster_of(text, costs, [*watched, *(changes or [])], requests.block_tokens)
        for text in clusters or ["8P8D"]
    }
    chosen = known("policy", "scheduling", policies or ["overlap"])
    rules = known("admission", "admission", admissions or ["none"])
    runs = [
        _run(requests, name, spec, policy, rule, seed, speedup, (slo_ttft_s, slo_tbt_s))
        for name, spec in specs.items()
        for policy in chosen
        for rule in rules
    ]
    wide_console().print(table(requests.name, runs))
    if json_file is not None:
        write_whole(json_file, _json(requests.name, runs, with_rows))
    if html_file is not None:
        from mooncake.cli.simulation.page import page  # matplotlib is slow to load, and an extra

        write_whole(html_file, page(requests.name, runs))


def _run(
    requests: Requests,
    cluster: str,
    spec: ClusterSpec,
    policy: str,
    admission: str,
    seed: int,
    speedup: float,
    objectives: tuple[float, float],
) -> Run:
    if not speedup > 0:
        raise InvalidArgument("--speedup", speedup, "more than 0")
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
    return Run(name, outcome, outcome.summary(), time.perf_counter() - began)


@contextmanager
def _bar(name: str) -> Iterator[tuple[Progress, TaskID]]:
    """On standard error, and only where somebody looks at it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(name, total=1.0, text="")


def known(what: str, field: str, names: list[str]) -> list[str]:
    """``names`` if the conductor's settings have them. Raises InvalidArgument."""
    allowed = get_args(get_type_hints(SchedulingSettings).get(field)) or ("none",)
    for name in names:
        if name not in allowed:
            raise InvalidArgument(f"--{what}", name, ", ".join(allowed))
    return list(dict.fromkeys(names))


def _json(trace: str, runs: list[Run], with_rows: bool) -> str:
    documents = [{"name": run.name, **json.loads(run.outcome.to_json(rows=with_rows))} for run in runs]
    return msgspec.json.format(json.dumps({"trace": trace, "runs": documents}), indent=1) + "\n"


def write_whole(file: Path, text: str) -> None:
    """The whole file or none."""
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with open(handle, "w") as out:
            out.write(text)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except OSError as error:
        raise InvalidArgument("file", str(file), f"a file that can be written ({error.strerror})") from error
