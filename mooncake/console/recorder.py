# SPDX-License-Identifier: Apache-2.0
"""Samples this process's metrics for the console's charts, and estimates the seconds that the cache saved.

The estimate is a metric of its own, so that the console shows what ``/metrics`` has: the tokens that were not
computed again, times the seconds that one token took in the prompts computed lately. Without such a
measurement nothing is counted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from prometheus_client import Counter

from mooncake import clock, metrics
from mooncake.console.history import EVERY_S, MetricHistory
from mooncake.console.overview import FAMILIES, TOKENS, sample_name
from mooncake.log import get_logger

log = get_logger(__name__)

_saved = Counter(
    "mooncake_console_saved_seconds",
    "Estimated seconds of prefill that cached tokens saved, since this process started.",
    registry=metrics.registry,
)

_COSTS_EVERY_S = 10.0
_MAX_COSTS = 64

Costs = Callable[[], Awaitable[Sequence[tuple[int, float]]]]
"""Tokens and seconds of prompts that were computed lately."""


class MetricRecorder:
    """Fills a history every two seconds while ``run`` runs."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.history = MetricHistory()
        self._costs = costs
        self._seconds_per_token = 0.0
        self._cached_before: float | None = None
        self._costs_at = float("-inf")

    async def run(self) -> None:
        while True:
            try:
                await self._estimate()
                self.history.add(clock.monotonic(), samples(FAMILIES))
            except Exception as error:  # a chart is not worth the gateway
                log.warning("console_sample_failed", reason=repr(error))
            await asyncio.sleep(EVERY_S)

    async def _estimate(self) -> None:
        """Count the seconds of the tokens that were cached since the last sample."""
        cached = samples(["mooncake_gateway_tokens"]).get(sample_name(TOKENS, {"kind": "cached"}), 0.0)
        grown = 0.0 if self._cached_before is None else max(0.0, cached - self._cached_before)
        self._cached_before = cached
        now = clock.monotonic()
        if self._costs is not None and grown and now - self._costs_at > _COSTS_EVERY_S:
            self._costs_at = now
            self._seconds_per_token = mean_cost(await self._costs()) or self._seconds_per_token
        _saved.inc(grown * self._seconds_per_token)


def mean_cost(costs: Iterable[tuple[int, float]]) -> float:
    """Seconds per computed token, all prompts together; 0 when none was measured."""
    measured = [(tokens, seconds) for tokens, seconds in costs if tokens > 0 and seconds > 0]
    tokens = sum(one for one, _ in measured)
    return sum(seconds for _, seconds in measured) / tokens if tokens else 0.0


def samples(families: Iterable[str]) -> dict[str, float]:
    """The present samples of some metrics, under their names at ``/metrics``."""
    wanted = {one for family in families for one in (family, f"{family}_total", f"{family}_bucket")}
    found: dict[str, float] = {}
    for family in metrics.registry.restricted_registry(sorted(wanted)).collect():
        for sample in family.samples:
            found[sample_name(sample.name, sample.labels)] = float(sample.value)
    return found


class BoundedCache:
    """Remembers values by name, at most ``most`` of them; the oldest goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._found: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def get(self, name: str) -> dict[str, Any] | None:
        return self._found.get(name)

    def put(self, name: str, value: dict[str, Any]) -> None:
        self._found[name] = value
        while len(self._found) > self._most:
            self._found.popitem(last=False)
