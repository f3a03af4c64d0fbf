# SPDX-License-Identifier: Apache-2.0
"""Operator commands on a store: drain a node, verify what is stored, repair its files, watch it."""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mooncake.cli.store import display
from mooncake.cli.store.commands import DEFAULT, HERE, Json, Master, Tenant, opened
from mooncake.errors import InvalidArgument, Refusal
from mooncake.store import Store
from mooncake.store import messages as m
from mooncake.store import repair as repairing

VERIFY_BATCH_KEYS = 64
POLL_EVERY_S = 0.2
TOP_EVERY_S = 1.0
MAX_SUSPECTS = 5
"""Maximum number of hosts shown whose reports of wrong bytes were refuted."""


def drain(
    segments: Annotated[
        list[str], typer.Argument(metavar="SEGMENT...", help="Segments to drain; `top` shows their names.")
    ],
    targets: Annotated[
        list[str] | None, typer.Option("--to", metavar="SEGMENT", help="Target segment; may be repeated.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Concurrent copies.")] = 4,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is done; Ctrl-C cancels it.")
    ] = True,
    as_json: Json = False,
    master: Master = HERE,
) -> None:
    """Move all objects of segments elsewhere, so that their node can be stopped."""
    with opened(master) as store:
        job = store.drain(segments, targets or [], concurrency)
        if isinstance(job, Refusal):
            display.fail(str(job))
        if wait:
            job = _wait(store, job)
        if as_json:
            display.print_json(job)
        elif not wait:
            print(f"job {job.job_id} is under way")
        elif job.state == "done":
            print(f"drained {job.about}: {job.num_done} moved, {display.size(job.moved_bytes)}")
        if wait and job.state != "done":
            display.fail(
                f"job {job.job_id} {job.state}: {job.num_failed} failed, {job.num_left} left {job.reason}"
            )


def _wait(store: Store, job: m.JobStatus) -> m.JobStatus:
    with _progress() as progress:
        task = progress.add_task(f"draining {job.about}", total=None)
        try:
            while job.state in ("waiting", "running"):
                progress.update(
                    task, completed=job.num_done, total=job.num_done + job.num_failed + job.num_left
                )
                time.sleep(POLL_EVERY_S)
                job = store.job(job.job_id) or display.fail(f"the master no longer knows job {job.job_id}")
            progress.update(task, completed=job.num_done, total=max(1, job.num_done + job.num_left))
        except KeyboardInterrupt:
            store.cancel(job.job_id)
            raise
    return job


def verify(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys of objects.")] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="All keys with this prefix.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All objects of the tenant.")] = False,
    as_json: Json = False,
    tenant: Tenant = DEFAULT,
    master: Master = HERE,
) -> None:
    """Read every replica of objects and verify its bytes. Corrupt replicas are dropped."""
    if bool(keys) + bool(prefix) + everything != 1:
        raise InvalidArgument("verify", keys or prefix or "nothing", "keys, or --prefix, or --all")
    with opened(master, tenant, timeout_s=60.0) as store:
        names = list(keys or store.ask(m.ListKeys(prefix, 1 << 31, tenant)).keys)
        verdicts: dict[str, bool | None] = {}
        waiting = iter(names)
        with _progress() as progress:
            task = progress.add_task("verifying", total=len(names))
            while part := list(islice(waiting, VERIFY_BATCH_KEYS)):
                verdicts |= zip(part, store.verify(part), strict=True)
                progress.update(task, advance=len(part))
    wrong = [key for key, verdict in verdicts.items() if verdict is False]
    missing = [key for key, verdict in verdicts.items() if verdict is None]
    if as_json:
        display.print_json(verdicts)
    else:
        for key in wrong:
            print(f"wrong: {key}")
        for key in missing if keys else ():
            print(f"not found: {key}")
        gone = "" if keys else f", {len(missing)} removed meanwhile"
        print(f"{len(verdicts) - len(wrong) - len(missing)} good, {len(wrong)} wrong{gone}")
    if wrong or (keys and missing):
        raise SystemExit(1)


