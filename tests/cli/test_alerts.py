# SPDX-License-Identifier: Apache-2.0
"""Each alert fires on series that fulfil its condition, not on series that do not, and is explained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli.alerts import ALERTS, RUNBOOK, Alert, rule_groups
from mooncake.cli.metric_declarations import declared_metrics
from mooncake.cli.panels import series_in

PAGE = Path(__file__).parent.parent.parent / "docs" / RUNBOOK
STEADY, RISING = "0+0x300", "0+60x300"
"""Values of a series at each minute: one that stays at 0, one that grows by one per second."""

Series = dict[str, str]
CASES: dict[str, tuple[Series, Series]] = {
    "MooncakeTargetDown": ({"up": "0x300"}, {"up": "1x300"}),
    "MooncakeNoLeader": ({"mooncake_store_ha_leads": "0x300"}, {"mooncake_store_ha_leads": "1x300"}),
    "MooncakeNoStandby": (
        {"mooncake_store_ha_standbys": "0x300", "mooncake_store_ha_term": "3x300"},
        # Not elected: nothing is missing.
        {"mooncake_store_ha_standbys": "0x300", "mooncake_store_ha_term": "0x300"},
    ),
    "MooncakeOplogUnwritable": (
        {"mooncake_store_oplog_unwritable": "1x300"},
        {"mooncake_store_oplog_unwritable": "0x300"},
    ),
    "MooncakeObjectsCorrupt": (
        {"mooncake_store_corrupt_replicas_total": RISING},
        {"mooncake_store_corrupt_replicas_total": "7x300"},
    ),
    "MooncakeReportsRefuted": (
        {"mooncake_store_refuted_reports_total": RISING},
        {"mooncake_store_refuted_reports_total": "7x300"},
    ),
    "MooncakeNodeNotMounted": ({"mooncake_store_mounted": "0x300"}, {"mooncake_store_mounted": "1x300"}),
    "MooncakePutsRefused": (
        {"mooncake_store_refused_puts_total": "0+6x300", "mooncake_store_puts_total": "0+100x300"},
        {"mooncake_store_refused_puts_total": "0+4x300", "mooncake_store_puts_total": "0+100x300"},
    ),
    "MooncakeLoadsFail": (
        {'mooncake_inference_kv_link_failures_total{operation="load"}': RISING},
        {
            'mooncake_inference_kv_link_failures_total{operation="load"}': "0+1x300",
            "vllm:mooncake_connector_lookup_failures_total": "0+1x300",
            "vllm:mooncake_connector_failed_blocks_total": "0+4x300",
            "vllm:mooncake_connector_loaded_blocks_total": "0+100x300",
            "vllm:mooncake_connector_unsaved_blocks_total": "0+4x300",
            "vllm:mooncake_connector_saved_blocks_total": "0+100x300",
        },
    ),
    "MooncakePoolNeverHits": (
        {
            "vllm:external_prefix_cache_queries_total": "0+6000x300",
            "vllm:external_prefix_cache_hits_total": STEADY,
        },
        {
            "vllm:external_prefix_cache_queries_total": "0+6000x300",
            "vllm:external_prefix_cache_hits_total": "0+1x300",
        },
    ),
    "MooncakeMemoryOverdue": (
        {'mooncake_connectors_memory_overdue_seconds_total{operation="load"}': RISING},
        {
            'mooncake_connectors_memory_overdue_seconds_total{operation="load"}': "7x300",
            "vllm:mooncake_connector_memory_overdue_seconds_total": STEADY,
        },
    ),
    "MooncakeGatewayFails": (
        {
            'mooncake_gateway_requests_total{endpoint="/v1/completions", status="503"}': "0+10x300",
            'mooncake_gateway_requests_total{endpoint="/v1/completions", status="200"}': "0+100x300",
        },
        {
            'mooncake_gateway_requests_total{endpoint="/v1/completions", status="429"}': "0+10x300",
            'mooncake_gateway_requests_total{endpoint="/v1/completions", status="200"}': "0+100x300",
            'mooncake_gateway_requests_total{endpoint="/ready", status="503"}': "0+100x300",
        },
    ),
    "MooncakeRequestsRejected": (
        {'mooncake_conductor_rejected_total{code="overload"}': "0+90x300"},
        {'mooncake_conductor_rejected_total{code="overload"}': "0+30x300"},
    ),
    "MooncakeInstancesMissing": (
        {
            'mooncake_conductor_desired_instances{role="prefill"}': "4x300",
            'mooncake_conductor_serving_instances{role="prefill"}': "3x300",
        },
        # Each role with its own.
        {
            'mooncake_conductor_desired_instances{role="prefill"}': "4x300",
            'mooncake_conductor_serving_instances{role="prefill"}': "4x300",
            'mooncake_conductor_serving_instances{role="decode"}': "1x300",
        },
    ),
    "MooncakeNoConductor": (
        {"mooncake_conductor_client_in_turn_total": RISING},
        {"mooncake_conductor_client_in_turn_total": STEADY},
    ),
    "MooncakeKvEventsLost": (
        {'mooncake_conductor_kv_event_gaps_total{outcome="lost"}': "0+1x300"},
        {'mooncake_conductor_kv_event_gaps_total{outcome="replayed"}': RISING},
    ),
    "MooncakeConnectionsRefused": (
        {'mooncake_rpc_refused_total{server="master", reason="denied"}': "0+90x300"},
        {'mooncake_rpc_refused_total{server="master", reason="denied"}': "0+30x300"},
    ),
    "MooncakeCertificateEnds": (
        {'mooncake_security_certificate_remaining_seconds{file="node.pem"}': "2590000x300"},
        {'mooncake_security_certificate_remaining_seconds{file="node.pem"}': "2600000x300"},
    ),
    "MooncakeUnexpectedEvents": (
        {'mooncake_unexpected_events_total{machine="m", state="s", event="e"}': RISING},
        {'mooncake_unexpected_events_total{machine="m", state="s", event="e"}': "7x300"},
    ),
}
FIRING_TOO: list[tuple[str, Series]] = [
    # Streams that broke after they had begun.
    (
        "MooncakeGatewayFails",
        {
            'mooncake_gateway_requests_total{endpoint="/v1/completions", status="broken"}': "0+10x300",
            'mooncake_gateway_requests_total{endpoint="/v1/completions", status="200"}': "0+100x300",
        },
    ),
    # What is lost in vLLM, one operation after the other, also where nothing ever succeeded.
    ("MooncakeLoadsFail", {"vllm:mooncake_connector_lookup_failures_total": "0+12x300"}),
    (
        "MooncakeLoadsFail",
        {
            "vllm:mooncake_connector_failed_blocks_total": "0+6x300",
            "vllm:mooncake_connector_loaded_blocks_total": "0+100x300",
        },
    ),
    (
        "MooncakeLoadsFail",
        {
            "vllm:mooncake_connector_unsaved_blocks_total": "0+6x300",
            "vllm:mooncake_connector_saved_blocks_total": STEADY,
        },
    ),
    ("MooncakeMemoryOverdue", {"vllm:mooncake_connector_memory_overdue_seconds_total": RISING}),
    # The first events: a series with labels begins with its first one, two minutes before.
    (
        "MooncakeMemoryOverdue",
        {'mooncake_connectors_memory_overdue_seconds_total{operation="load"}': "_x238 1x60"},
    ),
    ("MooncakeUnexpectedEvents", {'mooncake_unexpected_events_total{machine="m"}': "_x238 1x60"}),
]
WITHOUT_SERIES = {"MooncakeNoLeader"}
"""Alerts that a cluster without the series fires, too."""


def block(alert: Alert, series: Series, fires: bool) -> dict[str, Any]:
    """A test of promtool: after four hours of these series, does this alert fire?"""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert.name}", alertstate="firing"}})',
                "eval_time": "4h",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def promtool(
    folder: Path, blocks: dict[str, list[dict[str, Any]]], selectors: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the tests of each alert, by its name. Each has files of its own, with this one alert: of a file
    that has all of them, promtool would evaluate all at every minute of every test."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed, so rules were NOT TESTED; run scripts/install-servers")
    (group,) = rule_groups(selectors=selectors)
    rules = {one["alert"]: one for one in group["rules"]}
    for name, tests in blocks.items():
        one = {"groups": [{**group, "rules": [rules[name]]}]}
        (folder / f"{name}.rules.yaml").write_text(json.dumps(one))  # JSON is YAML
        content = {"rule_files": [f"{name}.rules.yaml"], "tests": tests}
        (folder / f"{name}.yaml").write_text(json.dumps(content))
    command = ["promtool", "test", "rules", *(f"{name}.yaml" for name in blocks)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_every_alert_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    assert CASES.keys() == {alert.name for alert in ALERTS}
    blocks: dict[str, list[dict[str, Any]]] = {}
    for alert in ALERTS:
        firing, silent = CASES[alert.name]
        blocks[alert.name] = [
            block(alert, firing, True),
            block(alert, silent, False),
            block(alert, {"unrelated": "1x300"}, alert.name in WITHOUT_SERIES),
            *(block(alert, series, True) for name, series in FIRING_TOO if name == alert.name),
        ]
    assert {name for name, _ in FIRING_TOO} <= blocks.keys()
    done = promtool(tmp_path, blocks)
    assert done.returncode == 0, done.stdout + done.stderr


def in_namespace(series: Series, namespace: str) -> Series:
    """Those series as Prometheus reads them in Kubernetes."""
    return {
        f"{name}, namespace={namespace!r}}}" if has_labels else f"{name}{{namespace={namespace!r}}}": values
        for name, has_labels, values in (
            (key.rstrip("}"), "{" in key, value) for key, value in series.items()
        )
    }


def test_alerts_of_a_namespace_are_those_of_its_own_series(tmp_path: Path) -> None:
    """Nothing elsewhere makes them fire, and nothing elsewhere keeps them from it."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    for alert in ALERTS:
        firing, silent = CASES[alert.name]
        blocks[alert.name] = [
            block(alert, {**in_namespace(firing, "other"), **in_namespace(silent, "ours")}, False),
            block(alert, {**in_namespace(firing, "ours"), **in_namespace(silent, "other")}, True),
        ]
    done = promtool(tmp_path, blocks, ('namespace="ours"',))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_expectation_is_reported(tmp_path: Path) -> None:
    """So that the test above can fail."""
    done = promtool(tmp_path, {ALERTS[0].name: [block(ALERTS[0], {"up": "1x300"}, True)]})
    assert done.returncode != 0 and "got" in done.stdout + done.stderr


