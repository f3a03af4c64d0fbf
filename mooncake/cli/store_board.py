# SPDX-License-Identifier: Apache-2.0
"""The store's status as tables for a terminal: of ``mooncake store top`` and ``mooncake top``."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mooncake.cli.output import printable, share_text, size_text
from mooncake.store import messages as m

MAX_SUSPECTS = 5
"""Maximum number of hosts shown whose reports of wrong bytes were refuted."""
WIDE_COLUMNS = ("segment", "tier", "state", "host", "objects", "used", "size", "full", "tasks")
NARROW_COLUMNS = ("segment", "tier", "state", "used", "full")
NARROW = 90
"""Columns of a terminal below which tables leave out what matters less."""


def board(status: m.MasterStatus, before: m.MasterStatus, seconds: float, is_narrow: bool = False) -> Group:
    """The status as a renderable; ``before`` was taken so long ago, 0 shows totals since the start."""
    counts = dict(status.counts)
    if seconds:
        counts = {name: value - before.counts.get(name, 0) for name, value in counts.items()}

    def rate(name: str) -> str:
        return f"{counts.get(name, 0) / seconds:.4g}/s" if seconds else f"{counts.get(name, 0)}"

    hits, lookups = counts.get("lookup_hits", 0), counts.get("lookups", 0)
    head = (
        f"{status.num_objects} objects, {status.num_writing} being written; "
        f"memory {size_text(status.allocated_bytes)} of {size_text(status.capacity_bytes)} "
        f"({share_text(status.allocated_bytes, status.capacity_bytes)})\n"
        f"puts {rate('puts')}, lookups {rate('lookups')} (hits {share_text(hits, lookups)}), "
        f"evicted {rate('evicted_objects')}, removed {rate('removed_objects')}, lost {rate('lost_objects')}"
    )
    table = Table(box=None, pad_edge=False)
    for name in NARROW_COLUMNS if is_narrow else WIDE_COLUMNS:
        is_text = name in ("segment", "tier", "state", "host")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for one in status.segments:
        state = "draining" if one.is_draining else "resting" if one.rests_s else one.state
        if one.disk_full and state == "alive":
            state = "disk full"
        cells: dict[str, str | Text] = {
            "segment": Text(printable(one.segment)),
            "tier": one.tier,
            "state": Text(state, style="" if state == "alive" else "yellow"),
            "host": Text(printable(one.host[:12])),
            "objects": str(one.num_objects),
            "used": size_text(one.allocated_bytes),
            "size": size_text(one.size_bytes),
            "full": share_text(one.allocated_bytes, one.size_bytes),
            "tasks": str(one.num_tasks),
        }
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    parts = [Text(head), Text(""), table if status.segments else Text("no node is mounted")]
    suspects = [one for one in status.reporters if one.num_refuted]
    for suspect in sorted(suspects, key=lambda one: -one.num_refuted)[:MAX_SUSPECTS]:
        what = f"{suspect.num_refuted} of {suspect.num_reports} reports of wrong bytes were refuted"
        parts.append(Text(f"{printable(suspect.reporter)}: {what}: check its memory", style="yellow"))
    return Group(*parts)
