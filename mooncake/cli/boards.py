# SPDX-License-Identifier: Apache-2.0
"""What watches a cluster: Prometheus' configuration and alerts, and a board for Grafana.

The queries are data here, so that a test can compare every name in them with the metrics of the code and with
the pages of a running cluster. An alert names the page of ``docs/`` that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake.cli.deploy import DeploySettings

SOURCE = "mooncake-prometheus"
"""Name of the data source in Grafana."""
SCRAPE = "15s"


@dataclass(frozen=True)
class Alert:
    """An alert: the PromQL condition, how long it must hold, and what it means."""

    name: str
    condition: str
    holds: str
    severity: str
    summary: str
    page: str


ALERTS = (
    Alert(
        "MooncakeTargetDown",
        "up == 0",
        "2m",
        "critical",
        "A program's page of metrics is not answered.",
        "operations.md",
    ),
    Alert(
        "MooncakeNoLeader",
        "absent(mooncake_store_ha_leads == 1)",
        "1m",
        "critical",
        "No master leads: puts and lookups wait.",
        "masters.md",
    ),
    Alert(
        "MooncakeNoStandby",
        "max(mooncake_store_ha_standbys) < 1 and max(mooncake_store_ha_term) > 0",
        "10m",
        "warning",
        "No standby is in sync: a loss of the leader loses what only it knows.",
        "masters.md",
    ),
    Alert(
        "MooncakeOplogUnwritable",
        "mooncake_store_oplog_unwritable == 1",
        "1m",
        "critical",
        "The master's log can't be written: puts are refused.",
        "operations.md",
    ),
    Alert(
        "MooncakeObjectsCorrupt",
        "increase(mooncake_store_corrupt_replicas_total[10m]) > 0",
        "0m",
        "critical",
        "Replicas had wrong bytes and were dropped.",
        "operations.md",
    ),
    Alert(
        "MooncakeReportsRefuted",
        "increase(mooncake_store_refuted_reports_total[1h]) > 0",
        "0m",
        "warning",
        "A machine reports wrong bytes where there are none: its memory, card or kernel may be bad.",
        "operations.md",
    ),
    Alert(
        "MooncakeNodeNotMounted",
        "mooncake_store_mounted == 0",
        "2m",
        "warning",
        "A node's memory is not part of the store.",
        "operations.md",
    ),
    Alert(
        "MooncakePutsRefused",
        "rate(mooncake_store_refused_puts_total[5m]) > 0.05 * rate(mooncake_store_puts_total[5m])",
        "10m",
        "warning",
        "The store refuses more than one put in twenty.",
        "operations.md",
    ),
    Alert(
        "MooncakeLoadsFail",
        "sum by (operation) (rate(mooncake_inference_kv_link_failures_total[5m])) > 0.1",
        "10m",
        "warning",
        "Engines compute blocks that they should have loaded.",
        "metrics.md",
    ),
    Alert(
        "MooncakeMemoryOverdue",
        "increase(mooncake_connectors_memory_overdue_seconds_total[5m]) > 0",
        "0m",
        "warning",
        "An engine waits for its memory beyond a deadline.",
        "metrics.md",
    ),
    Alert(
        "MooncakeGatewayFails",
        'sum(rate(mooncake_gateway_requests_total{status=~"5.."}[5m]))'
        " > 0.05 * sum(rate(mooncake_gateway_requests_total[5m]))",
        "5m",
        "critical",
        "More than one request in twenty fails.",
        "gateway.md",
    ),
    Alert(
        "MooncakeRequestsRejected",
        "sum(rate(mooncake_conductor_rejected_total[5m])) > 1",
        "10m",
        "warning",
        "Admission rejects more than one request per second: more instances, or other objectives.",
        "operations.md",
    ),
    Alert(
        "MooncakeInstancesMissing",
        "max by (role) (mooncake_conductor_desired_instances)"
        " > 1.2 * max by (role) (mooncake_conductor_serving_instances)",
        "15m",
        "warning",
        "Fewer instances serve than are needed: the autoscaler's limit is reached, or new ones do not start.",
        "deployment.md",
    ),
    Alert(
        "MooncakeConnectionsRefused",
        "sum by (server, reason) (rate(mooncake_rpc_refused_total[5m])) > 1",
        "10m",
        "warning",
        "A server refuses connections or requests: wrong credentials, or a faulty peer.",
        "security.md",
    ),
    Alert(
        "MooncakeUnexpectedEvents",
        "increase(mooncake_unexpected_events_total[10m]) > 0",
        "0m",
        "warning",
        "A state machine met an event that its table lacks: a fault of the program.",
        "operations.md",
    ),
)


@dataclass(frozen=True)
class Panel:
    """A diagram: its title, queries with their legends, and the unit by Grafana's name."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    more, legend = (f", {by}", f" {{{{{by}}}}}") if by else ("", "")
    return tuple(
        (
            f"histogram_quantile({share}, sum by (le{more}) (rate({metric}_bucket[$__rate_interval])))",
            f"p{round(share * 100)}{legend}",
        )
        for share in (0.5, 0.95, 0.99)
    )


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests by status",
            "reqps",
            (("sum by (status) (rate(mooncake_gateway_requests_total[$__rate_interval]))", "{{status}}"),),
        ),
        Panel("Answers in progress", "short", (("sum(mooncake_gateway_requests_in_flight)", "answers"),)),
        Panel("Time to the first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
        Panel(
            "Tokens",
            "short",
            (("sum by (kind) (rate(mooncake_gateway_tokens_total[$__rate_interval]))", "{{kind}}/s"),),
        ),
        Panel(
            "Objectives met",
            "percentunit",
            (
                (
                    'sum by (slo) (rate(mooncake_gateway_slo_total{met="true"}[$__rate_interval]))'
                    " / sum by (slo) (rate(mooncake_gateway_slo_total[$__rate_interval]))",
                    "{{slo}}",
                ),
            ),
        ),
        Panel(
            "Rejected by admission, and retried",
            "reqps",
            (
                ("sum by (code) (rate(mooncake_conductor_rejected_total[$__rate_interval]))", "{{code}}"),
                (
                    "sum by (stage) (rate(mooncake_gateway_retries_total[$__rate_interval]))",
                    "retried: {{stage}}",
                ),
            ),
        ),
    ),
    "Engines": (
        Panel("Requests waiting", "short", (("vllm:num_requests_waiting", "{{instance}}"),)),
        Panel("Requests running", "short", (("vllm:num_requests_running", "{{instance}}"),)),
        Panel("KV cache in use", "percentunit", (("vllm:kv_cache_usage_perc", "{{instance}}"),)),
        Panel(
            "Prompt tokens found cached",
            "percentunit",
            (
                (
                    "sum(rate(vllm:prefix_cache_hits_total[$__rate_interval]))"
                    " / sum(rate(vllm:prefix_cache_queries_total[$__rate_interval]))",
                    "in the engine",
                ),
                (
                    "sum(rate(vllm:external_prefix_cache_hits_total[$__rate_interval]))"
                    " / sum(rate(vllm:external_prefix_cache_queries_total[$__rate_interval]))",
                    "in the pool",
                ),
            ),
        ),
        Panel(
            "KV loaded and saved",
            "Bps",
            (
                ("sum(rate(mooncake_inference_kv_loaded_bytes_total[$__rate_interval]))", "loaded"),
                ("sum(rate(mooncake_inference_kv_saved_bytes_total[$__rate_interval]))", "saved"),
            ),
        ),
        Panel(
            "Lookups, loads and saves that failed",
            "ops",
            (
                (
                    "sum by (operation) (rate(mooncake_inference_kv_link_failures_total[$__rate_interval]))",
                    "{{operation}}",
                ),
            ),
        ),
    ),
    "Store": (
        Panel(
            "Memory",
            "bytes",
            (
                ("max(mooncake_store_allocated_bytes)", "in use or reserved"),
                ("max(mooncake_store_capacity_bytes)", "capacity"),
            ),
        ),
        Panel("Objects", "short", (("max(mooncake_store_objects)", "readable"),)),
        Panel(
            "Keys looked up",
            "ops",
            (
                ("sum(rate(mooncake_store_lookup_hits_total[$__rate_interval]))", "found"),
                ("sum(rate(mooncake_store_lookups_total[$__rate_interval]))", "all"),
            ),
        ),
        Panel(
            "Puts",
            "ops",
            (
                ("sum(rate(mooncake_store_puts_total[$__rate_interval]))", "readable"),
                ("sum(rate(mooncake_store_refused_puts_total[$__rate_interval]))", "refused"),
            ),
        ),
        Panel(
            "Bytes evicted, copied to SSD and back",
            "Bps",
            (
                ("sum(rate(mooncake_store_evicted_bytes_total[$__rate_interval]))", "evicted"),
                ("sum(rate(mooncake_store_demoted_bytes_total[$__rate_interval]))", "to SSD"),
                ("sum(rate(mooncake_store_promoted_bytes_total[$__rate_interval]))", "from SSD"),
            ),
        ),
        Panel("Flushes of the log", "s", _quantiles("mooncake_store_oplog_flush_seconds")),
        Panel(
            "Leader, and standbys in sync",
            "short",
            (
                ("mooncake_store_ha_leads", "leads: {{instance}}"),
                ("max(mooncake_store_ha_standbys)", "standbys"),
            ),
        ),
        Panel(
            "Bytes moved by path",
            "Bps",
            (
                (
                    "sum by (path, op) (rate(mooncake_transfer_moved_bytes_total[$__rate_interval]))",
                    "{{path}} {{op}}",
                ),
            ),
        ),
    ),
}


