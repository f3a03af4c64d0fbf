# SPDX-License-Identifier: Apache-2.0
"""The overview: hit rate, savings, latencies, SLOs and rejections over time, from samples of the metrics.

Knows the names of the metrics that it shows and computes shares and quantiles between two samples. The
totals are the newest samples themselves, under their names at ``/metrics``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake.console.history import MetricHistory, quantile, thinned

TTFT = "vllm:time_to_first_token_seconds"
GAPS = "vllm:inter_token_latency_seconds"
TOKENS = "mooncake_gateway_tokens_total"
SLO = "mooncake_gateway_slo_total"
REQUESTS = "mooncake_gateway_requests_total"
IN_FLIGHT = "mooncake_gateway_requests_in_flight"
REJECTED = "mooncake_conductor_rejected_total"
MOVES = "mooncake_gateway_moves_total"
RETRIES = "mooncake_gateway_retries_total"
MISSED = "mooncake_gateway_missed_tokens_total"
SAVED_SECONDS = "mooncake_console_saved_seconds_total"
MASTER_REQUESTS = "mooncake_store_requests_total"

FAMILIES = (
    "mooncake_gateway_tokens",
    "mooncake_gateway_slo",
    "mooncake_gateway_requests",
    "mooncake_gateway_requests_in_flight",
    "mooncake_gateway_moves",
    "mooncake_gateway_retries",
    "mooncake_conductor_rejected",
    "mooncake_console_saved_seconds",
    TTFT,
    GAPS,
)
"""Metrics whose samples are kept."""

MAX_POINTS = 180
"""Most points of a chart."""


def overview(
    history: MetricHistory, since: float, totals: Mapping[str, float], rejected: Mapping[str, int]
) -> dict[str, Any]:
    """The page's content.

    Args:
        history: samples for the charts.
        since: only samples after this instant.
        totals: the present samples of the same metrics.
        rejected: rejected requests by code as the conductor reports them, which may be another process.
    """
    positions = thinned(history.positions(since), MAX_POINTS + 1)
    prompt = _differences(history.values(_labelled(TOKENS, kind="prompt"), positions))
    cached = _differences(history.values(_labelled(TOKENS, kind="cached"), positions))
    output = _differences(history.values(_labelled(TOKENS, kind="output"), positions))
    times = history.times(positions)
    spans = _differences(times)
    rows: dict[str, list[float | None]] = {
        "hit_rate": [_share(hit, all_) for hit, all_ in zip(cached, prompt, strict=True)],
        "prompt_tokens_per_s": _rates(prompt, spans),
        "cached_tokens_per_s": _rates(cached, spans),
        "output_tokens_per_s": _rates(output, spans),
        "saved_seconds": [*_differences(history.values(SAVED_SECONDS, positions))],
        "in_flight": [*history.values(IN_FLIGHT, positions)[1:]],
    }
    for name, family in (("ttft", TTFT), ("tbt", GAPS)):
        for label, share in (("p50", 0.5), ("p95", 0.95)):
            rows[f"{name}_{label}_s"] = _quantiles(history, family, positions, share)
    for slo in ("ttft", "tbt"):
        met = _differences(history.values(_labelled(SLO, slo=slo, met="yes"), positions))
        missed = _differences(history.values(_labelled(SLO, slo=slo, met="no"), positions))
        rows[f"slo_{slo}"] = [_share(one, one + other) for one, other in zip(met, missed, strict=True)]
    refused = [
        name
        for name in history.names(REQUESTS)
        if label_of(name, "status") in ("429", "503") and label_of(name, "endpoint") != "/ready"
    ]
    rows["refused"] = [
        sum(one)
        for one in zip(*(_differences(history.values(name, positions)) for name in refused), strict=True)
    ] or [0.0] * max(0, len(positions) - 1)
    return {
        "at": times[1:],
        "series": rows,
        "totals": dict(totals),
        "cards": _cards(totals, rejected),
        "rejected": dict(rejected),
        "num_series_left_out": history.num_left_out,
    }


def _cards(totals: Mapping[str, float], rejected: Mapping[str, int]) -> dict[str, Any]:
    """Numbers since the start of the process."""
    prompt = totals.get(_labelled(TOKENS, kind="prompt"), 0.0)
    cached = totals.get(_labelled(TOKENS, kind="cached"), 0.0)
    found: dict[str, Any] = {
        "hit_rate": _share(cached, prompt),
        "prompt_tokens": prompt,
        "saved_tokens": cached,
        "output_tokens": totals.get(_labelled(TOKENS, kind="output"), 0.0),
        "saved_seconds": totals.get(SAVED_SECONDS, 0.0),
        "in_flight": totals.get(IN_FLIGHT, 0.0),
        "rejected": sum(rejected.values()),
    }
    for slo in ("ttft", "tbt"):
        met = totals.get(_labelled(SLO, slo=slo, met="yes"), 0.0)
        found[f"slo_{slo}"] = _share(met, met + totals.get(_labelled(SLO, slo=slo, met="no"), 0.0))
    for name, family in (("ttft", TTFT), ("tbt", GAPS)):
        bounds, counts = _buckets([(key, value) for key, value in totals.items()], family)
        found[f"{name}_p50_s"] = quantile(bounds, counts, 0.5)
        found[f"{name}_p95_s"] = quantile(bounds, counts, 0.95)
    return found


def client_overview(samples: Mapping[str, float], client: str) -> dict[str, Any]:
    """One client's own numbers: the samples of ``/metrics`` that carry its name."""
    own = {
        name: value
        for name, value in samples.items()
        if name.startswith("mooncake_gateway_client_") and label_of(name, "client") == client
    }
    outcomes = {label_of(name, "outcome"): value for name, value in own.items() if "outcome=" in name}
    tokens = {label_of(name, "kind"): value for name, value in own.items() if "kind=" in name}
    return {
        "client": client,
        "totals": own,
        "cards": {
            "requests": outcomes.pop("admitted", 0.0),
            "prompt_tokens": tokens.get("prompt", 0.0),
            "output_tokens": tokens.get("output", 0.0),
            "rejected": sum(outcomes.values()),
        },
        "rejected": outcomes,
    }


