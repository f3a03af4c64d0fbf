# SPDX-License-Identifier: Apache-2.0
"""Diagrams that declarations imply, and selectors in queries."""

from __future__ import annotations

from mooncake.cli.metric_declarations import DeclaredMetric, declared_metrics
from mooncake.cli.panels import Panel, on_no_panel, panel_of, quantiles, selected, series_in, title_of


def test_what_a_declaration_implies() -> None:
    counter = DeclaredMetric("mooncake_store_lost_bytes_total", "counter", ("tier", "why"), "Bytes.", "x.py")
    assert panel_of(counter) == Panel(
        "Lost bytes, per second",
        "Bps",
        (
            (
                "sum by (tier, why) (rate(mooncake_store_lost_bytes_total[$__rate_interval]))",
                "{{tier}} {{why}}",
            ),
        ),
    )
    gauge = panel_of(DeclaredMetric("mooncake_x_wait_seconds", "gauge", (), "Wait.", "x.py"))
    assert (gauge.unit, gauge.queries) == ("s", (("mooncake_x_wait_seconds", "{{instance}}"),))
    instant = panel_of(DeclaredMetric("mooncake_x_start_timestamp_seconds", "gauge", (), "When.", "x.py"))
    assert (instant.title, instant.unit) == ("Start: time since then", "s")
    assert instant.queries == (("time() - mooncake_x_start_timestamp_seconds", "{{instance}}"),)
    histogram = panel_of(DeclaredMetric("vllm:step_seconds", "histogram", ("kind",), "Step.", "x.py"))
    assert [legend for _, legend in histogram.queries] == ["p50 {{kind}}", "p95 {{kind}}", "p99 {{kind}}"]
    assert title_of("mooncake_conductor_kv_event_gaps_total") == "KV event gaps"


def test_selectors_are_added_to_every_series() -> None:
    query = 'sum(rate(mooncake_a_total{met="true"}[5m])) / sum(vllm:b) and count(up == 0)'
    assert selected(query, ['x="1"']) == (
        'sum(rate(mooncake_a_total{met="true", x="1"}[5m])) / sum(vllm:b{x="1"}) and count(up{x="1"} == 0)'
    )


def test_quantiles_can_be_restricted_to_some_programs() -> None:
    (query, legend), *_ = quantiles("vllm:x_seconds", only="and on (instance) mooncake_y")
    assert query == (
        "histogram_quantile(0.5, sum by (le) (rate(vllm:x_seconds_bucket[$__rate_interval])"
        " and on (instance) mooncake_y))"
    )
    assert legend == "p50" and series_in(query) == {"vllm:x_seconds_bucket", "mooncake_y"}


def test_what_no_panel_shows() -> None:
    every = {one.name for one in declared_metrics()}
    shown = Panel("Objects", "short", (("max(mooncake_store_objects)", "readable"),))
    left = {one.name for one in on_no_panel([shown], ["mooncake_store_ha_number"])}
    assert every - left == {"mooncake_store_objects", "mooncake_store_ha_number"}
    assert "Objects that can be read" in shown.description