def files(settings: DeploySettings) -> dict[str, Any]:
    """Rules, the board, and what makes Grafana find it. ``prometheus`` is the compose file's part."""
    return {
        "monitoring/rules.yaml": {"groups": rule_groups()},
        "monitoring/board.json": board(),
        "monitoring/grafana-datasources.yaml": {
            "apiVersion": 1,
            "datasources": [
                {
                    "name": "Prometheus",
                    "uid": SOURCE,
                    "type": "prometheus",
                    "access": "proxy",
                    "url": "http://prometheus:9090",
                    "isDefault": True,
                }
            ],
        },
        "monitoring/grafana-dashboards.yaml": {
            "apiVersion": 1,
            "providers": [
                {"name": "mooncake", "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}
            ],
        },
    }


def rule_groups() -> list[dict[str, Any]]:
    """The alerts as groups of rules."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.condition,
            "for": alert.holds,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "page": f"docs/{alert.page}"},
        }
        for alert in ALERTS
    ]
    return [{"name": "mooncake", "rules": rules}]


def board() -> dict[str, Any]:
    """The board, as Grafana imports it: a row of diagrams for each part."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, found in ROWS.items():
        panels.append(
            {"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []}
        )
        y += 1
        for number, panel in enumerate(found):
            at = {"x": 8 * (number % 3), "y": y + 8 * (number // 3), "w": 8, "h": 8}
            panels.append(_diagram(panel, at))
        y += 8 * -(-len(found) // 3)
    for number, one in enumerate(panels, 1):
        one["id"] = number
    return {
        "uid": "mooncake",
        "title": "Mooncake",
        "tags": ["mooncake"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
    }


def _diagram(panel: Panel, at: Mapping[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": SOURCE}
    return {
        "type": "timeseries",
        "title": panel.title,
        "gridPos": dict(at),
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def queries() -> list[str]:
    """Every PromQL expression of the alerts and the board."""
    found = [alert.condition for alert in ALERTS]
    return found + [query for row in ROWS.values() for panel in row for query, _ in panel.queries]


def prometheus(targets: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Prometheus' configuration for programs by their host's name, with scheme and port."""
    folder = "/etc/prometheus/secrets"
    jobs: dict[tuple[str, str], list[str]] = {}
    for name, (scheme, port) in targets.items():
        jobs.setdefault((name.rstrip("0123456789").rstrip("-"), scheme), []).append(f"{name}:{port}")
    found = []
    for (job, scheme), addresses in jobs.items():
        entry: dict[str, Any] = {"job_name": job, "scheme": scheme}
        if scheme == "https":
            # The certificate names no host; the authority is the cluster's own.
            entry["tls_config"] = {
                "ca_file": f"{folder}/ca.pem",
                "cert_file": f"{folder}/prometheus.pem",
                "key_file": f"{folder}/prometheus.key",
                "server_name": "localhost",
            }
        entry["authorization"] = {"credentials_file": f"{folder}/admin.key"}
        entry["static_configs"] = [{"targets": addresses}]
        found.append(entry)
    return {
        "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": ["rules.yaml"],
        "scrape_configs": found,
    }
