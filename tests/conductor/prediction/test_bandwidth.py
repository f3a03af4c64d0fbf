# SPDX-License-Identifier: Apache-2.0
"""A path is estimated from its own samples, else from its source's, else from all; booked cards are busy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.conductor.prediction.bandwidth import BandwidthEstimates
from mooncake.conductor.prediction.cost_models import LinkModel

GB = 10**9


@pytest.fixture
def links() -> Iterator[BandwidthEstimates]:
    links = BandwidthEstimates(LinkModel(0.001, 1e9))
    links.grow(4)
    yield links
    links.check()


def from_source(links: BandwidthEstimates, source: int) -> list[float]:
    return [float(one) for one in np.broadcast_to(links.s_per_byte_from(source), 4)]


def test_the_prior_holds_for_a_source_without_samples(links: BandwidthEstimates) -> None:
    assert from_source(links, 0) == [1e-9] * 4


def test_a_path_differs_from_its_source_and_that_from_others(links: BandwidthEstimates) -> None:
    for _ in range(40):
        links.add(0, 1, GB, 10.0)
        links.add(0, 2, GB, 0.1)
    slow, fast = from_source(links, 0)[1:3]
    assert slow == pytest.approx(1e-8, rel=0.02) and fast == pytest.approx(1e-10, rel=0.02)
    assert fast < from_source(links, 0)[3] < slow
    assert from_source(links, 3)[0] == pytest.approx(links.s_per_byte)


def test_small_transfers_yield_the_latency(links: BandwidthEstimates) -> None:
    for _ in range(100):
        links.add(0, 1, 64, 0.02)
    assert links.latency_s == pytest.approx(0.02, rel=0.01)
    assert from_source(links, 0) == [1e-9] * 4


def test_an_impossible_duration_is_ignored(links: BandwidthEstimates) -> None:
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        links.add(0, 1, GB, seconds)
    links.add(0, 1, 0, 1.0)
    assert from_source(links, 0) == [1e-9] * 4


def test_a_card_is_busy_with_booked_transfers(links: BandwidthEstimates) -> None:
    links.book(0, 1, 2.0, 10.0)
    links.book(0, 2, 3.0, 10.0)
    assert links.egress_free_at[0] == 15.0
    assert links.ingress_free_at[1:3].tolist() == [12.0, 15.0]


def test_another_instance_begins_anew(links: BandwidthEstimates) -> None:
    for _ in range(10):
        links.add(0, 1, GB, 10.0)
    links.book(1, 0, 5.0, 0.0)
    links.forget(0)
    assert from_source(links, 0) == [links.s_per_byte] * 4
    assert links.ingress_free_at[0] < 0


def test_an_ssd_is_busy_with_its_own_instances_reads(links: BandwidthEstimates) -> None:
    links.book(2, 2, 3.0, 10.0)
    assert links.ssd_free_at[2] == 13.0
    assert links.egress_free_at[2] < 0
