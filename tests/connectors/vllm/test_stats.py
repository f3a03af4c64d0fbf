# SPDX-License-Identifier: Apache-2.0
"""Counters in vLLM's front end, with doubles of vLLM's classes; ``tests/vllm`` has the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram


class Stats:
    """Takes what vLLM's base class of statistics takes."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = data or {}


class PromMetrics:
    """Sets what vLLM's base class of metrics sets."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        self.per_engine_labelvalues = values
        self._counter_cls, self._histogram_cls = types[Counter], types[Histogram]


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with the doubles, and only for this test."""
    ec, kv = (f"vllm.distributed.{kind}_transfer" for kind in ("ec", "kv"))
    bases = {
        f"{ec}.ec_connector.metrics": ("ECConnectorStats", "ECConnectorPromMetrics"),
        f"{kv}.kv_connector.v1.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
    }
    for path, (its_stats, its_metrics) in bases.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        module = ModuleType(path)
        setattr(module, its_stats, Stats)
        setattr(module, its_metrics, PromMetrics)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.delitem(sys.modules, "mooncake.connectors.vllm.stats", raising=False)
    import mooncake.connectors.vllm.stats as module_of_ours

    yield module_of_ours
    sys.modules.pop("mooncake.connectors.vllm.stats", None)


def test_counters_begin_at_0_for_each_engine(stats: Any) -> None:
    """Prometheus sees no rise in a series that begins with its first failure."""
    registry = CollectorRegistry()
    types = {
        Counter: lambda **words: Counter(**words, registry=registry),
        Histogram: lambda **words: Histogram(**words, registry=registry),
    }
    labels = {0: ["M", "0"], 1: ["M", "1"]}
    metrics = stats.StoreMetrics(None, types, ["model_name", "engine"], labels)

    def value(name: str, engine: str) -> float | None:
        of = {"model_name": "M", "engine": engine}
        return registry.get_sample_value(f"vllm:mooncake_connector_{name}_total", of)

    for name in stats.StoreMetrics.COUNTERS:
        assert value(name, "0") == value(name, "1") == 0.0, name
    metrics.observe({"failed_blocks": 3, "memory_overdue_seconds": 2.0}, 1)
    assert (value("failed_blocks", "1"), value("memory_overdue_seconds", "1")) == (3.0, 2.0)
    assert value("failed_blocks", "0") == 0.0
