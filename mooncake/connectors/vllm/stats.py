# SPDX-License-Identifier: Apache-2.0
"""Our connectors' statistics, in the classes in which vLLM transports, logs and exports them.

The counters are sent from the ranks and the scheduler to vLLM's front end, which adds them up and exports
them under these names at its ``/metrics``; with several connectors at once (``MultiConnector``), too. They
begin with ``vllm:`` because vLLM unregisters such metrics, and no others, when an engine is made anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from mooncake.connectors.vllm.plugin import take_name

BUCKETS_S = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]


class NamedStats:
    """Counts (numbers) and times (lists of seconds) by name; a base class to be listed before vLLM's."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def add(self, name: str, count: float) -> None:
        if count:
            self.data[name] = self.data.get(name, 0) + count

    def observe(self, name: str, seconds: float) -> None:
        self.data.setdefault(name, []).append(seconds)

    def moved(self, what: Sequence[tuple[int, int, float]], good: str, bad: str, seconds: str) -> None:
        """Add (good blocks, bad blocks, seconds) of some loads or saves."""
        for num_good, num_bad, took in what:
            self.add(good, num_good)
            self.add(bad, num_bad)
            self.observe(seconds, took)

    def aggregate(self, other: Any) -> Any:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {}
        for name, value in sorted(self.data.items()):
            if isinstance(value, list):
                reduced[f"mean_{name}"] = round(sum(value) / len(value), 6)
            else:
                reduced[name] = value
        return reduced


class ConnectorStats(NamedStats, KVConnectorStats):  # type: ignore[misc]
    """Statistics of a KV connector."""


class EncoderStats(NamedStats, ECConnectorStats):  # type: ignore[misc]
    """Statistics of an encoder cache connector."""


class NamedMetrics:
    """The same statistics as Prometheus metrics, which each connector lists in a subclass.

    A base class to be listed before vLLM's, which takes the same arguments and sets the classes used here.
    """

    PREFIX: ClassVar[str]
    COUNTERS: ClassVar[Mapping[str, str]]
    TIMES: ClassVar[Mapping[str, str]]
    per_engine_labelvalues: dict[int, list[object]]
    _counter_cls: type[Any]
    _histogram_cls: type[Any]

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)  # type: ignore[call-arg]
        self._counters = {
            name: self._counter_cls(
                name=f"{self.PREFIX}_{name}_total", documentation=text, labelnames=labelnames
            )
            for name, text in self.COUNTERS.items()
        }
        self._times = {
            name: self._histogram_cls(
                name=f"{self.PREFIX}_{name}", documentation=text, buckets=BUCKETS_S, labelnames=labelnames
            )
            for name, text in self.TIMES.items()
        }
        # A counter that began with its first failure would show Prometheus no rise.
        for labels in per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in (transfer_stats_data or {}).items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            elif name in self._times:
                for seconds in value:
                    self._times[name].labels(*labels).observe(seconds)


class ConnectorMetrics(NamedMetrics, KVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics of a KV connector."""


class CountedConnector:
    """The statistics methods of our connectors; a base class to be listed before vLLM's."""

    METRICS: ClassVar[type[ConnectorMetrics]]

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats() if data is None else ConnectorStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        # Called in vLLM's front end, before the first stats arrive there. MultiConnector looks the connector
        # up by its name alone, which is still vLLM's own where ours was configured by its module path.
        take_name(cls.__name__)
        return cls.METRICS(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class StoreMetrics(ConnectorMetrics):
    """Metrics of ``MooncakeStoreConnector``."""

    PREFIX = "vllm:mooncake_connector"
    COUNTERS: ClassVar = {
        "lookups": "Prompts looked up in the store.",
        "lookup_failures": "Lookups that the store did not answer.",
        "found_blocks": "Blocks that a lookup found.",
        "missed_blocks": "Blocks that a lookup did not find.",
        "loaded_blocks": "Blocks that a rank loaded and verified.",
        "failed_blocks": "Blocks that a rank could not load; they were computed.",
        "saved_blocks": "Blocks that a rank saved, or that the store had already.",
        "unsaved_blocks": "Blocks that a rank could not save.",
        "memory_overdue_seconds": "Seconds for which a rank waited for its memory beyond a load's deadline.",
    }
    TIMES: ClassVar = {
        "lookup_seconds": "Time of one lookup.",
        "load_seconds": "Time of one load on one rank.",
        "save_seconds": "Time of one save on one rank, computation of its layers included.",
    }


class PushMetrics(ConnectorMetrics):
    """Metrics of ``MooncakeConnector``."""

    PREFIX = "vllm:mooncake_direct"
    COUNTERS: ClassVar = {
        "pushed_blocks": "Blocks that a rank of prefill wrote into decode's memory.",
        "pushed_bytes": "Bytes that a rank of prefill wrote into decode's memory.",
        "refused_blocks": "Blocks that decode requested and a rank of prefill refused.",
        "expired_blocks": "Computed blocks of a rank of prefill that decode did not request in time.",
        "received_blocks": "Blocks that a rank of decode received.",
        "received_bytes": "Bytes that a rank of decode received.",
        "recomputed_blocks": "Blocks that a rank of decode did not receive on request and computed itself.",
    }
    TIMES: ClassVar = {
        "push_seconds": "Time in which one rank of prefill wrote one prompt's blocks.",
        "receive_seconds": "Time from the request to the arrival of one prompt's blocks on a rank of decode, "
        "prefill's remaining computation included.",
    }


class EncoderMetrics(NamedMetrics, ECConnectorPromMetrics):  # type: ignore[misc]
    """Metrics of ``MooncakeECConnector``."""

    PREFIX = "vllm:mooncake_encoder"
    COUNTERS: ClassVar = {
        "hits": "Items (images, audio clips) whose encoder output the store had.",
        "misses": "Items whose encoder output the store did not have; they were encoded.",
        "refused": "Items whose output was there and not used: another dtype, shape or digest, or no space.",
        "failures": "Items whose lookup the store did not answer in time.",
        "loaded_bytes": "Bytes of encoder outputs that were loaded and verified.",
        "saved_outputs": "Computed encoder outputs that were saved, or that the store had already.",
        "unsaved_outputs": "Computed encoder outputs that could not be saved.",
        "saved_bytes": "Bytes of encoder outputs that were saved.",
    }
    TIMES: ClassVar = {
        "lookup_seconds": "Time of one lookup, hashing of the item and loading of the output included.",
        "save_seconds": "Time of one save.",
    }
