# SPDX-License-Identifier: Apache-2.0
"""Samples are lines of the metrics page; the seconds saved are cached tokens times a measured cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import Counter

from mooncake import metrics
from mooncake.console import recorder
from mooncake.console.overview import SAVED_SECONDS
from mooncake.console.recorder import BoundedCache, MetricRecorder, mean_cost, samples


def test_samples_are_lines_of_the_metrics_page() -> None:
    found = samples(["vllm:time_to_first_token_seconds", "mooncake_gateway_tokens"])
    assert any("_bucket" in name for name in found)
    lines = metrics.page().decode().splitlines()
    for name, value in found.items():
        [line] = [one for one in lines if one.rpartition(" ")[0] == name]
        assert float(line.rpartition(" ")[2]) == value
    assert not samples(["no_such_metric"])


def test_mean_cost_is_that_of_all_tokens() -> None:
    assert mean_cost([(100, 1.0), (300, 1.0), (0, 9.0), (5, 0.0)]) == pytest.approx(2.0 / 400)
    assert mean_cost([]) == 0.0


async def test_seconds_are_counted_for_tokens_cached_since_the_last_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def costs() -> Sequence[tuple[int, float]]:
        return [(1000, 2.0)]

    from mooncake.gateway import metrics as gateway_metrics

    cached: Counter = gateway_metrics._tokens.labels("cached")
    kept = MetricRecorder(costs)
    before = samples(["mooncake_console_saved_seconds"])[SAVED_SECONDS]
    await kept._estimate()
    assert samples(["mooncake_console_saved_seconds"])[SAVED_SECONDS] == before, "not known since when"
    cached.inc(500)
    await kept._estimate()
    assert samples(["mooncake_console_saved_seconds"])[SAVED_SECONDS] - before == pytest.approx(1.0)


async def test_recorder_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def costs() -> Sequence[tuple[int, float]]:
        return []

    def failing(families: Sequence[str]) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("no registry")
        return {"a": 1.0}

    monkeypatch.setattr(recorder, "samples", failing)
    monkeypatch.setattr(recorder, "EVERY_S", 0.0)
    kept = MetricRecorder(costs)
    running = asyncio.create_task(kept.run())
    async with asyncio.timeout(5):
        while not kept.history.num_added:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    assert kept.history.latest() == {"a": 1.0} and calls > 1


def test_cache_is_bounded() -> None:
    cache = BoundedCache(2)
    for name in "abc":
        cache.put(name, {"name": name})
    assert cache.get("a") is None and cache.get("c") == {"name": "c"}
