# SPDX-License-Identifier: Apache-2.0
"""Shares, rates and quantiles between samples of the metrics."""

from __future__ import annotations

import pytest

from mooncake.console.history import MetricHistory
from mooncake.console.overview import TTFT, client_overview, label_of, overview, sample_name

PROMPT = 'mooncake_gateway_tokens_total{kind="prompt"}'
CACHED = 'mooncake_gateway_tokens_total{kind="cached"}'


def test_hit_rate_is_that_of_each_interval() -> None:
    history = MetricHistory()
    history.add(0.0, {PROMPT: 1000.0, CACHED: 900.0})
    history.add(2.0, {PROMPT: 1100.0, CACHED: 925.0})
    history.add(4.0, {PROMPT: 1100.0, CACHED: 925.0})
    found = overview(history, -1.0, {PROMPT: 1100.0, CACHED: 925.0}, {"slo_ttft": 3})
    assert found["at"] == [2.0, 4.0]
    assert found["series"]["hit_rate"] == [0.25, None]
    assert found["series"]["prompt_tokens_per_s"] == [50.0, 0.0]
    assert found["cards"]["hit_rate"] == pytest.approx(925 / 1100)
    assert found["cards"]["rejected"] == 3
    assert found["totals"][PROMPT] == 1100.0


def test_counter_that_was_reset_counts_from_zero() -> None:
    history = MetricHistory()
    history.add(0.0, {PROMPT: 1000.0})
    history.add(2.0, {PROMPT: 30.0})
    assert overview(history, -1.0, {}, {})["series"]["prompt_tokens_per_s"] == [15.0]


def test_latencies_come_from_the_buckets_of_each_interval() -> None:
    def buckets(low: float, high: float) -> dict[str, float]:
        counts = {"0.1": low, "1.0": high, "+Inf": high}
        return {f'{TTFT}_bucket{{le="{bound}"}}': count for bound, count in counts.items()}

    history = MetricHistory()
    history.add(0.0, buckets(100, 100))
    history.add(2.0, buckets(100, 110))
    history.add(4.0, buckets(110, 120))
    found = overview(history, -1.0, buckets(110, 120), {})
    assert found["series"]["ttft_p50_s"] == [pytest.approx(0.55), pytest.approx(0.05)]
    assert found["cards"]["ttft_p50_s"] == pytest.approx(0.1 * 60 / 110)


def test_refused_requests_are_those_with_a_time_to_retry() -> None:
    def sample(endpoint: str, status: str) -> str:
        return sample_name("mooncake_gateway_requests_total", {"endpoint": endpoint, "status": status})

    history = MetricHistory()
    history.add(0.0, {})
    served, refused, probe = (
        sample("/v1/completions", "200"),
        sample("/v1/completions", "429"),
        sample("/ready", "503"),
    )
    history.add(2.0, {served: 5.0, refused: 2.0, probe: 9.0})
    assert overview(history, -1.0, {}, {})["series"]["refused"] == [2.0]


def test_no_samples_are_no_points() -> None:
    found = overview(MetricHistory(), 0.0, {}, {})
    assert found["at"] == [] and set(map(len, found["series"].values())) == {0}
    assert found["cards"]["hit_rate"] is None


def test_sample_names_are_those_of_the_metrics_page() -> None:
    name = sample_name("a_total", {"z": 'say "hi"\\', "b": "1"})
    assert name == r'a_total{b="1",z="say \"hi\"\\"}'
    assert label_of(name, "b") == "1" and label_of(name, "missing") == ""


def test_client_sees_only_the_samples_with_its_name() -> None:
    samples = {
        'mooncake_gateway_client_requests_total{client="a",outcome="admitted"}': 7.0,
        'mooncake_gateway_client_requests_total{client="a",outcome="quota_tokens"}': 2.0,
        'mooncake_gateway_client_tokens_total{client="a",kind="prompt"}': 70.0,
        'mooncake_gateway_client_tokens_total{client="b",kind="prompt"}': 99.0,
        'mooncake_gateway_tokens_total{kind="prompt"}': 169.0,
    }
    found = client_overview(samples, "a")
    assert len(found["totals"]) == 3 and all('client="a"' in name for name in found["totals"])
    assert found["cards"] == {"requests": 7.0, "prompt_tokens": 70.0, "output_tokens": 0.0, "rejected": 2.0}
    assert found["rejected"] == {"quota_tokens": 2.0}
