# SPDX-License-Identifier: Apache-2.0
"""``mooncake doctor``: examine a live deployment and print what is wrong with it, as text or JSON.

It owns the output and the exit status: 0 without findings of the chosen severity, 1 with some. With
``--watch-s`` it repeats the examination and serves metrics.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from mooncake import clock
from mooncake.cli.role_command import Invocation, run_until_stopped
from mooncake.doctor.checks import examine
from mooncake.doctor.examination import Examination
from mooncake.doctor.facts import EngineFacts, Facts, Shot
from mooncake.doctor.findings import DoctorFinding, Severity
from mooncake.doctor.settings import DoctorSettings as DoctorSettings
from mooncake.doctor.watch import watch

_COLOURS = {Severity.BROKEN: "red", Severity.WASTEFUL: "yellow", Severity.NOTICE: "cyan"}


def doctor(given: Invocation) -> None:
    """Examine once and exit, or repeat."""
    settings = given.settings
    assert isinstance(settings, DoctorSettings)
    if settings.watch_s:
        run_until_stopped(watch, settings)
        return
    began = clock.monotonic()
    facts = asyncio.run(Examination(settings).run())
    findings = examine(facts, settings.expectations)
    seconds = clock.monotonic() - began
    if settings.json:
        sys.stdout.write(msgspec.json.encode(as_json(facts, findings, seconds)).decode() + "\n")
    else:
        show(Console(highlight=False, soft_wrap=True), facts, findings, seconds)
    sys.exit(exit_status(findings, Severity(settings.fail_on)))


def exit_status(findings: Sequence[DoctorFinding], least: Severity) -> int:
    """1 if a finding has at least this severity."""
    order = [*Severity]
    return int(any(order.index(one.severity) <= order.index(least) for one in findings))


def as_json(facts: Facts, findings: Sequence[DoctorFinding], seconds: float) -> dict[str, Any]:
    """The examination for programs: findings, and the facts behind them."""
    counts = {severity: sum(one.severity is severity for one in findings) for severity in Severity}
    return {"findings": findings, "counts": counts, "seconds": round(seconds, 3), "facts": facts}


def show(console: Console, facts: Facts, findings: Sequence[DoctorFinding], seconds: float) -> None:
    """Print the examination for people: what was examined, and then what is wrong."""
    for line in examined(facts):
        console.print(escape(line))
    console.print()
    for one in findings:
        colour = _COLOURS[one.severity]
        console.print(
            f"[bold {colour}]{one.severity:8}[/] [bold]{one.code}[/]  {one.link} {escape(one.where)}"
        )
        console.print(f"  seen    {escape(one.seen)}")
        console.print(f"  matters {escape(one.why)}")
        console.print(f"  remedy  {escape(one.remedy)}")
    counts = ", ".join(
        f"{sum(one.severity is severity for one in findings)} {severity}" for severity in Severity
    )
    console.print(f"{counts}; examined in {seconds:.1f} s")


def examined(facts: Facts) -> list[str]:
    """One line for each part that was examined."""
    lines = []
    if facts.gateway is not None:
        one = facts.gateway
        what = (
            f"mooncake {one.version}, conductor {one.conductor or 'not shown'}" if one.is_ours else "a router"
        )
        state = what if one.reach.is_fine else one.reach.trouble
        lines.append(f"gateway  {one.address}  {state}{_shots(one.first, one.second)}")
    for engine in facts.engines:
        lines.append(f"engine   {engine.address}  {_engine(engine)}{_shots(engine.first, engine.second)}")
    if facts.store is not None:
        store = facts.store
        used = f"{store.allocated_bytes >> 20} of {store.capacity_bytes >> 20} MiB used"
        state = f"{store.num_segments} segments, {used}"
        lines.append(f"store    {store.address}  {state if store.reach.is_fine else store.reach.trouble}")
    if facts.host is not None and facts.host.disk_bytes_per_s:
        lines.append(f"disk     {facts.host.disk}  writes {facts.host.disk_bytes_per_s / 1e6:.0f} MB/s")
    return lines


def _engine(engine: EngineFacts) -> str:
    if not engine.reach.is_fine:
        return engine.reach.trouble
    parts = [f"{engine.kind} {engine.version}".strip(), engine.role]
    parts.append(f"blocks of {engine.block_tokens} tokens" if engine.block_tokens else "")
    if engine.publishers is not None:
        num_batches = sum(one.num_batches for one in engine.publishers)
        parts.append(f"{num_batches} event batches" if engine.publishers else "no events")
    if engine.crossed_tokens is not None:
        parts.append(f"{engine.crossed_tokens} tokens from elsewhere")
    return ", ".join(part for part in parts if part)


def _shots(first: Shot | None, second: Shot | None) -> str:
    if first is None or not first.is_answered:
        return ""
    counts = [str(_shown(one)) for one in (first, second) if one is not None]
    return f"; canary of {first.prompt_tokens} tokens: {' then '.join(counts)} cached"


def _shown(shot: Shot) -> int | str:
    """Cached tokens as the answer says, or else as counters do."""
    found = shot.reused if shot.cached_tokens is None else shot.cached_tokens
    return "an unknown number" if found is None else found
