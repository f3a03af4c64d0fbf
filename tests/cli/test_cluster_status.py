# SPDX-License-Identifier: Apache-2.0
"""Rates, shares and latencies computed from a gateway's pages."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.cli.cluster_status import (
    WINDOW_S,
    InstanceRow,
    TrafficWindow,
    quantile,
    read_sample,
    read_status,
    roles_of,
)


def page(
    requests: int, failed: int = 0, cached: int = 0, prompt: int = 0, probes: int = 0, failed_as: str = "500"
) -> str:
    """A gateway's metrics page; each request's first token took between 0.1 and 0.25 s."""
    return f"""
# TYPE mooncake_gateway_requests_total counter
mooncake_gateway_requests_total{{endpoint="/v1/completions",status="200"}} {requests - failed}
mooncake_gateway_requests_total{{endpoint="/v1/completions",status="{failed_as}"}} {failed}
mooncake_gateway_requests_total{{endpoint="/ready",status="503"}} {probes}
# TYPE mooncake_gateway_tokens_total counter
mooncake_gateway_tokens_total{{kind="prompt"}} {prompt}
mooncake_gateway_tokens_total{{kind="cached"}} {cached}
mooncake_gateway_tokens_total{{kind="output"}} {requests * 10}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} 0
vllm:time_to_first_token_seconds_bucket{{le="0.25"}} {requests}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {requests}
"""


def test_one_sample_gives_totals_and_two_give_rates() -> None:
    window = TrafficWindow()
    first = window.add(read_sample(page(10, failed=1, cached=25, prompt=100, probes=50)), 100.0)
    assert (first.seconds, first.requests, first.failed, first.cached_share) == (0.0, 10, 1, 0.25)
    assert first.rate(first.requests) is None
    assert first.ttft.p50_s == pytest.approx(0.175) and first.tbt.p50_s is None
    second = window.add(read_sample(page(30, failed=1, cached=125, prompt=200, probes=99)), 110.0)
    assert (second.seconds, second.requests, second.failed, second.cached_share) == (10.0, 20, 0, 1.0)
    assert second.rate(second.requests) == 2.0
    assert second.output_tokens == 200


def test_a_stream_that_breaks_has_failed() -> None:
    found = TrafficWindow().add(read_sample(page(10, failed=2, failed_as="broken")), 100.0)
    assert (found.requests, found.failed) == (10, 2)


def test_the_window_is_about_a_minute_and_bounded() -> None:
    window = TrafficWindow()
    for number in range(500):
        found = window.add(read_sample(page(number)), float(number))
    assert WINDOW_S <= found.seconds < WINDOW_S + 2
    for number in range(500):  # many looks in little time
        found = window.add(read_sample(page(500 + number)), 500 + number / 1000)
    assert found.seconds < WINDOW_S and found.requests > 0


def test_a_restarted_gateway_begins_a_new_window() -> None:
    window = TrafficWindow()
    window.add(read_sample(page(100)), 0.0)
    found = window.add(read_sample(page(3)), 5.0)
    assert (found.seconds, found.requests) == (0.0, 3)


def test_quantiles_are_those_of_promql() -> None:
    infinite = float("inf")
    assert quantile({}, 0.5) is None and quantile({1.0: 0, infinite: 0}, 0.5) is None
    assert quantile({1.0: 10, 2.0: 10, infinite: 10}, 0.5) == 0.5
    assert quantile({1.0: 5, 2.0: 10, infinite: 10}, 0.75) == 1.5
    assert quantile({1.0: 5, infinite: 10}, 0.95) == 1.0, "nothing is known above the last bound"


def test_a_status_with_and_without_the_key() -> None:
    short = read_status(b'{"model": "m", "degraded": "", "prefill_node_count": 2, "decode_node_count": 1}')
    assert (short.model, short.prefill_node_count, short.instances) == ("m", 2, None)
    full = read_status(
        b'{"model": "m", "instances": [{"instance": "h:1", "role": "prefill", "health": "lost"}]}'
    )
    assert full.instances == [InstanceRow("h:1", "prefill", "lost")]
    with pytest.raises(msgspec.DecodeError):
        read_status(b"<html>")


def test_roles() -> None:
    rows = [
        InstanceRow("a", "prefill", "ready"),
        InstanceRow("b", "prefill", "lost"),
        InstanceRow("c", "decode", "ready"),
    ]
    assert roles_of(rows) == {"prefill": (1, 2), "decode": (1, 1)}
