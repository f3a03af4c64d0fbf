# SPDX-License-Identifier: Apache-2.0
"""What a unit of throughput costs on each of several given clusters.

It owns the comparison of clusters that are given, while ``capacity_planner.py`` searches for one; prices and
candidates are the same. Clusters of different sizes can't be compared at one load, where all but the smallest
are idle: the throughput of a cluster is its rate of good requests at the largest load that it carries, which
is the one at which the wanted share of requests still meets the objectives (growing steps, then bisection;
every step is a simulation of the whole trace). Relative throughput is that rate divided by the baseline's,
and the cost per unit of throughput is dollars an hour divided by relative throughput: for the baseline, its
price.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import msgspec

from mooncake.errors import InvalidArgument
from mooncake.sim.serving.capacity_planner import Objectives, Prices, Simulate
from mooncake.sim.serving.cluster import ClusterSpec
from mooncake.sim.serving.results import Summary

PRECISION = 0.05
"""Relative distance of the largest load that is carried and the least that is not."""
GROWTH = math.sqrt(2)
"""Factor between the first loads that are tried: overloaded runs take longest, so they are not far over."""
LEAST_LOAD, MOST_LOAD = 1 / 64, 1024.0


@dataclasses.dataclass(frozen=True)
class ClusterOffer:
    """A cluster by its name, and the names of its hardware, by which it is priced."""

    name: str
    spec: ClusterSpec
    hardware: str
    decode_hardware: str


class ComparedCluster(msgspec.Struct, frozen=True):
    """One cluster at the largest load that it carries. Without any, all figures but its price are 0."""

    name: str
    dollars_per_hour: float
    load: float
    "Multiple of the trace's load."
    good_per_s: float
    relative_throughput: float
    "``good_per_s`` divided by that of the baseline."
    dollars_per_unit: float | None
    "Dollars an hour divided by ``relative_throughput``; None: no throughput."
    dollars_per_1000_good: float | None
    "Dollars per 1,000 good requests; None likewise."
    num_requests: int
    num_good: int
    attainment: float
    ttft_p90_s: float
    tbt_p90_s: float
    hit_rate: float
    num_interruptions: int
    num_retries: int
    "Prompts that were computed again because of them."
    num_good_lost: int
    "Good requests fewer than at the same load without interruptions."
    carries_more: bool = False
    "The search has ended at ``MOST_LOAD``, without a load that is too much: the figures are bounds."


class CostComparison:
    """The comparison of ``offers``; ``baseline`` is the name of one of them."""

    def __init__(
        self,
        offers: Sequence[ClusterOffer],
        baseline: str,
        objectives: Objectives,
        prices: Prices,
        simulate: Simulate,
        progress: Callable[[str, float, Summary], None] | None = None,
    ) -> None:
        names = [one.name for one in offers]
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgument("--cluster", name, "clusters of different names: NAME=CLUSTER")
        if baseline not in names:
            raise InvalidArgument("--baseline", baseline, f"the name of a cluster: {', '.join(names)}")
        objectives.check()
        self._offers = offers
        self._baseline = baseline
        self._objectives = objectives
        self._dollars = {
            one.name: prices.cluster(one.spec, one.hardware, one.decode_hardware) for one in offers
        }
        self._simulate = simulate
        self._progress = progress
        self._seen: dict[tuple[str, float], Summary] = {}

    def compare(self) -> list[ComparedCluster]:
        limits = {one.name: self._limit(one) for one in self._offers}
        baseline = limits[self._baseline]
        if baseline is None:
            allowed = "a cluster that meets the objectives at some load"
            raise InvalidArgument("--baseline", self._baseline, allowed)
        _, summary, _ = baseline
        return [self._row(one, limits[one.name], summary.goodput_per_s) for one in self._offers]

    def _row(
        self, offer: ClusterOffer, limit: tuple[float, Summary, bool] | None, baseline_good_per_s: float
    ) -> ComparedCluster:
        dollars = self._dollars[offer.name]
        if limit is None:
            return ComparedCluster(offer.name, dollars, 0, 0, 0, None, None, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        load, found, carries_more = limit
        num_good_lost = 0
        if offer.spec.spot != "none":
            calm = dataclasses.replace(offer, spec=dataclasses.replace(offer.spec, spot="none"))
            num_good_lost = self._simulate(calm.spec, load)[0].num_good - found.num_good
        relative = found.goodput_per_s / baseline_good_per_s
        return ComparedCluster(
            name=offer.name,
            dollars_per_hour=dollars,
            load=load,
            good_per_s=found.goodput_per_s,
            relative_throughput=relative,
            dollars_per_unit=dollars_per_unit(dollars, relative),
            dollars_per_1000_good=dollars_per_1000_good(dollars, found.goodput_per_s),
            num_requests=found.num_requests,
            num_good=found.num_good,
            attainment=attainment(found),
            ttft_p90_s=found.ttft_s.p90,
            tbt_p90_s=found.tbt_s.p90,
            hit_rate=found.hit_rate,
            num_interruptions=found.num_interruptions,
            num_retries=found.num_retries,
            num_good_lost=num_good_lost,
            carries_more=carries_more,
        )

    def _limit(self, offer: ClusterOffer) -> tuple[float, Summary, bool] | None:
        """The largest load that a cluster carries, the run, and whether the search ended before a larger one;
        None: it carries none."""
        least, most = 1.0, 1.0
        if self._carries(offer, 1.0):
            while self._carries(offer, most := GROWTH * least):
                least = most
                if least >= MOST_LOAD:
                    return least, self._run(offer, least), True
        else:
            while not self._carries(offer, least := most / GROWTH):
                most = least
                if most <= LEAST_LOAD:
                    return None
        while most / least > 1 + PRECISION:
            middle = math.sqrt(least * most)
            if self._carries(offer, middle):
                least = middle
            else:
                most = middle
        return least, self._run(offer, least), False

    def _carries(self, offer: ClusterOffer, load: float) -> bool:
        return attainment(self._run(offer, load)) >= self._objectives.attainment

    def _run(self, offer: ClusterOffer, load: float) -> Summary:
        known = self._seen.get((offer.name, load))
        if known is None:
            known, _, _ = self._simulate(offer.spec, load)
            self._seen[offer.name, load] = known
            if self._progress is not None:
                self._progress(offer.name, load, known)
        return known


def attainment(summary: Summary) -> float:
    """Share of all requests that were good."""
    return summary.num_good / max(1, summary.num_requests)


def dollars_per_unit(dollars_per_hour: float, relative_throughput: float) -> float | None:
    """Cost per unit of throughput: the price of as much of the cluster as carries the baseline's load."""
    return dollars_per_hour / relative_throughput if relative_throughput else None


def dollars_per_1000_good(dollars_per_hour: float, good_per_s: float) -> float | None:
    return dollars_per_hour / (good_per_s * 3.6) if good_per_s else None
