# SPDX-License-Identifier: Apache-2.0
"""``mooncake top``: a whole cluster on one screen, from its gateway and from the store's master.

Each half works without the other: what can't be reached is one line with the reason. ``cluster_status.py``
computes the numbers, ``store_board.py`` draws the store. Nothing here waits longer than ``TIMEOUT_S`` for a
server, so that the screen stays alive while one is lost.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mooncake.cli.cluster_status import (
    GatewayStatus,
    InstanceRow,
    LatencyQuantiles,
    Traffic,
    TrafficWindow,
    read_sample,
    read_status,
    roles_of,
)
from mooncake.cli.explain import gateway_opener
from mooncake.cli.output import check_url, fail, print_json, printable, wide_console
from mooncake.cli.store import opened
from mooncake.cli.store_board import NARROW, board
from mooncake.errors import MooncakeError
from mooncake.security import tool_identity
from mooncake.store import Store
from mooncake.store import messages as m
from mooncake.store.ha.master_client import who_leads

TIMEOUT_S = 3.0
REOPEN_EVERY_S = 15.0
"""Pause between two attempts to reach a store."""
MAX_PAGE_BYTES = 16 << 20
MAX_DETAIL = 60
"""Characters of the text beside an instance."""


class MasterRow(msgspec.Struct, frozen=True):
    """What one master states of itself."""

    address: str
    role: str
    "``leader``, ``standby`` or ``unreachable``."
    term: int = 0
    problem: str = ""


class ClusterReading(msgspec.Struct, frozen=True):
    """All that is shown; an empty problem where a half was reached."""

    gateway: GatewayStatus | None
    gateway_problem: str
    traffic: Traffic | None
    traffic_problem: str
    store: m.MasterStatus | None
    store_problem: str
    masters: list[MasterRow]


class GatewayReader:
    """Reads a gateway's pages."""

    def __init__(self, url: str, admin_key: str) -> None:
        check_url(url)
        self.url = url.rstrip("/")
        self._admin_key = admin_key
        self._opener = gateway_opener()
        self._window = TrafficWindow()

    def status(self) -> tuple[GatewayStatus | None, str]:
        """The status, or why there is none."""
        content, problem = self._get("/status")
        try:
            return (None, problem) if problem else (read_status(content), "")
        except msgspec.DecodeError as error:
            return None, f"{self.url} is no gateway of ours: {error}"

    def traffic(self, now: float) -> tuple[Traffic | None, str]:
        """Traffic of the last minute, or why it is not known."""
        content, problem = self._get("/metrics")
        try:
            return (None, problem) if problem else (self._window.add(read_sample(content.decode()), now), "")
        except ValueError as error:
            return None, f"{self.url}/metrics can't be read: {error}"

    def _get(self, path: str) -> tuple[bytes, str]:
        request = urllib.request.Request(self.url + path)
        if self._admin_key:
            request.add_header("X-API-Key", self._admin_key)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                content = bytes(answer.read(MAX_PAGE_BYTES + 1))
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (401, 403):
                    return b"", "instances and traffic need the admin key: --admin-api-key or ADMIN_API_KEY"
                return b"", f"{self.url}{path} answers {error.code}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return b"", f"no gateway answers at {self.url}: {printable(str(error))}"
        return (content, "") if len(content) <= MAX_PAGE_BYTES else (b"", f"{self.url}{path} is too large")


class StoreReader:
    """Asks the store's masters; a store that can't be reached is tried again later."""

    def __init__(self, master: str) -> None:
        self._master = master
        self._stack = ExitStack()
        self._store: Store | None = None
        self._problem = ""
        self._tried_at = float("-inf")

    def status(self, now: float) -> tuple[m.MasterStatus | None, str]:
        """What the leading master knows, or why it is not known."""
        if self._store is None and now - self._tried_at >= REOPEN_EVERY_S:
            self._tried_at = now
            try:
                self._store = self._stack.enter_context(opened(self._master, timeout_s=TIMEOUT_S))
            except MooncakeError as error:
                self._problem = f"no store answers at {self._master}: {error}"
        if self._store is None:
            return None, self._problem
        try:
            found = self._store.ask(m.GetMasterStatus())
            assert isinstance(found, m.MasterStatus)
            return found, ""
        except MooncakeError as error:
            return None, f"the store at {self._master} does not answer: {error}"

    def masters(self) -> list[MasterRow]:
        """Each master of a list of addresses; one alone, or one that is elected elsewhere, is not listed."""
        addresses = [one.strip() for one in self._master.split(",") if one.strip()]
        if len(addresses) < 2 or "://" in self._master:
            return []
        return [_row_of(address) for address in addresses]

    def close(self) -> None:
        self._stack.close()


def _row_of(address: str) -> MasterRow:
    answer = who_leads(address, "mooncake top", 1.0, tool_identity())
    if isinstance(answer, MooncakeError):
        return MasterRow(address, "unreachable", problem=str(answer))
    return MasterRow(address, "leader" if answer.is_here else "standby", answer.term)


@dataclass
class ClusterReader:
    """Both halves of a cluster."""

    gateway: GatewayReader
    store: StoreReader
    _before: tuple[float, m.MasterStatus] | None = field(default=None, init=False)

    def read(self, now: float) -> ClusterReading:
        status, problem = self.gateway.status()
        traffic, traffic_problem = (None, "") if status is None else self.gateway.traffic(now)
        store, store_problem = self.store.status(now)
        masters = self.store.masters()
        return ClusterReading(status, problem, traffic, traffic_problem, store, store_problem, masters)

    def drawn(self, view: ClusterReading, now: float, width: int) -> Group:
        """The view as a renderable; the store's rates are those since the last one."""
        before, self._before = self._before, None if view.store is None else (now, view.store)
        parts = [*gateway_parts(view, self.gateway.url, width), Text(""), Rule("store", align="left")]
        if view.store is None:
            parts.append(Text(view.store_problem, style="yellow"))
        elif before is None:
            parts.append(board(view.store, view.store, 0.0, width < NARROW))
        else:
            parts.append(board(view.store, before[1], now - before[0], width < NARROW))
        if view.masters:
            parts += [Text(""), *master_lines(view.masters)]
        return Group(*parts)


