# SPDX-License-Identifier: Apache-2.0
"""What watches a cluster: boards for Grafana, Prometheus' configuration and its alerts, as files.

Four boards: the cluster as its users see it, the store, the conductor, the engines. The diagrams that answer
an operator's first questions are written here, in rows by question. Every other metric that the code declares
gets the diagram that its declaration implies, in a closed row at the end of the board that its name belongs
to: so no metric is missing, and what a diagram says of a metric is what the code says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake.cli.alerts import ALERTS, rule_groups
from mooncake.cli.deploy import DeploySettings
from mooncake.cli.metric_declarations import DeclaredMetric
from mooncake.cli.panels import INTERVAL, Panel, on_no_panel, panel_of, quantiles, rate, selected, share

SOURCE = "mooncake-prometheus"
"""Name of the data source in Grafana."""
SCRAPE = "15s"

AT_GATEWAYS = "and on (instance) mooncake_gateway_requests_in_flight"
AT_ENGINES = "unless on (instance) mooncake_gateway_requests_in_flight"
"""Gateways and engines measure latencies under the same names."""

OF_NAMESPACE = 'namespace="$namespace"'

NOT_ON_A_BOARD = {
    "mooncake_store_ha_number": "counts records; mooncake_store_ha_lag has how far standbys are behind",
}
"""Metrics without a diagram, with the reason."""


@dataclass(frozen=True)
class Board:
    """A board: its rows of diagrams by title, and how the names of metrics begin that belong to it."""

    name: str
    title: str
    about: str
    prefixes: tuple[str, ...]
    rows: Mapping[str, tuple[Panel, ...]]
    has_models: bool = False
    """Its series have the model's name as a label where the engine is vLLM."""

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows.values() for panel in row]

    @property
    def selectors(self) -> tuple[str, ...]:
        """Selectors of its variables, but the namespace."""
        instance = 'instance=~"$instance"'
        return (instance, 'model_name=~"$model"') if self.has_models else (instance,)


CLUSTER = Board(
    "cluster",
    "Mooncake: cluster",
    "Requests as clients see them, and the state of every program.",
    (),
    {
        "State": (
            Panel(
                "Programs whose metrics are not answered",
                "short",
                (("count(up == 0) or vector(0)", "programs"),),
                is_number=True,
            ),
            Panel(
                "Instances that serve",
                "short",
                (("max by (role) (mooncake_conductor_serving_instances)", "{{role}}"),),
                is_number=True,
            ),
            Panel(
                "Masters that lead", "short", (("sum(mooncake_store_ha_leads)", "masters"),), is_number=True
            ),
        ),
        "Requests": (
            Panel(
                "Requests by status",
                "reqps",
                ((rate("mooncake_gateway_requests_total", "status"), "{{status}}"),),
            ),
            Panel("Answers in progress", "short", (("sum(mooncake_gateway_requests_in_flight)", "answers"),)),
            Panel(
                "Tokens per second", "short", ((rate("mooncake_gateway_tokens_total", "kind"), "{{kind}}"),)
            ),
            Panel(
                "Time to the first token",
                "s",
                quantiles("vllm:time_to_first_token_seconds", only=AT_GATEWAYS),
            ),
            Panel(
                "Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds", only=AT_GATEWAYS)
            ),
            Panel(
                "Prompt tokens found cached",
                "percentunit",
                (
                    (
                        share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
                        "in the engine",
                    ),
                    (
                        share(
                            "vllm:external_prefix_cache_hits_total",
                            "vllm:external_prefix_cache_queries_total",
                        ),
                        "in the pool",
                    ),
                ),
            ),
            Panel(
                "Objectives met",
                "percentunit",
                (
                    (
                        share(
                            'mooncake_gateway_slo_total{met="yes"}', "mooncake_gateway_slo_total", by="slo"
                        ),
                        "{{slo}}",
                    ),
                ),
            ),
            Panel(
                "Rejected by admission, and retried",
                "reqps",
                (
                    (rate("mooncake_conductor_rejected_total", "code"), "{{code}}"),
                    (rate("mooncake_gateway_retries_total", "stage"), "retried: {{stage}}"),
                ),
            ),
            Panel(
                "Requests of clients with a key",
                "reqps",
                (
                    (
                        rate("mooncake_gateway_client_requests_total", "client, outcome"),
                        "{{client}} {{outcome}}",
                    ),
                ),
            ),
        ),
        "Connections": (
            Panel("HTTP connections", "short", (("mooncake_http_connections", "{{instance}}"),)),
            Panel(
                "HTTP connections closed", "ops", ((rate("mooncake_http_cut_total", "reason"), "{{reason}}"),)
            ),
            Panel(
                "RPC connections and requests refused",
                "ops",
                ((rate("mooncake_rpc_refused_total", "server, reason"), "{{server}} {{reason}}"),),
            ),
        ),
    },
)