def sample_name(name: str, labels: Mapping[str, str]) -> str:
    """The name of a sample as the text of ``/metrics`` has it."""
    if not labels:
        return name
    parts = (f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{','.join(parts)}}}"


def label_of(name: str, label: str) -> str:
    """The value of one label of a sample's name; "" without it."""
    found = re.search(rf'[{{,]{label}="((?:[^"\\]|\\.)*)"', name)
    return found[1] if found else ""


def _labelled(name: str, **labels: str) -> str:
    return sample_name(name, labels)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _differences(values: Sequence[float]) -> list[float]:
    """The growth of a counter from sample to sample; a counter that was reset counts from 0."""
    pairs = itertools.pairwise(values)
    return [after - before if after >= before else after for before, after in pairs]


def _rates(differences: Sequence[float], spans: Sequence[float]) -> list[float | None]:
    return [one / span if span > 0 else None for one, span in zip(differences, spans, strict=True)]


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


def _quantiles(
    history: MetricHistory, family: str, positions: Sequence[int], share: float
) -> list[float | None]:
    columns = [
        (name, _differences(history.values(name, positions))) for name in history.names(f"{family}_bucket")
    ]
    found: list[float | None] = []
    for number in range(max(0, len(positions) - 1)):
        bounds, counts = _buckets([(name, column[number]) for name, column in columns], family)
        found.append(quantile(bounds, counts, share))
    return found


def _buckets(samples: Sequence[tuple[str, float]], family: str) -> tuple[list[float], list[float]]:
    """Bounds, and the observations of each bucket alone, from cumulative counts."""
    start = f"{family}_bucket{{"
    bounds = sorted((float(label_of(name, "le")), value) for name, value in samples if name.startswith(start))
    counts = [
        value - before for (_, value), before in zip(bounds, [0.0, *(one[1] for one in bounds)], strict=False)
    ]
    return [bound for bound, _ in bounds], [max(0.0, one) for one in counts]
