# SPDX-License-Identifier: Apache-2.0
"""The price of a second, and the turns of classes."""

from __future__ import annotations

import pytest

from mooncake.conductor.admission.shadow_price import ShadowPrice


def offered(
    cost_rates: dict[float, float], *, horizon_s: float = 30.0, turn_share: float = 0.1
) -> ShadowPrice:
    """A price after five horizons of arrivals, given as cost -> seconds of the resource per second."""
    price = ShadowPrice(horizon_s, turn_share)
    for tick in range(int(5 * horizon_s)):
        for cost_s, rate in cost_rates.items():
            for _ in range(round(rate / cost_s)):
                price.offer(1.0, cost_s, float(tick))
    return price


def test_without_overload_nothing_has_a_price() -> None:
    price = offered({0.5: 2.0, 2.0: 2.0})
    assert price.rate(150.0) == pytest.approx(4.0, rel=0.05)
    assert price.per_second(4.5, 150.0) == 0.0


@pytest.mark.parametrize("began_at", [0.0, 1e5, 1e9])
def test_the_clock_may_begin_anywhere_and_nights_may_be_silent(began_at: float) -> None:
    price = ShadowPrice(30.0, 0.1)
    for evening in (began_at, began_at + 8 * 3600.0, began_at + 30 * 86400.0):
        for second in range(150):
            price.offer(1.0, 2.0, evening + second)
        assert price.rate(evening + 150.0) == pytest.approx(2.0, rel=0.05)
        assert price.per_second(1.0, evening + 150.0) > 0.0
        price.check()


def test_in_overload_expensive_requests_are_not_worth_it() -> None:
    price = offered({0.5: 2.0, 2.0: 2.0})
    assert 0.4 < price.per_second(2.5, 150.0) <= 0.5
    paid = {cost: sum(price.is_paid(1.0, cost, 2.5, 150.0) for _ in range(100)) for cost in (0.5, 2.0)}
    assert paid[0.5] == 100
    assert paid[2.0] == pytest.approx(25, abs=5), "half a second of two is left for those at the price"
    assert price.is_paid(4.0, 2.0, 2.5, 150.0), "four times the value makes up for four times the cost"


def test_a_long_backlog_leaves_room_for_the_cheapest_only() -> None:
    price = offered({0.25: 1.0, 0.5: 1.0, 2.0: 2.0})
    assert price.per_second(0.9, 150.0) > 1 / 0.5
    assert not price.is_paid(1.0, 0.5, 0.9, 150.0)
    assert not price.is_paid(1.0, 0.25, 0.0, 150.0)


def test_old_arrivals_fade() -> None:
    price = offered({1.0: 8.0})
    assert price.per_second(4.0, 150.0) > 0.0
    assert price.per_second(4.0, 250.0) == 0.0


def test_no_class_starves() -> None:
    """However high the price, each class gets its share of seconds."""
    price = ShadowPrice(30.0, 0.1)
    taken = {0.5: 0.0, 8.0: 0.0}
    waited: dict[float, list[float]] = {0.5: [0.0], 8.0: [0.0]}
    for tick in range(20_000):
        now = tick / 10
        for cost_s in taken:
            bound_s = price.turn_in_s(cost_s, 4)
            if price.take_turn(cost_s, 4, now):
                taken[cost_s] += cost_s
                waited[cost_s].append(now)
            elif waited[cost_s][-1]:
                assert bound_s <= cost_s * 2 / (0.1 * 4) + 0.1
    assert taken[0.5] == pytest.approx(2000 * 4 * 0.1 / 2, rel=0.1)
    assert taken[8.0] == pytest.approx(2000 * 4 * 0.1 / 2, rel=0.1)
    price.check()
