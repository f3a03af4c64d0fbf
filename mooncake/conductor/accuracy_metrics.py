# SPDX-License-Identifier: Apache-2.0
"""Accuracy of the predictions and admission results of this process's conductors, for the metrics page.

A core only counts and knows no registry; this module exports the counts. A process normally runs one
conductor.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from mooncake import metrics
from mooncake.conductor.admission.result import CODES
from mooncake.conductor.conductor import Conductor
from mooncake.conductor.prediction.predictor import QUANTITIES, RATIOS


class _AccuracyCollector(Collector):
    """Reads the counts at each scrape."""

    def __init__(self) -> None:
        self.shown: dict[int, Conductor] = {}

    def collect(self) -> Iterator[HistogramMetricFamily | CounterMetricFamily]:
        yield self._ratios()
        yield from self._verdicts()

    def _ratios(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            "mooncake_conductor_prediction_ratio",
            "The measured value as a multiple of the predicted one, by quantity.",
            labels=["quantity"],
        )
        for quantity in QUANTITIES:
            counted = [core.predict.accuracy[quantity] for core in self.shown.values()]
            buckets, seen = [], 0
            for position, bound in enumerate([*RATIOS, float("inf")]):
                seen += sum(one.counts[position] for one in counted)
                buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
            family.add_metric([quantity], buckets, sum(one.ratio_sum for one in counted))
        return family

    def _verdicts(self) -> Iterator[CounterMetricFamily]:
        rejected = CounterMetricFamily(
            "mooncake_conductor_rejected",
            "Requests that admission rejected, by reason; audited ones are among them.",
            labels=["code"],
        )
        audited = CounterMetricFamily(
            "mooncake_conductor_audited",
            "Rejected requests that were served as a check of the rejection, by whether they met their SLOs.",
            labels=["in_slo"],
        )
        found = [core.lifecycle.status() for core in self.shown.values()]
        for code in CODES:
            rejected.add_metric([code], float(sum(one.rejected.get(code, 0) for one in found)))
        num_met = sum(one.audited_in_slo for one in found)
        audited.add_metric(["yes"], float(num_met))
        audited.add_metric(["no"], float(sum(one.audited_ended for one in found) - num_met))
        yield from (rejected, audited)


_collector = _AccuracyCollector()
metrics.registry.register(_collector)


def register(core: Conductor) -> None:
    """Put the core's predictions and rejections on the metrics page."""
    _collector.shown[id(core)] = core


def unregister(core: Conductor) -> None:
    _collector.shown.pop(id(core), None)
