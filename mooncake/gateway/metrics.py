# SPDX-License-Identifier: Apache-2.0
"""Metrics and log entries of completed answers, from our workers and other engines."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter

from mooncake import clock, metrics, tracing
from mooncake.gateway.clients import Client
from mooncake.gateway.retries import Route
from mooncake.http.latency import e2e_seconds
from mooncake.http.openai import Usage
from mooncake.log import get_logger

log = get_logger(__name__)

_tokens = Counter(
    "mooncake_gateway_tokens",
    "Tokens of completed answers, by kind: prompt, cached part of the prompt, output.",
    ["kind"],
    registry=metrics.registry,
)
_slo_outcomes = Counter(
    "mooncake_gateway_slo",
    "Answers with an SLO in their headers, by which (ttft, tbt) and whether it was met; none that an engine "
    "sent whole, as the times of its tokens are unknown.",
    ["slo", "met"],
    registry=metrics.registry,
)


@dataclass(frozen=True)
class Slo:
    """A client's SLOs in milliseconds; None where it set none."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None


@dataclass(frozen=True)
class Timing:
    """Latencies of an answer."""

    ttft_s: float | None
    """None: unknown, as are the times between its tokens, because it came whole."""
    longest_gap_s: float
    e2e_s: float


def record_answer(
    answer_id: str, route: Route, usage: Usage, timing: Timing, slo: Slo, client: Client | None = None
) -> None:
    """Record a completed answer."""
    if client is not None:
        client.used(usage.prompt_tokens, usage.completion_tokens, clock.monotonic())
    e2e_seconds.observe(timing.e2e_s, tracing.exemplar())
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    for kind, num_tokens in (
        ("prompt", usage.prompt_tokens),
        ("cached", cached),
        ("output", usage.completion_tokens),
    ):
        _tokens.labels(kind).inc(num_tokens)
    _note(route, usage, timing, cached)
    log.info(
        "request_completed",
        id=answer_id,
        client=client.name if client is not None else "",
        prefill=route.prefill,
        decode=route.decode,
        degraded=route.degraded,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=cached,
        output_tokens=usage.completion_tokens,
        **({} if timing.ttft_s is None else {"ttft_ms": round(timing.ttft_s * 1000, 1)}),
        e2e_ms=round(timing.e2e_s * 1000, 1),
    )
    if timing.ttft_s is None:
        return
    for name, wanted_ms, was_s in (
        ("ttft", slo.ttft_ms, timing.ttft_s),
        ("tbt", slo.tbt_ms, timing.longest_gap_s),
    ):
        if wanted_ms is not None:
            _slo_outcomes.labels(name, "yes" if was_s * 1000 <= wanted_ms else "no").inc()


def _note(route: Route, usage: Usage, timing: Timing, num_cached_tokens: int) -> None:
    """Add what is known of a completed answer to its trace, if it has one."""
    tracing.note(
        gen_ai__usage__input_tokens=usage.prompt_tokens,
        gen_ai__usage__output_tokens=usage.completion_tokens,
        gen_ai__usage__cache_read__input_tokens=num_cached_tokens,
        gen_ai__latency__e2e=timing.e2e_s,
        prefill=route.prefill or "",
        decode=route.decode,
    )
    if timing.ttft_s is not None:
        tracing.note(gen_ai__latency__time_to_first_token=timing.ttft_s)
