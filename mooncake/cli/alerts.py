# SPDX-License-Identifier: Apache-2.0
"""Conditions that Prometheus watches, each with the section of ``docs/operations.md`` that explains it.

The conditions are data, so that tests can compare the names in them with the metrics of the code, run each on
series that fulfil it and on series that do not, and find the section of each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake.cli.panels import selected

RUNBOOK = "operations.md"
"""Page of ``docs/`` with a section for each alert."""


@dataclass(frozen=True)
class Alert:
    """An alert: the PromQL condition, how long it must hold, and what it means."""

    name: str
    condition: str
    holds: str
    severity: str
    summary: str

    @property
    def anchor(self) -> str:
        """Anchor of its section, whose heading is its name."""
        return re.sub(r"[^\w-]", "", self.name.lower())


def rises(counter: str, span: str) -> str:
    """Condition that a counter with labels has risen within ``span``.

    Such a series begins with its first event, as 1, and ``increase`` sees no rise in that.
    """
    return f"increase({counter}[{span}]) > 0 or ({counter} unless {counter} offset {span}) > 0"


def in_vllm(condition: str, operation: str) -> str:
    """A condition on counters in vLLM, whose names say the ``operation``; our workers' have it as a label."""
    return f'label_replace({condition}, "operation", "{operation}", "", "")'


def rate_in_vllm(counter: str) -> str:
    """Rate of a counter of our connector in vLLM."""
    return f"sum(rate(vllm:mooncake_connector_{counter}_total[5m]))"


ALERTS = (
    Alert(
        "MooncakeTargetDown",
        "up == 0",
        "2m",
        "critical",
        "A program's page of metrics is not answered.",
    ),
    Alert(
        "MooncakeNoLeader",
        "absent(mooncake_store_ha_leads == 1)",
        "1m",
        "critical",
        "No master leads: puts and lookups wait.",
    ),
    Alert(
        "MooncakeNoStandby",
        "max(mooncake_store_ha_standbys) < 1 and max(mooncake_store_ha_term) > 0",
        "10m",
        "warning",
        "No standby is in sync: a loss of the leader loses what only it knows.",
    ),
    Alert(
        "MooncakeOplogUnwritable",
        "mooncake_store_oplog_unwritable == 1",
        "1m",
        "critical",
        "The master's log can't be written: puts are refused.",
    ),
    Alert(
        "MooncakeObjectsCorrupt",
        "increase(mooncake_store_corrupt_replicas_total[10m]) > 0",
        "0m",
        "critical",
        "Replicas had wrong bytes and were dropped.",
    ),
    Alert(
        "MooncakeReportsRefuted",
        "increase(mooncake_store_refuted_reports_total[1h]) > 0",
        "0m",
        "warning",
        "A machine reports wrong bytes where there are none: its memory, card or kernel may be bad.",
    ),
    Alert(
        "MooncakeNodeNotMounted",
        "mooncake_store_mounted == 0",
        "2m",
        "warning",
        "A node's memory is not part of the store.",
    ),
    Alert(
        "MooncakePutsRefused",
        "rate(mooncake_store_refused_puts_total[5m]) > 0.05 * rate(mooncake_store_puts_total[5m])",
        "10m",
        "warning",
        "The store refuses more than one put in twenty.",
    ),
    Alert(
        "MooncakeLoadsFail",
        "sum by (operation) (rate(mooncake_inference_kv_link_failures_total[5m])) > 0.1"
        f" or {in_vllm(rate_in_vllm('lookup_failures') + ' > 0.1', 'lookup')}"
        # The others count blocks, of which one prompt has many.
        + "".join(
            f" or {in_vllm(f'{rate_in_vllm(bad)} > 0.05 * {rate_in_vllm(good)}', operation)}"
            for bad, good, operation in (
                ("failed_blocks", "loaded_blocks", "load"),
                ("unsaved_blocks", "saved_blocks", "save"),
            )
        ),
        "10m",
        "warning",
        "Engines compute blocks that they should have loaded.",
    ),
    Alert(
        "MooncakePoolNeverHits",
        "sum(rate(vllm:external_prefix_cache_queries_total[1h])) > 10"
        " unless sum(rate(vllm:external_prefix_cache_hits_total[1h])) > 0",
        "1h",
        "warning",
        "Engines look prompts up in the pool and never find any: everything is computed again.",
    ),
    Alert(
        "MooncakeMemoryOverdue",
        rises("mooncake_connectors_memory_overdue_seconds_total", "5m")
        + f" or {in_vllm('increase(vllm:mooncake_connector_memory_overdue_seconds_total[5m]) > 0', 'load')}",
        "0m",
        "warning",
        "An engine waits for its memory beyond a deadline.",
    ),
    Alert(
        "MooncakeGatewayFails",
        # Not those of probes: /ready answers 503 while a cluster starts.
        'sum(rate(mooncake_gateway_requests_total{endpoint=~"/v1/.*", status=~"5..|broken"}[5m]))'
        ' > 0.05 * sum(rate(mooncake_gateway_requests_total{endpoint=~"/v1/.*"}[5m]))',
        "5m",
        "critical",
        "More than one request in twenty fails, or its stream breaks.",
    ),
    Alert(
        "MooncakeRequestsRejected",
        "sum(rate(mooncake_conductor_rejected_total[5m])) > 1",
        "10m",
        "warning",
        "Admission rejects more than one request per second: more instances, or other objectives.",
    ),
    Alert(
        "MooncakeInstancesMissing",
        "max by (role) (mooncake_conductor_desired_instances)"
        " > 1.2 * max by (role) (mooncake_conductor_serving_instances)",
        "15m",
        "warning",
        "Fewer instances serve than are needed: the autoscaler's limit is reached, or new ones do not start.",
    ),
    Alert(
        "MooncakeNoConductor",
        "increase(mooncake_conductor_client_in_turn_total[5m]) > 0",
        "5m",
        "warning",
        "A gateway reaches no conductor and places requests in turn, without regard to what is cached.",
    ),
    Alert(
        "MooncakeKvEventsLost",
        'sum(increase(mooncake_conductor_kv_event_gaps_total{outcome="lost"}[15m])) > 3',
        "0m",
        "warning",
        "The conductor repeatedly lost KV events, and with them all known blocks of their publishers.",
    ),
    Alert(
        "MooncakeConnectionsRefused",
        "sum by (server, reason) (rate(mooncake_rpc_refused_total[5m])) > 1",
        "10m",
        "warning",
        "A server refuses connections or requests: wrong credentials, or a faulty peer.",
    ),
    Alert(
        "MooncakeCertificateEnds",
        "mooncake_security_certificate_remaining_seconds < 30 * 86400",
        "1h",
        "warning",
        "A certificate ends within thirty days: nothing connects afterwards to the programs that use it.",
    ),
    Alert(
        "MooncakeUnexpectedEvents",
        rises("mooncake_unexpected_events_total", "10m"),
        "0m",
        "warning",
        "A state machine met an event that its table lacks: a fault of the program.",
    ),
)


def rule_groups(docs_url: str = "docs", selectors: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The alerts as groups of rules.

    Args:
        docs_url: where the pages of ``docs/`` are.
        selectors: what the series of this cluster have, where Prometheus watches others, too.
    """
    rules = [
        {
            "alert": alert.name,
            "expr": selected(alert.condition, selectors),
            "for": alert.holds,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "runbook_url": f"{docs_url.rstrip('/')}/{RUNBOOK}#{alert.anchor}",
            },
        }
        for alert in ALERTS
    ]
    return [{"name": "mooncake", "rules": rules}]