STORE = Board(
    "store",
    "Mooncake: store",
    "What the store keeps, what it loses and why, and which master leads.",
    ("mooncake_store_",),
    {
        "Content": (
            Panel(
                "Memory",
                "bytes",
                (
                    ("max(mooncake_store_allocated_bytes)", "in use or reserved"),
                    ("max(mooncake_store_capacity_bytes)", "capacity"),
                ),
            ),
            Panel("Objects", "short", (("max(mooncake_store_objects)", "readable"),)),
            Panel("Segments", "short", (("max(mooncake_store_segments)", "alive"),)),
            Panel(
                "Keys looked up",
                "ops",
                (
                    (rate("mooncake_store_lookup_hits_total"), "found"),
                    (rate("mooncake_store_lookups_total"), "all"),
                ),
            ),
            Panel(
                "Puts",
                "ops",
                (
                    (rate("mooncake_store_puts_total"), "readable"),
                    (rate("mooncake_store_refused_puts_total"), "refused"),
                    (rate("mooncake_store_expired_puts_total"), "expired"),
                ),
            ),
            Panel(
                "Time of clients' calls",
                "s",
                tuple(
                    (query, f"{call} {legend}")
                    for call in ("get", "put")
                    for query, legend in quantiles(f"mooncake_store_{call}_seconds")[1:]
                ),
            ),
        ),
        "Tiers and nodes": (
            Panel(
                "Bytes evicted, copied to SSD and back",
                "Bps",
                (
                    (rate("mooncake_store_evicted_bytes_total"), "evicted"),
                    (rate("mooncake_store_demoted_bytes_total"), "to SSD"),
                    (rate("mooncake_store_promoted_bytes_total"), "from SSD"),
                ),
            ),
            Panel(
                "Capacity of nodes by tier",
                "bytes",
                (("mooncake_store_tier_bytes", "{{instance}} {{tier}}"),),
            ),
            Panel("Nodes that are mounted", "short", (("mooncake_store_mounted", "{{instance}}"),)),
            Panel(
                "Objects lost and removed",
                "ops",
                (
                    (rate("mooncake_store_lost_objects_total"), "lost with a node"),
                    (rate("mooncake_store_removed_objects_total"), "removed by request"),
                ),
            ),
            Panel(
                "Wrong bytes",
                "ops",
                (
                    (rate("mooncake_store_corrupt_replicas_total"), "replicas dropped"),
                    (rate("mooncake_store_refuted_reports_total"), "reports refuted"),
                    (rate("mooncake_store_checksum_mismatch_total"), "reads that differed"),
                ),
            ),
            Panel(
                "Copies by tasks",
                "Bps",
                ((rate("mooncake_store_copied_bytes_total", "source, target"), "{{source}} to {{target}}"),),
            ),
        ),
        "Masters": (
            Panel(
                "Leader, and standbys in sync",
                "short",
                (
                    ("mooncake_store_ha_leads", "leads: {{instance}}"),
                    ("max(mooncake_store_ha_standbys)", "standbys"),
                ),
            ),
            Panel(
                "Records that the slowest standby is behind",
                "short",
                (("max(mooncake_store_ha_lag)", "records"),),
            ),
            Panel("Flushes of the log", "s", quantiles("mooncake_store_oplog_flush_seconds")),
        ),
    },
)

