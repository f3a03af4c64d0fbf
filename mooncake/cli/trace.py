# SPDX-License-Identifier: Apache-2.0
"""``mooncake trace ID``: what each process did for a request, as a waterfall or as a file for Perfetto.

Knows the gateway's HTTP answer and the terminal, nothing of the cluster.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mooncake.cli.explain import ask_gateway, no_gateway, read_answer
from mooncake.cli.output import check_writable, write_whole
from mooncake.errors import AccessDenied, InvalidArgument, PeerLost, ProtocolError
from mooncake.tracing.perfetto import trace_events
from mooncake.tracing.spans import Span, children_of

_TIMEOUT_S = 30.0
_BAR_WIDTH = 48
_WIDE = 140
"""Columns of a terminal from which on processes and attributes are shown, too."""
_SHOWN = (
    "mooncake.tokens",
    "mooncake.blocks",
    "mooncake.found_blocks",
    "mooncake.bytes",
    "mooncake.source",
    "mooncake.policy",
    "server.address",
    "gen_ai.request.model",
)
"""Attributes in the table; ``--json`` has them all."""


class FetchedTrace(msgspec.Struct):
    """A gateway's answer."""

    id: str
    request_id: str
    trace_id: str
    spans: list[Span]
    missing: list[str] = []


def trace(name: str, url: str, key: str, as_json: bool, perfetto: Path | None) -> None:
    """Query the gateway at ``url``, and print or write the trace.

    Raises:
        InvalidArgument: no trace of such a request is kept, the URL is malformed, or both forms are wanted.
        AccessDenied: a key is required.
        PeerLost, ProtocolError: the gateway is unreachable, or the server is no gateway.
    """
    if as_json and perfetto is not None:
        raise InvalidArgument("--perfetto", str(perfetto), "left out with --json, which prints the answer")
    check_writable(perfetto, "--perfetto")
    content = _fetch(name, url.rstrip("/"), key)
    if as_json:
        print(json.dumps(read_answer(content, url), indent=2))
        return
    try:
        found = msgspec.json.decode(content, type=FetchedTrace)
    except msgspec.MsgspecError as error:
        raise no_gateway(url, error) from error
    if perfetto is not None:
        write_whole(perfetto, json.dumps(trace_events(found.spans)), "--perfetto")
        print(f"wrote {len(found.spans)} spans to {perfetto}; open it at https://ui.perfetto.dev")
        return
    show(Console(), found)


def _fetch(name: str, url: str, key: str) -> bytes:
    path = f"/v1/requests/{urllib.parse.quote(name, safe='')}/trace"
    headers = {"X-API-Key": key} if key else {}
    return ask_gateway(url, path, headers, lambda status, body: _refused(status, body, name, url), _TIMEOUT_S)


def _refused(status: int, body: bytes, name: str, url: str) -> Exception:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ProtocolError(f"{url} answered {status}; is it a Mooncake gateway?")
    if status == 404:
        return InvalidArgument("ID", name, f"the id of a request whose trace is still kept ({message})")
    if status in (401, 403):
        return AccessDenied(f"{message}; pass --admin-api-key")
    return PeerLost(f"{url} answered {status}: {message}")


def show(console: Console, found: FetchedTrace) -> None:
    """Print the spans as a tree, each with its place in time."""
    if not found.spans:
        console.print("no spans")
        return
    root = found.spans[0]  # a span below it may begin earlier, by another host's clock
    whole_s = max(span.end_s for span in found.spans) - root.start_s
    services = {(span.service, span.instance): None for span in found.spans}
    console.print(
        f"[bold]{escape(found.id)}[/bold]  trace {escape(found.trace_id)}, "
        f"{_duration(root.end_s - root.start_s)}, {len(found.spans)} spans of {len(services)} processes",
        highlight=False,
    )
    is_wide = console.width >= _WIDE
    width = _BAR_WIDTH if is_wide else min(_BAR_WIDTH, max(8, console.width - 56))
    rows = list(_in_tree(root, found.spans))
    begins = [_duration(span.start_s - root.start_s) for span, _ in rows]
    lasts = [_duration(span.end_s - span.start_s) for span, _ in rows]
    table = Table(box=None, pad_edge=False)
    table.add_column("span", no_wrap=True)
    for heading, times in (("begins", begins), ("lasts", lasts)):  # names are cut before numbers are
        table.add_column(heading, justify="right", no_wrap=True, min_width=max(map(len, times)))
    table.add_column("", no_wrap=True, width=width)
    if is_wide:
        table.add_column("process", no_wrap=True)
        table.add_column("")
    for (span, depth), begin, last in zip(rows, begins, lasts, strict=True):
        bar = _bar(span.start_s - root.start_s, span.end_s - root.start_s, whole_s or 1.0, width)
        style = "red" if span.error else {"server": "bold", "client": "cyan"}.get(span.kind, "")
        cells = [
            Text("  " * depth + span.name, style=style),
            Text(begin),
            Text(last),
            Text(bar, style=style),
        ]
        if is_wide:
            process = f"{span.service.removeprefix('mooncake-')} {span.instance}"
            cells += [Text(process, style="dim"), Text(_details(span), style="dim")]
        table.add_row(*cells)
    console.print(table)
    for instance in found.missing:
        console.print(f"[yellow]{escape(instance)} did not return its spans[/yellow]", highlight=False)


def _in_tree(root: Span, spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Each span with its depth, a parent before what is below it."""
    below = children_of(spans, root)
    waiting = [(root, 0)]
    while waiting:
        span, depth = waiting.pop()
        yield span, depth
        # Taken out: no span is visited twice.
        children = sorted(below.pop(span.span_id, ()), key=lambda one: (one.start_s, one.end_s), reverse=True)
        waiting += [(child, depth + 1) for child in children]


def _bar(began_s: float, ended_s: float, whole_s: float, width: int) -> str:
    first = min(width - 1, max(0, int(width * began_s / whole_s)))
    end = min(width, max(first + 1, round(width * ended_s / whole_s)))
    return " " * first + "━" * (end - first)


def _details(span: Span) -> str:
    shown = [
        f"{name.rpartition('.')[2]} {span.attributes[name]}" for name in _SHOWN if name in span.attributes
    ]
    return ", ".join([f"error {span.error}"] * bool(span.error) + shown)


def _duration(seconds: float) -> str:
    return f"{seconds:.3f} s" if abs(seconds) >= 1.0 else f"{seconds * 1e3:.2f} ms"
