# SPDX-License-Identifier: Apache-2.0
"""The forecast of the number of decoding requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

import pytest

from mooncake.conductor.decode_forecast import DecodeForecast, DecodeLoad


def test_admitted_requests_decode_for_the_mean_stay_from_the_end_of_their_prefill_on() -> None:
    forecast = DecodeForecast(first_guess_s=4.0)
    for number, starts_at in enumerate((101.0, 102.0, 103.0)):
        forecast.expect(str(number), starts_at, 1000, 100.0)
    assert [forecast.at(100.0 + after, 100.0).num_requests for after in (0.5, 1.5, 2.5, 3.5)] == [
        0,
        1,
        2,
        3,
    ]
    assert forecast.at(103.5, 100.0).num_tokens == 3000
    assert forecast.at(106.5, 100.0).num_requests == 1
    assert forecast.peak(100.5, 100.0).num_requests == 3
    forecast.check()


def test_a_request_computed_early_decodes_early() -> None:
    forecast = DecodeForecast()
    forecast.expect("r", 150.0, 10, 100.0)
    assert forecast.decoding == DecodeLoad(0, 0)
    forecast.started("r", 103.0)
    assert forecast.decoding == DecodeLoad(1, 10) == forecast.at(104.0, 103.0)
    forecast.left("r", 105.0)
    assert forecast.decoding == DecodeLoad(0, 0)
    assert forecast.mean_stay_s == pytest.approx((10.0 + 2.0) / 2.0, rel=0.02), "the guess and one stay"


def test_the_forgotten_never_decode() -> None:
    forecast = DecodeForecast()
    forecast.expect("a", 101.0, 10, 100.0)
    forecast.forget("a")
    forecast.expect("b", 101.0, 10, 100.0)
    forecast.left("b", 100.5)  # it ended before its prompt was computed
    assert forecast.at(101.5, 100.5) == DecodeLoad(0, 0)
    forecast.check()


def test_the_instant_at_which_it_falls_to_a_number() -> None:
    forecast = DecodeForecast(first_guess_s=10.0)
    for number in range(5):
        forecast.expect(str(number), 100.0 + number, 10, 100.0)
    assert forecast.at(104.5, 100.0).num_requests == 5
    assert forecast.falls_to(5, 104.5, 100.0) == 104.5
    assert forecast.falls_to(3, 104.5, 100.0) == pytest.approx(111.0, abs=0.2)
    assert forecast.falls_to(0, 104.5, 100.0) == pytest.approx(114.0, abs=0.2)


def test_it_agrees_with_a_plain_list_over_hours() -> None:
    random, forecast, now = Random(5), DecodeForecast(), 1000.0
    starts: dict[str, float] = {}
    for number in range(3000):
        now += random.expovariate(0.5)
        starts[str(number)] = now + random.random() * 20
        forecast.expect(str(number), starts[str(number)], 1, now)
        if random.random() < 0.1:
            gone = random.choice(list(starts))
            forecast.forget(gone)
            del starts[gone]
        instant, stay_s = now + random.random() * 20, forecast.mean_stay_s
        sure = sum(instant - stay_s + 0.1 < start <= instant - 0.1 for start in starts.values())
        perhaps = sum(instant - stay_s - 0.1 < start <= instant + 0.1 for start in starts.values())
        assert sure <= forecast.at(instant, now).num_requests <= perhaps
        for key in [key for key, start in starts.items() if start < now - 500]:
            del starts[key]
    forecast.check()


def test_stays_are_learned_from_requests_still_decoding_too() -> None:
    """One of ten leaves after a second, nine stay: the mean stay is not a second."""
    forecast = DecodeForecast()
    for number in range(10):
        forecast.expect(str(number), 100.0, 10, 100.0)
        forecast.started(str(number), 100.0)
    forecast.left("0", 101.0)
    assert forecast.mean_stay_s == pytest.approx((10.0 + 10.0) / 2.0, rel=0.02)


def test_long_contexts_that_stay_longer_are_still_there() -> None:
    """Half of the requests have ten times the context and stay nine times as long: by the mean stay of a
    request 40 % of their tokens would be forgotten."""
    forecast, ends = DecodeForecast(), dict[str, float]()
    for tick in range(2000):
        now = 100.0 + tick * 0.5
        for key in [key for key, end in ends.items() if end <= now]:
            forecast.left(key, now)
            del ends[key]
        is_long = tick % 2 == 0
        forecast.expect(str(tick), now, 10_000 if is_long else 1000, now)
        forecast.started(str(tick), now)
        ends[str(tick)] = now + (18.0 if is_long else 2.0)
    foreseen, there = forecast.at(now, now), forecast.decoding
    assert foreseen.num_requests == pytest.approx(there.num_requests, rel=0.1)
    assert foreseen.num_tokens == pytest.approx(there.num_tokens, rel=0.1)
    assert forecast.peak(now, now).num_tokens == pytest.approx(there.num_tokens, rel=0.1)
    assert forecast.mean_token_stay_s > 1.5 * forecast.mean_stay_s
    forecast.check()


def _played(length: float, starts_at: list[float], step_s: Callable[[int], float], until: float) -> list[int]:
    """How many decode in each hundredth of a second, if each leaves after so many steps."""
    clocks: list[float] = []
    clock, found = 0.0, []
    waiting = sorted(starts_at)
    for number in range(round(until * 100)):
        while waiting and waiting[0] <= number / 100:
            clocks.append(clock)
            waiting.pop(0)
        num = sum(clock - one < length for one in clocks)
        found.append(num)
        clock += 0.01 / step_s(num)
    return found


def test_stays_that_grow_with_the_load_are_followed() -> None:
    """Five requests a second of 20 steps, then twenty: each makes the steps of all longer."""
    random, forecast = Random(3), DecodeForecast()

    def step_s(num: int) -> float:
        return 0.02 + 0.004 * num

    now, clock, active = 0.0, 0.0, dict[str, float]()
    for number in range(1000):
        now = number * 0.02
        forecast.set_step_s(step_s(len(active)), now)
        clock += 0.02 / step_s(len(active))
        for name, ends_at in list(active.items()):
            if clock >= ends_at:
                forecast.left(name, now)
                del active[name]
        if random.random() < 0.1:
            forecast.expect(str(number), now, 100, now)
            forecast.started(str(number), now)
            active[str(number)] = clock + 20.0
    num_before, steps = len(active), forecast._lengths()[0]
    assert 18.0 < steps < 26.0
    for number in range(60):
        forecast.expect(f"coming {number}", now + 0.05 * number, 100, now)
    instant = now + 3.0
    found = forecast.followed(instant, now, lambda load: step_s(load.num_requests)).num_requests
    starts_at = [0.0] * num_before + [0.05 * number for number in range(60)]
    expected = max(_played(steps, starts_at, step_s, 6.0)[300:])
    assert found == pytest.approx(expected, rel=0.15)
    assert found > 1.3 * forecast.peak(instant, now).num_requests, "the stay of before is too short"
    assert forecast.most == DecodeLoad(num_before + 60, 100 * (num_before + 60))
    forecast.check()


def test_the_first_guess_of_a_length_is_forgotten() -> None:
    forecast = DecodeForecast(first_guess_s=10.0)
    forecast.set_step_s(0.1, 0.0)
    assert forecast._lengths()[0] == pytest.approx(200.0), "doubted as much as guessed"
    for number in range(400):
        now = 1.0 + number
        forecast.expect(str(number), now, 50, now)
        forecast.started(str(number), now)
        forecast.left(str(number), now + 0.5)
    steps, token_steps = forecast._lengths()
    assert steps == pytest.approx(5.0, rel=0.02) and token_steps == pytest.approx(steps)


def busy(forecast: DecodeForecast, num_requests: int, every_s: float, stay_s: float) -> float:
    """Requests that come one after the other and stay so long; the time when the last one came."""
    now, there = 1000.0, deque[tuple[float, str]]()
    for number in range(num_requests):
        now = 1000.0 + number * every_s
        forecast.expect(f"r{number}", now, 1000, now)
        forecast.started(f"r{number}", now)
        there.append((now + stay_s, f"r{number}"))
        while there[0][0] <= now:
            forecast.left(there.popleft()[1], now)
    return now


def test_answers_without_a_known_step_are_no_samples_of_a_length() -> None:
    """Their steps were not counted: lengths of 0 would make the pool look empty."""
    forecast = DecodeForecast()
    now = busy(forecast, 1000, 0.05, 3.0)
    for number in range(60):
        forecast.expect(f"w{number}", now + 0.05 * number, 1000, now)
    forecast.set_step_s(0.05, now)
    assert forecast.followed(now + 1.0, now, lambda load: 0.05).num_requests >= 50
    forecast.check()


@pytest.mark.parametrize("ahead_s", [1.0, 10.0, 19.0, 21.0, 30.0, 60.0])
def test_a_load_is_followed_as_far_as_a_request_waits(ahead_s: float) -> None:
    forecast = DecodeForecast()
    forecast.set_step_s(0.02, 1000.0)
    now = busy(forecast, 1000, 0.02, 0.5)
    for number in range(60 * 70):
        forecast.expect(f"w{number}", now + number / 60, 1000, now)
    assert forecast.followed(now + ahead_s, now, lambda load: 0.02).num_requests >= 20