def top(url: str, master: str, admin_key: str, once: bool, as_json: bool, every_s: float) -> None:
    """Show a cluster's status until Ctrl-C, or once.

    Exits with 1 where ``once`` reaches neither the gateway nor the store. Raises InvalidArgument.
    """
    console = wide_console()
    reader = ClusterReader(GatewayReader(url, admin_key), StoreReader(master))
    try:
        view = reader.read(now := time.monotonic())
        if as_json:
            store = None if view.store is None else msgspec.structs.asdict(view.store)
            print_json(msgspec.structs.asdict(view) | {"store": store})
        elif once or not console.is_terminal:
            console.print(reader.drawn(view, now, console.width), soft_wrap=not console.is_terminal)
        else:
            _live(console, reader, view, every_s)
        if view.gateway is None and view.store is None:
            fail("neither the gateway nor the store was reached")
    except KeyboardInterrupt:
        return
    finally:
        reader.store.close()


def _live(console: Console, reader: ClusterReader, view: ClusterReading, every_s: float) -> None:
    with Live(reader.drawn(view, time.monotonic(), console.width), console=console, screen=True) as live:
        while True:
            time.sleep(every_s)
            view = reader.read(now := time.monotonic())
            live.update(reader.drawn(view, now, console.width), refresh=True)


def gateway_parts(view: ClusterReading, url: str, width: int) -> list[RenderableType]:
    """The gateway's half, in lines and tables."""
    parts: list[RenderableType] = [Rule(f"gateway {url}", align="left")]
    status = view.gateway
    if status is None:
        return [*parts, Text(view.gateway_problem, style="yellow")]
    parts.append(Text(printable(_head(status))))
    if status.degraded:
        parts.append(Text(f"degraded: {printable(status.degraded)}", style="yellow"))
    if view.traffic is not None:
        parts += [Text(line) for line in traffic_lines(view.traffic)]
    if status.instances is None:
        return [
            *parts,
            Text(view.traffic_problem or "without the admin key no instance is shown", style="dim"),
        ]
    return [*parts, Text(""), instance_table(status, width < NARROW)]


def _head(status: GatewayStatus) -> str:
    if status.instances is None:
        counts = f"{status.prefill_node_count} prefill, {status.decode_node_count} decode instances"
        return f"model {status.model}; {counts}"
    ready = ", ".join(
        f"{role} {some} of {every} ready" for role, (some, every) in roles_of(status.instances).items()
    )
    wanted = ", ".join(f"{one.role} {one.desired}" for one in status.scaling if one.desired)
    parts = [f"model {status.model}", ready or "no instance", f"{status.requests_in_flight} in flight"]
    parts += [f"desired: {wanted}"] if wanted else []
    parts += [f"placed by {status.scheduling}", f"conductor {status.conductor}"] if status.scheduling else []
    return "; ".join(parts)


def traffic_lines(traffic: Traffic) -> list[str]:
    """Rates and latencies as text."""
    span = f"last {traffic.seconds:.0f} s" if traffic.seconds else "since its start"

    def number(value: float) -> str:
        found = traffic.rate(value)
        return f"{value:.0f}" if found is None else f"{found:.3g}/s"

    hits = "-" if traffic.cached_share is None else f"{100 * traffic.cached_share:.0f}%"
    return [
        f"{span}: requests {number(traffic.requests)}, rejected {number(traffic.rejected)}, "
        f"failed {number(traffic.failed)}, output tokens {number(traffic.output_tokens)}",
        f"prompt tokens cached {hits}; TTFT {_quantiles(traffic.ttft)}; TBT {_quantiles(traffic.tbt)}",
    ]


def _quantiles(found: LatencyQuantiles) -> str:
    if found.p50_s is None or found.p95_s is None:
        return "-"
    return f"p50 {_milliseconds(found.p50_s)}, p95 {_milliseconds(found.p95_s)}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def instance_table(status: GatewayStatus, is_narrow: bool) -> Table:
    """A row for each instance; a narrow one leaves out what a first look does not need."""
    table = Table(box=None, pad_edge=False)
    columns = ["instance", "role", "health", "requests", "queued"]
    columns += [] if is_narrow else ["blocks", "placed", "detail"]
    for name in columns:
        is_number = name in ("requests", "queued", "blocks", "placed")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for one in sorted(status.instances or [], key=lambda row: (row.role != "prefill", row.instance)):
        table.add_row(*_cells(one)[: len(columns)])
    return table


def _cells(one: InstanceRow) -> list[Any]:
    health = Text(printable(one.health), style="" if one.health == "ready" else "yellow")
    cells: list[Any] = [Text(printable(one.instance)), printable(one.role), health, str(one.num_requests)]
    cells += [f"{one.queued_tokens} tok", str(one.num_blocks), str(one.num_placed)]
    return [*cells, Text(printable(one.detail[:MAX_DETAIL]))]


def master_lines(masters: list[MasterRow]) -> list[Text]:
    """A line for each master."""
    width = max(len(one.address) for one in masters)
    return [
        Text(
            f"{one.address:{width}}  {one.role}"
            + (f": {one.problem}" if one.problem else f" in term {one.term}"),
            style="yellow" if one.problem else "",
        )
        for one in masters
    ]