def repair(
    path: Annotated[Path, typer.Argument(help="Oplog of a master, or directory of a node's SSD.")],
    does_it: Annotated[
        bool, typer.Option("--yes", help="Repair; without it, the repair is only shown.")
    ] = False,
) -> None:
    """Show what can be recovered of a damaged oplog or SSD index, and, with `--yes`, repair it.

    The original file is kept beside it. Stop the master, or the node, first.
    """
    what = repairing.plan(path)
    for line in what.lines():
        print(line)
    if not what.is_damaged:
        return
    if not does_it:
        print(f"nothing was changed; `mooncake store repair {path} --yes` does this")
        raise SystemExit(1)
    repairing.repair(path)
    print("repaired")


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once and exit.")] = False,
    as_json: Json = False,
    master: Master = HERE,
) -> None:
    """Show live status: nodes, tiers, and requests of clients. Ctrl-C exits."""
    console = Console()
    with opened(master) as store:
        before = _status(store)
        if as_json:
            display.print_json(msgspec.structs.asdict(before))
            return
        if once or not console.is_terminal:
            console.print(board(before, before, 0.0), soft_wrap=True)
            return
        taken_at = time.monotonic()
        with Live(board(before, before, 0.0), console=console, screen=True) as live:
            while True:
                time.sleep(TOP_EVERY_S)
                status, now = _status(store), time.monotonic()
                live.update(board(status, before, now - taken_at))
                before, taken_at = status, now


def _status(store: Store) -> m.MasterStatus:
    status = store.ask(m.GetMasterStatus())
    assert isinstance(status, m.MasterStatus)
    return status


def board(status: m.MasterStatus, before: m.MasterStatus, seconds: float) -> Group:
    """The status as a renderable; ``before`` was taken so long ago."""
    counts = {name: value - before.counts.get(name, 0) for name, value in status.counts.items()}

    def rate(name: str) -> str:
        return f"{counts.get(name, 0) / seconds:.4g}/s" if seconds else f"{status.counts.get(name, 0)}"

    hits, lookups = counts.get("lookup_hits", 0), counts.get("lookups", 0)
    head = (
        f"{status.num_objects} objects, {status.num_writing} being written; "
        f"memory {display.size(status.allocated_bytes)} of {display.size(status.capacity_bytes)} "
        f"({display.share(status.allocated_bytes, status.capacity_bytes)})\n"
        f"puts {rate('puts')}, lookups {rate('lookups')} (hits {display.share(hits, lookups)}), "
        f"evicted {rate('evicted_objects')}, removed {rate('removed_objects')}, lost {rate('lost_objects')}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("segment", "tier", "state", "host", "objects", "used", "size", "full", "tasks"):
        is_number = name in ("objects", "used", "size", "full", "tasks")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for one in status.segments:
        state = "draining" if one.is_draining else "resting" if one.rests_s else one.state
        table.add_row(
            Text(one.segment),
            one.tier,
            Text(state, style="" if state == "alive" else "yellow"),
            Text(one.host[:12]),
            str(one.num_objects),
            display.size(one.allocated_bytes),
            display.size(one.size_bytes),
            display.share(one.allocated_bytes, one.size_bytes),
            str(one.num_tasks),
        )
    parts = [Text(head), Text(""), table if status.segments else Text("no node is mounted")]
    suspects = [one for one in status.reporters if one.num_refuted]
    for suspect in sorted(suspects, key=lambda one: -one.num_refuted)[:MAX_SUSPECTS]:
        what = f"{suspect.num_refuted} of {suspect.num_reports} reports of wrong bytes were refuted"
        parts.append(Text(f"{suspect.reporter}: {what}: check its memory", style="yellow"))
    return Group(*parts)


def _progress() -> Progress:
    """A progress bar on standard error, shown only in a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
