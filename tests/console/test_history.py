# SPDX-License-Identifier: Apache-2.0
"""The ring of samples, and quantiles of buckets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.console.history import MetricHistory, quantile, thinned


def test_ring_keeps_the_latest_samples_in_order() -> None:
    history = MetricHistory(num_samples=4)
    for number in range(7):
        history.add(float(number), {"a": 10.0 * number})
    positions = history.positions()
    assert history.times(positions) == [3.0, 4.0, 5.0, 6.0]
    assert history.values("a", positions) == [30.0, 40.0, 50.0, 60.0]
    assert history.times(history.positions(since=4.0)) == [5.0, 6.0]
    assert history.latest() == {"a": 60.0}
    history.check()


def test_series_that_come_later_were_zero_and_those_that_go_are_not_the_latest() -> None:
    history = MetricHistory(num_samples=4)
    history.add(0.0, {"old": 1.0})
    history.add(1.0, {'new{x="1"}': 5.0})
    assert history.values('new{x="1"}', history.positions()) == [0.0, 5.0]
    assert history.names("new") == ['new{x="1"}'] and history.names("ne") == []
    assert history.latest() == {'new{x="1"}': 5.0}
    assert history.values("never", history.positions()) == [0.0, 0.0]


def test_series_are_bounded_and_what_is_left_out_is_counted() -> None:
    history = MetricHistory(num_samples=2, max_series=3)
    history.add(0.0, {str(number): 1.0 for number in range(5)})
    assert history.num_left_out == 2
    history.check()


def test_empty_history_has_no_samples() -> None:
    history = MetricHistory()
    assert history.positions() == [] and history.latest() == {}


@pytest.mark.parametrize(
    ("counts", "share", "found"),
    [([10, 0, 0], 0.5, 0.5), ([0, 10, 0], 0.5, 1.5), ([5, 5, 0], 0.75, 1.5), ([0, 0, 4], 0.9, 2.0)],
)
def test_quantile_as_prometheus_computes_it(counts: list[float], share: float, found: float) -> None:
    assert quantile([1.0, 2.0, math.inf], counts, share) == pytest.approx(found)


def test_quantile_of_nothing_is_none() -> None:
    assert quantile([1.0, math.inf], [0, 0], 0.5) is None


@given(st.lists(st.integers(0, 100), min_size=4, max_size=4), st.floats(0.01, 1.0))
def test_quantile_lies_within_the_bounds(counts: list[int], share: float) -> None:
    found = quantile([1.0, 2.0, 4.0, math.inf], counts, share)
    assert (found is None) == (sum(counts) == 0)
    assert found is None or 0.0 <= found <= 4.0


@given(st.integers(0, 2000), st.integers(2, 200))
def test_thinned_keeps_both_ends(num: int, most: int) -> None:
    found = thinned(list(range(num)), most)
    assert len(found) <= most and found == sorted(set(found))
    assert not num or (found[0] == 0 and found[-1] == num - 1)
