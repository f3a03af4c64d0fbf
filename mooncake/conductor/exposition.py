"""How good the predictions of this process's conductors are, for the metrics page.

A core counts and knows no registry; this shows what it counted. Normally one conductor lives in a process.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from mooncake import metrics
from mooncake.conductor.predict import QUANTITIES, RATIOS, Predictor


class _Page(Collector):
    """Reads the counts when somebody scrapes."""

    def __init__(self) -> None:
        self.shown: dict[int, Predictor] = {}

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "mooncake_conductor_prediction_ratio",
            "What came as a multiple of what was predicted, by quantity.",
            labels=["quantity"],
        )
        for quantity in QUANTITIES:
            counted = [predictor.accuracy[quantity] for predictor in self.shown.values()]
            buckets, seen = [], 0
            for position, bound in enumerate([*RATIOS, float("inf")]):
                seen += sum(one.counts[position] for one in counted)
                buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(seen)))
            family.add_metric([quantity], buckets, sum(one.ratio_sum for one in counted))
        yield family


_page = _Page()
metrics.registry.register(_page)


def show(predictor: Predictor) -> None:
    """From now on what it predicts is on the page."""
    _page.shown[id(predictor)] = predictor


def hide(predictor: Predictor) -> None:
    _page.shown.pop(id(predictor), None)