def sections() -> dict[str, str]:
    """Text of each section of the page by its heading's anchor."""
    alerts = PAGE.read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    return {part.partition("\n")[0].lower(): part for part in alerts.split("\n### ")[1:]}


def test_every_alert_has_its_section() -> None:
    """``tests/test_docs.py`` checks the commands, flags and metrics in these sections."""
    rules = rule_groups("https://docs.example/mooncake/")[0]["rules"]
    found = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
    for name, url in found.items():
        page, _, anchor = url.partition("#")
        assert page == f"https://docs.example/mooncake/{RUNBOOK}"
        text = sections()[anchor]
        assert text.startswith(f"{name}\n*"), "the section begins with the meaning"
        assert len(text.split()) > 30, f"{name}: a section says what to look at, and what to do"
    assert len(found) == len(ALERTS) == len(sections())


def test_labels_that_a_section_names_are_those_of_its_alert() -> None:
    found = {}
    for alert in ALERTS:
        text = " ".join(sections()[alert.anchor].split())
        named = re.findall(r"labels? ((?:`\w+`(?:, | and |))+)", text)
        found[alert.name] = {label for words in named for label in re.findall(r"`(\w+)`", words)}
        groups = re.findall(r"\b(?:sum|max|absent)(?: by \(([^)]*)\))?", alert.condition)
        if groups:
            has = {label.strip() for group in groups for label in group.split(",")}
        else:
            has = {label for one in declared_metrics() for label in one.labels if one.name in alert.condition}
            has |= {"instance", "job"}
        assert found[alert.name] <= has, f"{alert.name}: its result has no such label"
    assert found["MooncakeConnectionsRefused"] == {"server", "reason"}, "labels are found in the text"


def test_conditions_name_declared_series_and_their_labels() -> None:
    known = {name: set(one.labels) for one in declared_metrics() for name in one.series} | {"up": set()}
    for alert in ALERTS:
        names = series_in(alert.condition)
        assert names and names <= known.keys(), alert.condition
        labels = {label for name in names for label in known[name]}
        used = re.findall(r"[{ ](\w+)=~?\"", alert.condition)
        used += [
            one.strip()
            for group in re.findall(r"by \(([^)]*)\)", alert.condition)
            for one in group.split(",")
        ]
        assert set(used) <= labels, alert.condition
