# SPDX-License-Identifier: Apache-2.0
"""The number of copies follows the rate of use."""

from __future__ import annotations

from mooncake.conductor.hot_prefixes import HotPrefixes


def test_one_copy_per_number_of_uses_a_minute() -> None:
    balance = HotPrefixes(uses_per_copy=10.0)
    for _ in range(25):
        balance.note(7, 100.0)
    assert balance.wants_copy(7, 2, 100.0)
    assert not balance.wants_copy(7, 3, 100.0)
    assert not balance.wants_copy(8, 1, 100.0)


def test_an_unused_prefix_wants_no_copy() -> None:
    balance = HotPrefixes(uses_per_copy=10.0)
    for _ in range(25):
        balance.note(7, 100.0)
    assert balance.uses(7, 160.0) == 12.5
    assert not balance.wants_copy(7, 1, 220.0)


def test_memory_is_bounded() -> None:
    balance = HotPrefixes(uses_per_copy=1.0)
    for key in range(100_000):
        balance.note(key, 0.0)
    assert balance.uses(0, 0.0) == 0 and balance.uses(99_999, 0.0) == 1