CONDUCTOR = Board(
    "conductor",
    "Mooncake: conductor",
    "Where requests are placed, how good the predictions are, and what is known of engines' caches.",
    ("mooncake_conductor_",),
    {
        "Decisions": (
            Panel(
                "Placements by outcome",
                "reqps",
                ((rate("mooncake_conductor_placements_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                "Rejected by admission",
                "reqps",
                ((rate("mooncake_conductor_rejected_total", "code"), "{{code}}"),),
            ),
            Panel(
                "Measured as a multiple of the predicted",
                "none",
                quantiles("mooncake_conductor_prediction_ratio", by="quantity"),
            ),
        ),
        "Instances": (
            Panel(
                "Instances",
                "short",
                (
                    ("max by (role) (mooncake_conductor_serving_instances)", "{{role}} serving"),
                    ("max by (role) (mooncake_conductor_desired_instances)", "{{role}} desired"),
                    ("max by (role) (mooncake_conductor_offered_load)", "{{role}} offered load"),
                ),
            ),
            Panel(
                "Prompts placed and not computed, in seconds of work",
                "s",
                (("max by (role) (mooncake_conductor_queue_seconds)", "{{role}}"),),
            ),
            Panel(
                "Changes of state",
                "ops",
                ((rate("mooncake_conductor_state_changes_total", "role, state"), "{{role}} {{state}}"),),
            ),
        ),
        "Knowledge of caches": (
            Panel(
                "Batches of KV events", "ops", ((rate("mooncake_conductor_kv_event_batches_total"), "read"),)
            ),
            Panel(
                "Gaps in KV events",
                "ops",
                ((rate("mooncake_conductor_kv_event_gaps_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                "KV from one instance to the other",
                "reqps",
                ((rate("mooncake_conductor_kv_transfers_total", "way"), "{{way}}"),),
            ),
        ),
        "Several conductors": (
            Panel("Conductors that lead", "short", (("mooncake_conductor_is_leader", "{{instance}}"),)),
            Panel(
                "Age of the oldest fact that a peer lacks",
                "s",
                (("mooncake_conductor_peer_lag_seconds", "{{instance}} to {{peer}}"),),
            ),
            Panel(
                "Placements without a conductor",
                "reqps",
                ((rate("mooncake_conductor_client_in_turn_total"), "in turn, by gateways"),),
            ),
        ),
    },
)

ENGINE = Board(
    "engine",
    "Mooncake: engines",
    "Queues, caches and KV transfers of workers, and of vLLM where it serves.",
    ("vllm:", "mooncake_inference_", "mooncake_connectors_", "mooncake_transfer_"),
    {
        "Load": (
            Panel("Requests waiting", "short", (("vllm:num_requests_waiting", "{{instance}}"),)),
            Panel("Requests running", "short", (("vllm:num_requests_running", "{{instance}}"),)),
            Panel("KV cache in use", "percentunit", (("vllm:kv_cache_usage_perc", "{{instance}}"),)),
            Panel(
                "Time to the first token", "s", quantiles("vllm:time_to_first_token_seconds", only=AT_ENGINES)
            ),
            Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds", only=AT_ENGINES)),
            Panel(
                "Time of whole requests", "s", quantiles("vllm:e2e_request_latency_seconds", only=AT_ENGINES)
            ),
        ),
        "Cache": (
            Panel(
                "Prompt tokens found in the engine's cache",
                "percentunit",
                (
                    (
                        share(
                            "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", by="instance"
                        ),
                        "{{instance}}",
                    ),
                ),
            ),
            Panel(
                "Prompt tokens found in the pool",
                "percentunit",
                (
                    (
                        share(
                            "vllm:external_prefix_cache_hits_total",
                            "vllm:external_prefix_cache_queries_total",
                            by="instance",
                        ),
                        "{{instance}}",
                    ),
                ),
            ),
            Panel(
                "KV loaded and saved",
                "Bps",
                (
                    (rate("mooncake_inference_kv_loaded_bytes_total"), "loaded"),
                    (rate("mooncake_inference_kv_saved_bytes_total"), "saved"),
                ),
            ),
            Panel(
                "Lookups, loads and saves that failed",
                "ops",
                ((rate("mooncake_inference_kv_link_failures_total", "operation"), "{{operation}}"),),
            ),
            Panel(
                "Lookups, and blocks of loads and saves, that failed in vLLM",
                "ops",
                (
                    (rate("vllm:mooncake_connector_lookup_failures_total"), "lookups"),
                    (rate("vllm:mooncake_connector_failed_blocks_total"), "blocks not loaded"),
                    (rate("vllm:mooncake_connector_unsaved_blocks_total"), "blocks not saved"),
                ),
            ),
            Panel(
                "KV pushed from worker to worker",
                "Bps",
                ((rate("mooncake_inference_push_bytes_total", "outcome"), "{{outcome}}"),),
            ),
            Panel(
                "Waits for memory beyond a deadline, seconds in a second",
                "none",
                (
                    (rate("mooncake_connectors_memory_overdue_seconds_total", "operation"), "{{operation}}"),
                    (rate("vllm:mooncake_connector_memory_overdue_seconds_total"), "loads of vLLM"),
                ),
            ),
        ),
        "Transfers": (
            Panel(
                "Bytes moved by path",
                "Bps",
                ((rate("mooncake_transfer_moved_bytes_total", "path, op"), "{{path}} {{op}}"),),
            ),
            Panel(
                "Parts of batches that failed",
                "ops",
                ((rate("mooncake_transfer_failed_parts_total", "path, status"), "{{path}} {{status}}"),),
            ),
        ),
    },
    has_models=True,
)

BOARDS = (CLUSTER, STORE, CONDUCTOR, ENGINE)
COLUMNS, WIDTH, HEIGHT, NUMBER_HEIGHT = 3, 8, 8, 4
"""Diagrams of a row, and the size of each on Grafana's grid, which is 24 wide."""


def board_of(metric: DeclaredMetric) -> Board:
    """The board that a metric belongs to by its name; that of the cluster if to no other."""
    return next((board for board in BOARDS if metric.name.startswith(board.prefixes)), CLUSTER)


def other_panels(board: Board) -> list[Panel]:
    """Diagrams of the metrics that belong to a board and that no written diagram of any board shows."""
    written = [panel for one in BOARDS for panel in one.panels]
    return [
        panel_of(metric) for metric in on_no_panel(written, list(NOT_ON_A_BOARD)) if board_of(metric) is board
    ]


def files(settings: DeploySettings) -> dict[str, Any]:
    """Rules, the boards, and what makes Grafana find them. ``prometheus`` is the compose file's part."""
    return {
        "monitoring/rules.yaml": {"groups": rule_groups(settings.docs_url)},
        **{f"monitoring/{name}": content for name, content in board_files().items()},
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


def board_files(namespace: str = "") -> dict[str, dict[str, Any]]:
    """Every board by the name of its file; ``namespace``: see ``dashboard``."""
    return {f"board-{board.name}.json": dashboard(board, namespace) for board in BOARDS}


def dashboard(board: Board, namespace: str = "") -> dict[str, Any]:
    """A board as Grafana imports it.

    ``namespace``: the one that it shows at first in Kubernetes, where a Prometheus watches several clusters;
    empty where all series are this cluster's.
    """
    of_cluster = (OF_NAMESPACE,) if namespace else ()
    selectors = (*of_cluster, *board.selectors)
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in board.rows.items():
        panels.append(_row(title, y, []))
        panels += (found := _grid(selectors, row, y + 1))
        y += 1 + sum({one["gridPos"]["y"]: one["gridPos"]["h"] for one in found}.values())
    if others := other_panels(board):
        panels.append(_row("All other metrics", y, _grid(selectors, others, y + 1)))
    every = [inner for one in panels for inner in (one, *one.get("panels", ()))]
    for number, one in enumerate(every, 1):
        one["id"] = number
    return {
        "uid": f"mooncake-{board.name}",
        "title": board.title,
        "description": board.about,
        "tags": ["mooncake"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(board, namespace)},
        "links": [
            {
                "type": "dashboards",
                "title": "Mooncake",
                "tags": ["mooncake"],
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "panels": panels,
    }


def _variables(board: Board, namespace: str) -> list[dict[str, Any]]:
    """The data source, in Kubernetes the namespace, the programs, and on the engines' board the model."""
    current = {"text": "Prometheus", "value": SOURCE}
    found: list[dict[str, Any]] = [
        {
            "name": "source",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": current,
        }
    ]
    of_cluster = [OF_NAMESPACE] if namespace else []
    if namespace:
        shown = {"current": {"text": namespace, "value": namespace}}
        found.append(
            _query("namespace", "Namespace", "label_values(mooncake_http_connections, namespace)", shown)
        )
    every = {
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    names = "|".join(f"{prefix}.*" for prefix in board.prefixes)
    by_name = [f'__name__=~"{names}"'] if names else []
    programs = f"{'' if names else 'up'}{{{', '.join([*by_name, *of_cluster])}}}"
    found.append(_query("instance", "Program", f"label_values({programs}, instance)", every))
    if board.has_models:
        models = selected("vllm:num_requests_running", of_cluster)
        found.append(_query("model", "Model", f"label_values({models}, model_name)", every))
    return found


def _query(name: str, label: str, values: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """A variable whose values Prometheus has."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": values,
        "query": {"query": values, "refId": name},
        "refresh": 2,
        "sort": 1,
        **more,
    }


_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _row(title: str, y: int, inner: list[dict[str, Any]]) -> dict[str, Any]:
    """The heading of a row; one with diagrams in it is closed at first."""
    at = {"x": 0, "y": y, "w": WIDTH * COLUMNS, "h": 1}
    return {"type": "row", "title": title, "gridPos": at, "collapsed": bool(inner), "panels": inner}


def _grid(selectors: Sequence[str], row: Sequence[Panel], y: int) -> list[dict[str, Any]]:
    height = NUMBER_HEIGHT if all(panel.is_number for panel in row) else HEIGHT
    return [
        _diagram(
            panel,
            selectors,
            {
                "x": WIDTH * (number % COLUMNS),
                "y": y + height * (number // COLUMNS),
                "w": WIDTH,
                "h": height,
            },
        )
        for number, panel in enumerate(row)
    ]


def _diagram(panel: Panel, selectors: Sequence[str], at: Mapping[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    if not panel.is_number:
        defaults["min"] = 0
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": "stat" if panel.is_number else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "gridPos": dict(at),
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": selected(query, selectors),
                "legendFormat": legend,
            }
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def queries(interval: str = INTERVAL, with_others: bool = True) -> list[str]:
    """Every PromQL expression of the alerts and the boards; a board's variables select everything.

    ``with_others``: also those of diagrams that only follow from a declaration.
    """
    found = [alert.condition for alert in ALERTS]
    for board in BOARDS:
        for panel in (*board.panels, *(other_panels(board) if with_others else ())):
            found += [selected(query, board.selectors) for query, _ in panel.queries]
    values = {"$instance": ".*", "$model": ".*", INTERVAL: interval}
    for variable, value in values.items():
        found = [query.replace(variable, value) for query in found]
    return found


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
            entry["authorization"] = {"credentials_file": f"{folder}/admin.key"}  # never in plain HTTP
        entry["static_configs"] = [{"targets": addresses}]
        found.append(entry)
    return {
        "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": ["rules.yaml"],
        "scrape_configs": found,
    }
