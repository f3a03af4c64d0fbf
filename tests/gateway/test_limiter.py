# SPDX-License-Identifier: Apache-2.0
"""The limiter counts, refuses and computes the time to retry."""

from __future__ import annotations

import asyncio

import pytest

from mooncake.gateway.limiter import ConcurrencyLimiter
from mooncake.http.openai import ApiError


def test_the_pause_grows_with_the_shortage_and_with_durations() -> None:
    limiter = ConcurrencyLimiter(10)
    limiter.enter(10)
    with pytest.raises(ApiError) as one:
        limiter.enter(1)
    with pytest.raises(ApiError) as many:
        limiter.enter(10)
    assert (one.value.status, many.value.status) == (429, 429)
    assert one.value.retry_after_s is not None and many.value.retry_after_s is not None
    assert many.value.retry_after_s == pytest.approx(10 * one.value.retry_after_s)
    limiter.leave(5, duration_s=100.0)
    limiter.enter(5)
    with pytest.raises(ApiError) as later:
        limiter.enter(1)
    assert later.value.retry_after_s is not None and later.value.retry_after_s > one.value.retry_after_s


def test_a_request_that_never_fits_is_a_bad_request() -> None:
    with pytest.raises(ApiError) as caught:
        ConcurrencyLimiter(2).enter(3)
    assert (caught.value.status, caught.value.detail.param) == (400, "n")


async def test_a_limiter_that_stops_admits_no_more_and_is_empty_at_the_last_end() -> None:
    limiter = ConcurrencyLimiter(2)
    limiter.enter(1)
    limiter.stop()
    with pytest.raises(ApiError) as caught:
        limiter.enter(1)
    assert (caught.value.status, caught.value.detail.code) == (503, "gateway_stopping")
    emptied = asyncio.create_task(limiter.wait_until_empty())
    await asyncio.sleep(0)
    assert not emptied.done()
    limiter.leave(1, duration_s=1.0)
    await emptied
