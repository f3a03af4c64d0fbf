# SPDX-License-Identifier: Apache-2.0
"""What the package says of its own metrics: name, kind, labels and meaning, read from its source.

Metrics are declared beside what they measure, in modules of different processes, some of which need torch. So
the declarations are read from syntax trees and no module is imported: the same facts for the reference page,
the boards and the tests of both. An expression that can't be read here is found by ``tests/test_docs.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mooncake

PACKAGE = Path(mooncake.__file__).parent
KINDS = {
    **dict.fromkeys(("Counter", "CounterMetricFamily"), "counter"),
    **dict.fromkeys(("Gauge", "GaugeMetricFamily", "gauge"), "gauge"),
    **dict.fromkeys(("Histogram", "HistogramMetricFamily"), "histogram"),
    **dict.fromkeys(("Summary", "SummaryMetricFamily"), "summary"),
}
ENDS = {
    "counter": ("",),
    "gauge": ("",),
    "summary": ("_sum", "_count"),
    "histogram": ("_bucket", "_sum", "_count"),
}
"""What is behind a metric's name in the names of its series, by kind."""
TABLES = {"COUNTERS": "counter", "TIMES": "histogram"}
"""Tables of names and meanings in a class that has a ``PREFIX``, by the kind of metric that each declares."""


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric by the name on the metrics page."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    module: str

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series."""
        return tuple(self.name + end for end in ENDS[self.kind])


@cache
def declared_metrics() -> tuple[DeclaredMetric, ...]:
    """Every metric of the package that our own names have, in the order of the names."""
    found: dict[str, DeclaredMetric] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if any(name in text for name in (*KINDS, *TABLES)):  # the others need not be parsed
            for one in metrics_in(ast.parse(text), path.relative_to(PACKAGE).as_posix()):
                found.setdefault(one.name, one)
    return tuple(found[name] for name in sorted(found))


def metrics_in(tree: ast.Module, module: str) -> Iterator[DeclaredMetric]:
    """Metrics that one module declares. Raises ValueError: a table has no literals."""
    try:
        yield from _metrics_in(tree, module)
    except ValueError as error:
        raise ValueError(f"{module}: {error}") from error


def _metrics_in(tree: ast.Module, module: str) -> Iterator[DeclaredMetric]:
    constants = local_texts_of(tree) | constants_of(tree)
    loops = loops_over_constants(tree, constants)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or called_name(call) not in KINDS or len(call.args) < 2:
            continue
        kind = KINDS[called_name(call)]
        for name, text in named_metrics(call, constants, loops):
            suffix = "_total" if kind == "counter" and not name.endswith("_total") else ""
            yield DeclaredMetric(name + suffix, kind, labels_of(call, constants), text, module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from metrics_of_tables(node, module)


def metrics_of_tables(node: ast.ClassDef, module: str) -> Iterator[DeclaredMetric]:
    """Metrics that a class declares by tables: our connectors' in vLLM, which adds its own labels."""
    values = constants_of(node)
    for prefix in texts_of(values.get("PREFIX"), {}):
        for name, kind in TABLES.items():
            for end, text in ast.literal_eval(values.get(name, ast.Dict([], []))).items():
                suffix = "_total" if kind == "counter" else ""
                yield DeclaredMetric(f"{prefix}_{end}{suffix}", kind, (), text, module)


def called_name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def texts_of(node: ast.expr | None, constants: Mapping[str, ast.expr]) -> list[str]:
    """Strings that an expression can be: a literal, a module's constant, or either branch of a condition."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp(body=body, orelse=other):
            return texts_of(body, constants) + texts_of(other, constants)
        case ast.Name(id=name) if name in constants:
            return texts_of(constants[name], {})
    return []


def constants_of(tree: ast.Module | ast.ClassDef) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return found


def local_texts_of(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that functions of a module give to a literal string before they pass it on."""
    return {name: value for node in ast.walk(tree) for name, value in _assigned_texts(node)}


def _assigned_texts(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str()) as value):
            yield name, value


def loops_over_constants(tree: ast.Module, constants: Mapping[str, ast.expr]) -> dict[ast.Call, ast.Dict]:
    """Calls in the body of ``for … in CONSTANT.items()``, with that dictionary."""
    found: dict[ast.Call, ast.Dict] = {}
    for node in ast.walk(tree):
        match node:
            case ast.For(iter=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="items"))):
                if isinstance(known := constants.get(name), ast.Dict):
                    found |= {inner: known for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    return found


def named_metrics(
    call: ast.Call, constants: Mapping[str, ast.expr], loops: Mapping[ast.Call, ast.Dict]
) -> list[tuple[str, str]]:
    """Names and descriptions that one call declares: one, or those of a dictionary that it is made for."""
    match call.args[0]:
        case ast.JoinedStr(values=[ast.Constant(value=str(prefix)), ast.FormattedValue()]) if call in loops:
            pairs = zip(loops[call].keys, loops[call].values, strict=True)
            rows = [
                value.elts if isinstance(value, ast.Tuple) else [key, value] for key, value in pairs if key
            ]
            return [(prefix + str(ast.literal_eval(row[0])), str(ast.literal_eval(row[1]))) for row in rows]
    texts = texts_of(call.args[1], constants)
    return [(name, texts[0]) for name in texts_of(call.args[0], constants) if texts]


def labels_of(call: ast.Call, constants: Mapping[str, ast.expr]) -> tuple[str, ...]:
    given = call.args[2] if len(call.args) > 2 else None
    for word in call.keywords:
        if word.arg in ("labelnames", "labels"):
            given = word.value
    if isinstance(given, ast.Name):
        given = constants.get(given.id)
    try:
        return tuple(ast.literal_eval(given)) if isinstance(given, ast.List | ast.Tuple) else ()
    except ValueError:
        return ()
