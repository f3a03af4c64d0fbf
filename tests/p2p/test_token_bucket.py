# SPDX-License-Identifier: Apache-2.0
"""The bound of bytes per second."""

from __future__ import annotations

import pytest

from mooncake.p2p.token_bucket import TokenBucket


def test_no_rate_sets_no_bound() -> None:
    bucket = TokenBucket(0, 0)
    bucket.take(1 << 40, 0.0)
    assert bucket.ready_at(0.0) == 0.0


@pytest.mark.parametrize("size", [10, 1000, 5000])
def test_the_rate_is_exact_over_time_whatever_the_size_of_a_chunk(size: int) -> None:
    bucket, now, taken = TokenBucket(1000.0, 1000.0), 0.0, 0
    while now < 100.0:
        at = bucket.ready_at(now)
        if at > now:
            now = at
        bucket.take(size, now)
        taken += size
        bucket.check()
    assert 100_000 - size <= taken <= 100_000 + 1000 + 2 * size


def test_time_that_goes_back_adds_nothing() -> None:
    bucket = TokenBucket(10.0, 10.0)
    bucket.take(20, 5.0)
    assert bucket.ready_at(4.0) == pytest.approx(4.0 + 1.1)


def test_what_is_given_back_may_be_taken_again() -> None:
    bucket = TokenBucket(10.0, 10.0)
    bucket.take(20, 0.0)
    bucket.give_back(20)
    assert bucket.ready_at(0.0) == 0.0
    bucket.check()
