# SPDX-License-Identifier: Apache-2.0
"""Diagrams as data: title, queries with legends, unit; and the diagram that a metric's declaration implies.

A query is written without the selectors of a board's variables; ``selected`` adds them to every series that
is ours. The text below a diagram's title is that of its metrics' declarations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.cli.metric_declarations import DeclaredMetric, declared_metrics

INTERVAL = "$__rate_interval"
"""Grafana's variable for the shortest sensible span of a rate."""
TIMESTAMP = "_timestamp_seconds"
"""End of the name of a gauge that is an instant, in seconds since 1970."""
SERIES = re.compile(r"(?<![\w:\"])((?:mooncake_|vllm:)\w+|up\b)(?:\{([^}]*)\})?")
"""A series that is ours in a query, with its selectors."""


@dataclass(frozen=True)
class Panel:
    """A diagram: its title, queries with their legends, and the unit by Grafana's name."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    is_number: bool = False
    """Shown as one number for each series, the latest."""

    @property
    def names(self) -> set[str]:
        """Names of the series in its queries."""
        return {name for query, _ in self.queries for name in series_in(query)}

    @property
    def description(self) -> str:
        """What its metrics are, by their declarations."""
        found = [one for one in declared_metrics() if self.names & set(one.series)]
        return "\n\n".join(f"`{one.name}`: {one.text.rstrip('.')}." for one in found)


def series_in(query: str) -> set[str]:
    """Names of series in a query."""
    return {match[1] for match in SERIES.finditer(query)}


def selected(query: str, selectors: Sequence[str]) -> str:
    """The query with ``selectors`` added to each of its series."""
    if not selectors:
        return query
    return SERIES.sub(
        lambda match: f"{match[1]}{{{', '.join([*filter(None, [match[2]]), *selectors])}}}", query
    )


def rate(metric: str, by: str = "") -> str:
    """Query of a counter's rate, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[{INTERVAL}]))"


def share(part: str, whole: str, by: str = "") -> str:
    """Query of the share that one counter's rate is of another's."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def quantiles(metric: str, by: str = "", only: str = "") -> tuple[tuple[str, str], ...]:
    """Queries of a histogram's median and high quantiles, with legends; ``only`` restricts the series."""
    more, legend = (
        (f", {by}", "".join(f" {{{{{one.strip()}}}}}" for one in by.split(","))) if by else ("", "")
    )
    buckets = f"rate({metric}_bucket[{INTERVAL}]){f' {only}' if only else ''}"
    return tuple(
        (
            f"histogram_quantile({part}, sum by (le{more}) ({buckets}))",
            f"p{round(part * 100)}{legend}",
        )
        for part in (0.5, 0.95, 0.99)
    )


def panel_of(metric: DeclaredMetric) -> Panel:
    """The diagram that a metric's declaration implies."""
    by = ", ".join(metric.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    title = title_of(metric.name)
    if metric.kind == "histogram":
        return Panel(title, _unit(metric.name, False), quantiles(metric.name, by))
    if metric.kind == "counter":
        return Panel(
            f"{title}, per second", _unit(metric.name, True), ((rate(metric.name, by), legend or "all"),)
        )
    legend = f"{{{{instance}}}} {legend}".strip()
    if metric.name.endswith(TIMESTAMP):  # an instant, of which a diagram of durations would show decades
        title = title_of(metric.name.removesuffix(TIMESTAMP))
        return Panel(f"{title}: time since then", "s", ((f"time() - {metric.name}", legend),))
    return Panel(title, _unit(metric.name, False), ((metric.name, legend),))


def title_of(name: str) -> str:
    """``Evicted bytes`` of ``mooncake_store_evicted_bytes_total``."""
    words = re.sub(r"^(mooncake_[a-z0-9]+_|vllm:)|_total$", "", name).split("_")
    shown = [{"kv": "KV", "http": "HTTP", "ha": "masters'", "slo": "SLO"}.get(word, word) for word in words]
    text = " ".join(shown)
    return text[0].upper() + text[1:]


def _unit(name: str, is_rate: bool) -> str:
    base = name.removesuffix("_total")
    if base.endswith("_bytes"):
        return "Bps" if is_rate else "bytes"
    if base.endswith("_seconds"):
        return "none" if is_rate else "s"  # seconds in a second
    if base.endswith("_requests"):
        return "reqps" if is_rate else "short"
    return "ops" if is_rate else "short"


def on_no_panel(panels: Sequence[Panel], without: Sequence[str]) -> list[DeclaredMetric]:
    """Declared metrics that no query of ``panels`` names, except those ``without`` a diagram."""
    named = {name for panel in panels for name in panel.names}
    return [one for one in declared_metrics() if not named & set(one.series) and one.name not in without]
