# SPDX-License-Identifier: Apache-2.0
"""Options for requests, objectives and machines that commands share, and their interpretation.

Whether a text is a file is asked with ``os.path.isfile``: a text that can be no path, which ``Path`` raises
for, is none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec
import typer

from mooncake import config
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.sim.serving.capacity_planner import MAX_NODES
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.cost_comparison import ClusterOffer
from mooncake.sim.serving.node_costs import NodeCosts, load_costs
from mooncake.sim.silicon.row_costs import FORM, RowCosts
from mooncake.sim.traces import generators
from mooncake.sim.traces.trace import Trace, TraceOptions, TraceRow, read_trace

CLUSTER_FORMS = (
    "8P8D (disaggregated), 8P8D1S (with a store node), 16xvllm, 16xprefix, 16xchunked, 16xchunked_prefix "
    "(colocated), each with @COSTS and ,FIELD=VALUE where wanted, or a TOML file"
)
COSTS_FORMS = f"NAME|FILE, {FORM} (fitted to measured rows), or PREFILL+DECODE where these nodes differ"


LEAST_SPEEDUP, MOST_SPEEDUP = 1e-3, 1e6
"""A slower trace has more samples of its timeline than a simulation ends with."""


def _in_range(speedup: float) -> float:
    if not LEAST_SPEEDUP <= speedup <= MOST_SPEEDUP:
        allowed = f"a number from {LEAST_SPEEDUP:g} to {MOST_SPEEDUP:,.0f}"
        raise InvalidArgument("--speedup", speedup, allowed)
    return speedup


def _finite(option: typer.CallbackParam, objective_s: float) -> float:
    if not math.isfinite(objective_s):  # JSON has no such number
        raise InvalidArgument(option.opts[0], objective_s, "a finite number of seconds; 0 is no objective")
    return objective_s


TraceSpec = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="A trace file (.jsonl, .csv, .gz), - for standard input, or a generator: "
        "agentic:sessions=75,turns=30",
    ),
]
Format = Annotated[
    Literal["auto", "mooncake", "sessions", "csv", "azure", "recording"],
    typer.Option("--format", help="Format of the trace file."),
]
BlockTokens = Annotated[
    int,
    typer.Option(
        "--block-tokens",
        metavar="TOKENS",
        min=0,
        help="Tokens of a block in the trace file; 0 is its format's own size.",
    ),
]
TimeUnit = Annotated[
    Literal["auto", "s", "ms", "us", "ns"],
    typer.Option("--time-unit", help="Unit of the trace file's times, where they are numbers."),
]
MaxSilence = Annotated[
    float,
    typer.Option(
        "--max-silence",
        metavar="SECONDS",
        min=0,
        help="A longer time without a request in the trace file is refused, in a recording only if it is "
        "longer than a week; 0 allows any.",
    ),
]
NumRows = Annotated[int, typer.Option("--rows", min=0, help="Number of rows to read; 0 is all.")]
DivideLengths = Annotated[
    int, typer.Option("--divide-lengths", min=1, help="Factor by which prompts and answers are shorter.")
]
Spread = Annotated[
    bool,
    typer.Option("--spread", help="Spread rows with equal (rounded) times evenly until the next time."),
]
Speedup = Annotated[
    float,
    typer.Option("--speedup", help="Factor by which requests come faster.", callback=_in_range),
]
SloTtft = Annotated[
    float,
    typer.Option(
        "--slo-ttft",
        metavar="SECONDS",
        min=0,
        help="Objective of the time to first token; 0 is none.",
        callback=_finite,
    ),
]
SloTbt = Annotated[
    float,
    typer.Option(
        "--slo-tbt",
        metavar="SECONDS",
        min=0,
        help="Objective of the time between tokens; 0 is none.",
        callback=_finite,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="FIELD=VALUE",
        help="Override a field of the cluster: cache_tokens=3000000; may be repeated.",
    ),
]

_DISAGGREGATED = re.compile(r"(\d+)p\+?(\d+)d(?:\+?(\d+)s)?", re.IGNORECASE)
_COLOCATED = re.compile(r"(\d+)x(vllm|prefix|chunked_prefix|chunked)", re.IGNORECASE)
_NAMED = re.compile(r"([^=,@]+)=(.*)", re.DOTALL)
_SPOT = ":spot"


@dataclasses.dataclass(frozen=True)
class TraceRequests:
    """A trace file or a generator; iterated once per run, the same each time."""

    name: str
    rows: Trace | generators.Generator
    num_rows: int
    """Maximum number; 0: all of them."""
    spooled: IO[bytes] | None = dataclasses.field(default=None, compare=False, repr=False)
    """What a pipe gave, in a file that is deleted with this object: a pipe can be read once only."""

    def __iter__(self) -> Iterator[TraceRow]:
        rows: Iterable[TraceRow] = self.rows
        for number, row in enumerate(rows, 1):
            yield row
            if number == self.num_rows:
                return

    @property
    def block_tokens(self) -> int:
        return self.rows.block_tokens

    def at_load(self, load: float) -> tuple[TraceRequests, float]:
        """``load`` times as many requests in the same time, and the factor by which they must come faster for
        that: more agents at once where agents are generated, else 1 becomes ``load``."""
        if not isinstance(self.rows, generators.Agentic):
            return self, load
        agents = self.rows
        sessions = self.num_sessions(load)
        requests = round(agents.requests * sessions / agents.sessions)
        more = dataclasses.replace(agents, sessions=sessions, requests=requests)
        num_rows = round(self.num_rows * sessions / agents.sessions)
        return dataclasses.replace(self, rows=more, num_rows=max(num_rows, min(self.num_rows, 1))), 1.0

    def num_sessions(self, load: float) -> int:
        """Sessions at once at a multiple of the load; 0 where requests are not made as sessions."""
        if not isinstance(self.rows, generators.Agentic):
            return 0
        return max(1, round(self.rows.sessions * load))

    @property
    def num_known(self) -> int:
        """The number of requests, 0 where it is not known before."""
        num_made = 0 if isinstance(self.rows, Trace) else getattr(self.rows, "requests", 0)
        return min(num_made, self.num_rows or num_made)

    def share(self, num_arrived: int) -> float:
        """The part of it that has arrived: 0 to 1. For a file, by bytes, because its rows are not counted
        before."""
        if isinstance(self.rows, Trace) and not self.num_rows:
            return self.rows.read_bytes / max(1, self.rows.size_bytes)
        total = self.num_rows or getattr(self.rows, "num_rows", 0)
        return min(1.0, num_arrived / max(1, total))


def requests_of(spec: str, options: TraceOptions) -> TraceRequests:
    """``spec``: a file, or a generator such as ``agentic:sessions=75``. Raises InvalidArgument."""
    generator = generators.parse(spec)
    if generator is None:
        spooled = _spooled(spec)
        if spooled is None and not os.path.isfile(spec):
            kinds = ", ".join(f"{kind}:..." for kind in generators.KINDS)
            allowed = f"a file that exists, a pipe, - for standard input, or {kinds}"
            raise InvalidArgument("TRACE", spec, allowed)
        if spooled is not None and not Path(spooled.name).stat().st_size:
            what = "standard input" if spec == "-" else spec
            raise InvalidArgument("TRACE", what, "a trace of at least one row; this one is empty")
        rows = read_trace(spooled.name if spooled is not None else spec, options)
        next(iter(rows), None)  # what the first row shows is noted before a long run
        for note in rows.notes:
            typer.echo(f"note: {spec}: {note}", err=True)
        name = "standard input" if spec in ("-", "/dev/stdin") else Path(spec).name
        return TraceRequests(name, rows, 0, spooled)
    for field in dataclasses.fields(TraceOptions):
        value = getattr(options, field.name)
        if field.name != "num_rows" and value != field.default:
            raise InvalidArgument(field.name, value, f"left out with a generator ({spec})")
    return TraceRequests(spec, generator, options.num_rows)


def _spooled(spec: str) -> IO[bytes] | None:
    """A copy of standard input (``-``) or of a pipe; None for other files."""
    if spec != "-" and not (os.path.exists(spec) and Path(spec).is_fifo()):
        return None
    copy = tempfile.NamedTemporaryFile(prefix="mooncake-trace-", suffix=".spooled")  # noqa: SIM115, kept open
    with open(sys.stdin.fileno() if spec == "-" else spec, "rb", closefd=spec != "-") as source:
        shutil.copyfileobj(source, copy)
    copy.flush()
    return copy


def cluster_of(text: str, costs: str, changes: Sequence[str], block_tokens: int) -> ClusterSpec:
    """A cluster by its short form or its file, with ``field=value`` changes. Raises InvalidArgument."""
    return offer_of(text, costs, changes, block_tokens).spec


def offer_of(text: str, costs: str, changes: Sequence[str], block_tokens: int) -> ClusterOffer:
    """The same with its name (``NAME=`` before it, else the whole text) and that of its hardware."""
    named = None if os.path.isfile(text) else _NAMED.fullmatch(text)
    title, form = (named[1].strip(), named[2]) if named else (text, text)
    own_changes: list[str] = []
    if not os.path.isfile(form):
        form, *own_changes = form.split(",")
        form, is_given, given = form.partition("@")
        costs = given if is_given else costs
    fields, costs = _fields_of(form, costs)
    hardware = _hardware_of(costs)
    known_settings = {field.name for field in dataclasses.fields(ClusterSpec)} - {"costs", "decode_costs"}
    for change in [*changes, *own_changes]:
        name, is_pair, value = change.partition("=")
        name = name.strip().replace("-", "_")
        if not is_pair or name not in known_settings:
            raise InvalidArgument(
                "--with", change, f"FIELD=VALUE with one of {', '.join(sorted(known_settings))}"
            )
        fields[name] = value.strip()
    for name in fields:
        if name not in known_settings:
            raise InvalidArgument(form, name, f"one of {', '.join(sorted(known_settings | {'costs'}))}")
    fields.setdefault("block_tokens", block_tokens)
    if hardware.is_spot:
        fields["spot"] = "prefill"
    fields["costs"] = _costs_of(hardware.prefill)
    if hardware.decode != hardware.prefill:
        fields["decode_costs"] = _costs_of(hardware.decode)
    spec = _checked(form, fields)
    if spec.block_tokens != block_tokens:
        allowed = f"left out, or the {block_tokens} tokens that a key of the trace stands for"
        raise InvalidArgument("block_tokens", spec.block_tokens, allowed)
    num_nodes = spec.num_prefill + spec.num_decode + spec.num_store
    if num_nodes > MAX_NODES:
        raise InvalidArgument(
            "--cluster", text, f"at most {MAX_NODES} nodes: every request takes time for each"
        )
    return ClusterOffer(title, spec, hardware_name(hardware.prefill), hardware_name(hardware.decode))


def _fields_of(form: str, costs: str) -> tuple[dict[str, Any], str]:
    """The fields of a cluster, and its costs."""
    if match := _DISAGGREGATED.fullmatch(form):
        fields = {"num_prefill": int(match[1]), "num_decode": int(match[2]), "num_store": int(match[3] or 0)}
        return fields, costs
    if match := _COLOCATED.fullmatch(form):
        return {"num_prefill": int(match[1]), "num_decode": 0, "mode": match[2].lower()}, costs
    if os.path.isfile(form):
        fields = _file(form)
        return fields, str(fields.pop("costs", costs))
    raise InvalidArgument("--cluster", form, CLUSTER_FORMS)


class _Hardware(NamedTuple):
    prefill: str
    decode: str
    is_spot: bool


def _hardware_of(costs: str) -> _Hardware:
    """``PREFILL``, ``PREFILL+DECODE``, and ``:spot`` behind the first."""
    if os.path.isfile(costs):
        return _Hardware(costs, costs, False)
    prefill, _, decode = costs.partition("+")
    if decode.endswith(_SPOT):
        allowed = "spot instances only for prefill: what a decode node has in memory ends with it"
        raise InvalidArgument("--costs", costs, allowed)
    is_spot = prefill.endswith(_SPOT)
    prefill = prefill.removesuffix(_SPOT)
    return _Hardware(prefill, decode or prefill, is_spot)


@functools.cache
def _costs_of(name: str) -> NodeCosts:
    """A built-in node, a file, or one that is fitted to rows, once a process."""
    rows = None if os.path.isfile(name) else RowCosts.parse(name)
    return load_costs(name) if rows is None else rows.costs()


def hardware_name(costs: str) -> str:
    """Name of the hardware of a costs file, or of rows; a built-in one is its own."""
    rows = None if os.path.isfile(costs) else RowCosts.parse(costs)
    if rows is not None:
        return rows.hardware(_costs_of(costs))
    return Path(costs).stem if os.path.isfile(costs) else costs


def _file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument("--cluster", path, f"a TOML file ({error})") from error


def _checked(name: str, fields: dict[str, Any]) -> ClusterSpec:
    """Text from ``--with`` becomes numbers and truths; ranges are those of ``ClusterSpec``."""
    try:
        return msgspec.convert(fields, ClusterSpec, strict=False, from_attributes=True)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`")
        hints = get_type_hints(ClusterSpec, include_extras=True)
        if field in hints:
            option = config.Option(field, field, hints[field], None, "")
            raise InvalidArgument(field, fields[field], config.allowed(option)) from error
        raise InvalidArgument(name, field or name, f"a cluster ({message})") from error


def known_settings(what: str, field: str, names: Sequence[str]) -> list[str]:
    """``names`` if the conductor's settings have them. Raises InvalidArgument."""
    allowed = get_args(get_type_hints(SchedulingSettings)[field])
    for name in names:
        if name not in allowed:
            raise InvalidArgument(f"--{what}", name, ", ".join(allowed))
    return list(dict.fromkeys(names))
