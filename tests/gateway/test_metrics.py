# SPDX-License-Identifier: Apache-2.0
"""Metrics of a completed answer: its tokens, its times, whether its SLOs were met."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mooncake.gateway.metrics import Slo, Timing, record_answer
from mooncake.gateway.retries import Route
from mooncake.http.openai import Usage
from mooncake.metrics import registry

TIMING = Timing(ttft_s=0.2, longest_gap_s=0.05, e2e_s=1.0)


def value(name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def tokens() -> list[float]:
    return [value("mooncake_gateway_tokens_total", kind=kind) for kind in ("prompt", "cached", "output")]


def outcomes() -> dict[str, float]:
    return {
        f"{slo} {met}": value("mooncake_gateway_slo_total", slo=slo, met=met)
        for slo in ("ttft", "tbt")
        for met in ("yes", "no")
    }


def logged(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [one for one in caplog.records if one.getMessage() == "request_completed"]
    fields: dict[str, Any] = record.__dict__["fields"]
    return fields


def test_tokens_are_counted_by_kind_and_the_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    before, answers = tokens(), value("vllm:e2e_request_latency_seconds_count")
    with caplog.at_level(logging.INFO, "mooncake.gateway.metrics"):
        record_answer("cmpl-1", Route("p:1", "d:1"), Usage.of(100, 7, 64), TIMING, Slo())
    assert [after - was for after, was in zip(tokens(), before, strict=True)] == [100, 64, 7]
    assert value("vllm:e2e_request_latency_seconds_count") == answers + 1
    assert logged(caplog)["ttft_ms"] == 200.0


def test_usage_without_details_has_nothing_cached() -> None:
    before = tokens()
    record_answer("cmpl-2", Route(None, "d:1"), Usage(prompt_tokens=10, completion_tokens=3), TIMING, Slo())
    assert [after - was for after, was in zip(tokens(), before, strict=True)] == [10, 0, 3]


@pytest.mark.parametrize(
    ("slo", "counted"),
    [
        (Slo(), {}),
        (Slo(ttft_ms=200.0), {"ttft yes": 1}),
        (Slo(ttft_ms=199.9), {"ttft no": 1}),
        (Slo(tbt_ms=50.0), {"tbt yes": 1}),
        (Slo(ttft_ms=1000.0, tbt_ms=10.0), {"ttft yes": 1, "tbt no": 1}),
    ],
)
def test_only_requested_slos_are_counted(slo: Slo, counted: dict[str, int]) -> None:
    before = outcomes()
    record_answer("cmpl-3", Route(None, "d:1"), Usage.of(1, 1, 0), TIMING, slo)
    assert {
        name: after - before[name] for name, after in outcomes().items() if after != before[name]
    } == counted


def test_an_answer_that_came_whole_meets_and_misses_no_slo(caplog: pytest.LogCaptureFixture) -> None:
    before = outcomes()
    slo = Slo(ttft_ms=1000.0, tbt_ms=1000.0)
    with caplog.at_level(logging.INFO, "mooncake.gateway.metrics"):
        record_answer("cmpl-4", Route(None, "d:1"), Usage.of(1, 1, 0), Timing(None, 0.0, 30.0), slo)
    assert outcomes() == before
    fields = logged(caplog)
    assert "ttft_ms" not in fields and fields["e2e_ms"] == 30_000.0
