# SPDX-License-Identifier: Apache-2.0
"""Options for requests, objectives and machines that commands share, and their interpretation."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import typer

from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import InvalidArgument
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.node_costs import load_costs
from mooncake.sim.traces import generators
from mooncake.sim.traces.trace import Trace, TraceOptions, TraceRow, read_trace

CLUSTER_FORMS = "8P8D (disaggregated), 16xvllm, 16xprefix, 16xchunked (colocated), or a TOML file"


def _above_zero(speedup: float) -> float:
    if not speedup > 0:
        raise InvalidArgument("--speedup", speedup, "more than 0")
    return speedup


TraceSpec = Annotated[
    str,
    typer.Argument(
        metavar="TRACE", help="A trace file (.jsonl, .csv, .gz), or a generator: agentic:sessions=75,turns=30"
    ),
]
Format = Annotated[
    Literal["auto", "mooncake", "sessions", "azure"],
    typer.Option("--format", help="Format of the trace file."),
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
    typer.Option("--speedup", help="Factor by which requests come faster.", callback=_above_zero),
]
SloTtft = Annotated[
    float, typer.Option("--slo-ttft", metavar="SECONDS", min=0, help="Objective of the time to first token.")
]
SloTbt = Annotated[
    float, typer.Option("--slo-tbt", metavar="SECONDS", min=0, help="Objective of the time between tokens.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="FIELD=VALUE",
        help="Override a field of the cluster: cache_tokens=3000000; may be repeated.",
    ),
]

_DISAGGREGATED = re.compile(r"(\d+)p\+?(\d+)d", re.IGNORECASE)
_COLOCATED = re.compile(r"(\d+)x(vllm|prefix|chunked)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class TraceRequests:
    """A trace file or a generator; iterated once per run, the same each time."""

    name: str
    rows: Trace | generators.Generator
    num_rows: int
    """Maximum number; 0: all of them."""

    def __iter__(self) -> Iterator[TraceRow]:
        rows: Iterable[TraceRow] = self.rows
        for number, row in enumerate(rows, 1):
            yield row
            if number == self.num_rows:
                return

    @property
    def block_tokens(self) -> int:
        return self.rows.block_tokens

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
        if not Path(spec).is_file():
            kinds = ", ".join(f"{kind}:..." for kind in generators.KINDS)
            raise InvalidArgument("TRACE", spec, f"a file that exists, or {kinds}")
        return TraceRequests(Path(spec).name, read_trace(spec, options), 0)
    for field in dataclasses.fields(TraceOptions):
        value = getattr(options, field.name)
        if field.name != "num_rows" and value != field.default:
            raise InvalidArgument(field.name, value, f"left out with a generator ({spec})")
    return TraceRequests(spec, generator, options.num_rows)


def cluster_of(text: str, costs: str, changes: Sequence[str], block_tokens: int) -> ClusterSpec:
    """A cluster by its short form or its file, with ``field=value`` changes. Raises InvalidArgument."""
    fields: dict[str, Any]
    if match := _DISAGGREGATED.fullmatch(text):
        fields = {"num_prefill": int(match[1]), "num_decode": int(match[2])}
    elif match := _COLOCATED.fullmatch(text):
        num_nodes = int(match[1])
        fields = {"num_prefill": num_nodes, "num_decode": 0, "mode": match[2].lower()}
    elif Path(text).is_file():
        fields = _file(text)
        costs = str(fields.pop("costs", costs))
    else:
        raise InvalidArgument("--cluster", text, CLUSTER_FORMS)
    known_settings = {field.name for field in dataclasses.fields(ClusterSpec)} - {"costs"}
    for change in changes:
        name, is_pair, value = change.partition("=")
        name = name.strip().replace("-", "_")
        if not is_pair or name not in known_settings:
            raise InvalidArgument(
                "--with", change, f"FIELD=VALUE with one of {', '.join(sorted(known_settings))}"
            )
        fields[name] = value.strip()
    for name in fields:
        if name not in known_settings:
            raise InvalidArgument(text, name, f"one of {', '.join(sorted(known_settings | {'costs'}))}")
    fields.setdefault("block_tokens", block_tokens)
    return _checked(text, {**fields, "costs": load_costs(costs)})


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
        raise InvalidArgument(
            field or name, fields.get(field, name), message[:1].lower() + message[1:]
        ) from error


def known_settings(what: str, field: str, names: Sequence[str]) -> list[str]:
    """``names`` if the conductor's settings have them. Raises InvalidArgument."""
    allowed = get_args(get_type_hints(SchedulingSettings)[field])
    for name in names:
        if name not in allowed:
            raise InvalidArgument(f"--{what}", name, ", ".join(allowed))
    return list(dict.fromkeys(names))
