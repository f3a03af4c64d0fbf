# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake top`` shows of a cluster, computed from a gateway's pages: rates, shares, latencies.

Plain classes without I/O: they take the text of ``/metrics`` and the JSON of ``/status`` with the time at
which these were read. Counters become rates over the last minute; before there are two samples, totals since
the gateway's start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

WINDOW_S = 60.0
"""Rates and latencies are those of this time."""
MAX_SAMPLES = 128

REQUESTS = "mooncake_gateway_requests_total"
TOKENS = "mooncake_gateway_tokens_total"
REJECTED = "mooncake_conductor_rejected_total"
TTFT = "vllm:time_to_first_token_seconds_bucket"
TBT = "vllm:inter_token_latency_seconds_bucket"
NAMES = (REQUESTS, TOKENS, REJECTED, TTFT, TBT)

Labels = tuple[tuple[str, str], ...]
Sample = dict[str, dict[Labels, float]]
"""Values of the counters above, by name and labels."""


class LatencyQuantiles(msgspec.Struct, frozen=True):
    """A histogram's median and 95th percentile, in seconds; None without observations."""

    p50_s: float | None
    p95_s: float | None


class Traffic(msgspec.Struct, frozen=True):
    """What a gateway served in ``seconds``; 0 stands for the time since its start."""

    seconds: float
    requests: float
    failed: float
    "Those that were answered with 500 or more."
    rejected: float
    "Those that were answered with 429."
    output_tokens: float
    cached_share: float | None
    "Share of the prompts' tokens that were cached; None without prompts."
    ttft: LatencyQuantiles
    tbt: LatencyQuantiles

    def rate(self, number: float) -> float | None:
        """``number`` per second; None where the time is not known."""
        return number / self.seconds if self.seconds else None


class InstanceRow(msgspec.Struct, frozen=True):
    """An instance as the gateway's ``/status`` has it."""

    instance: str
    role: str
    health: str
    detail: str = ""
    num_requests: int = 0
    queued_tokens: int = 0
    num_blocks: int = 0
    num_placed: int = 0


class ScalingRow(msgspec.Struct, frozen=True):
    """How many instances of a role are desired."""

    role: str
    desired: int = 0
    serving: int = 0


class GatewayStatus(msgspec.Struct, frozen=True):
    """The gateway's ``/status``: without the admin key only the first four fields."""

    model: str = ""
    degraded: str = ""
    prefill_node_count: int = 0
    decode_node_count: int = 0
    instances: list[InstanceRow] | None = None
    requests_in_flight: int = 0
    scheduling: str = ""
    protocol: str = ""
    conductor: Any = None
    scaling: list[ScalingRow] = []


def read_status(content: bytes) -> GatewayStatus:
    """Raises msgspec.DecodeError where it is not a gateway's."""
    return msgspec.json.decode(content, type=GatewayStatus)


def read_sample(page: str) -> Sample:
    """Counters of a metrics page. Raises ValueError where it is none."""
    found: Sample = {name: {} for name in NAMES}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            if one.name in found:
                found[one.name][tuple(sorted(one.labels.items()))] = one.value
    return found


class TrafficWindow:
    """The samples of the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Sample]] = deque(maxlen=MAX_SAMPLES)

    def add(self, sample: Sample, now: float) -> Traffic:
        """Take a sample, and return what happened since the oldest one of the window."""
        if self._samples and _total(sample[REQUESTS]) < _total(self._samples[-1][1][REQUESTS]):
            self._samples.clear()  # another process: the gateway was restarted
        self._samples.append((now, sample))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        if len(self._samples) == 1:
            return traffic({}, sample, 0.0)
        return traffic(before, sample, now - then)


def traffic(before: Sample, after: Sample, seconds: float) -> Traffic:
    """What happened between two samples."""
    change = {
        name: {labels: value - before.get(name, {}).get(labels, 0.0) for labels, value in values.items()}
        for name, values in after.items()
    }
    prompt = _total(_where(change[TOKENS], kind="prompt"))
    cached = _total(_where(change[TOKENS], kind="cached"))
    served = [(dict(labels).get("status", ""), value) for labels, value in _of_the_api(change[REQUESTS])]
    return Traffic(
        seconds=seconds,
        requests=sum(value for _, value in served),
        failed=sum(value for status, value in served if status.startswith("5") or status == "broken"),
        rejected=sum(value for status, value in served if status == "429"),
        output_tokens=_total(_where(change[TOKENS], kind="output")),
        cached_share=cached / prompt if prompt else None,
        ttft=latency(change[TTFT]),
        tbt=latency(change[TBT]),
    )


def _of_the_api(values: Mapping[Labels, float]) -> list[tuple[Labels, float]]:
    """Requests for answers: those of operators and of probes are not shown."""
    return [
        (labels, value)
        for labels, value in values.items()
        if dict(labels).get("endpoint", "").startswith("/v1/")
    ]


def _where(values: Mapping[Labels, float], **labels: str) -> dict[Labels, float]:
    wanted = set(labels.items())
    return {key: value for key, value in values.items() if wanted <= set(key)}


def _total(values: Mapping[Labels, float]) -> float:
    return sum(values.values())


def latency(buckets: Mapping[Labels, float]) -> LatencyQuantiles:
    """Quantiles of a histogram from its cumulative buckets, those of several label sets together."""
    counts: dict[float, float] = {}
    for labels, value in buckets.items():
        bound = float(dict(labels)["le"])
        counts[bound] = counts.get(bound, 0.0) + value
    return LatencyQuantiles(quantile(counts, 0.5), quantile(counts, 0.95))


def quantile(counts: Mapping[float, float], part: float) -> float | None:
    """As PromQL computes it: linear within a bucket; in the last one, its lower bound."""
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= part * total:
            if bound == float("inf"):
                return lower
            inside = counts[bound] - below
            return lower + (bound - lower) * ((part * total - below) / inside if inside else 1.0)
        lower, below = bound, counts[bound]
    return lower


def roles_of(instances: Iterable[InstanceRow]) -> dict[str, tuple[int, int]]:
    """Number of instances that are ready, and of all, by role."""
    found: dict[str, tuple[int, int]] = {}
    for one in instances:
        ready, number = found.get(one.role, (0, 0))
        found[one.role] = ready + (one.health == "ready"), number + 1
    return found
