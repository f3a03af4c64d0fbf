# SPDX-License-Identifier: Apache-2.0
"""Latency metrics of answers, under the names that dashboards read from vLLM.

A worker and a gateway both measure them, each at its own API, and both may run in one process (in a
test); a name can be registered only once, so the histograms are declared here.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Histogram

from mooncake import metrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

ttft_seconds = Histogram(
    "vllm:time_to_first_token_seconds",
    "Seconds from a request's arrival to its first token.",
    registry=metrics.registry,
    buckets=_SECONDS,
)
itl_seconds = Histogram(
    "vllm:inter_token_latency_seconds",
    "Seconds between two tokens of one answer.",
    registry=metrics.registry,
    buckets=_SECONDS,
)
e2e_seconds = Histogram(
    "vllm:e2e_request_latency_seconds",
    "Seconds from a request's arrival to its end.",
    registry=metrics.registry,
    buckets=_SECONDS,
)


def mean_of_longest(gaps_s: Sequence[float], part: float = 0.1) -> float:
    """The TBT of one answer as defined in the papers: the mean of the longest tenth of its intervals."""
    if not gaps_s:
        return 0.0
    longest = sorted(gaps_s, reverse=True)[: max(1, round(len(gaps_s) * part))]
    return sum(longest) / len(longest)
