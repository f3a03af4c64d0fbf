# SPDX-License-Identifier: Apache-2.0
"""The removal log remembers recent removals, up to its capacity."""

from __future__ import annotations

from mooncake.conductor.index.key_table import key_column
from mooncake.conductor.index.removals import Removal, RemovalLog
from mooncake.types import Tier


def test_the_last_removal_counts() -> None:
    removals = RemovalLog(10)
    first = Removal(1.0, "a", Tier.DEVICE, "evicted")
    then = Removal(2.0, "b", None, "lost")
    removals.note_removed("", key_column([1, 2, 3]), first)
    removals.note_removed("", key_column([3, 4]), then)
    removals.note_removed("another", key_column([1]), then)
    assert removals.removals([1, 3, 4, 5]) == [first, then, then, None]


def test_it_is_bounded() -> None:
    removals = RemovalLog(4)
    removal = Removal(1.0, "a", None, "cleared")
    removals.note_removed("", key_column([1, 2, 3]), removal)
    removals.note_removed("", key_column([4, 5]), removal)
    assert removals.removals([3, 5]) == [None, removal]
    removals.note_removed("", key_column(range(10, 20)), removal)
    assert removals.removals([5, 15, 16, 19]) == [None, None, removal, removal]
    nothing = RemovalLog(0)
    nothing.note_removed("", key_column([1]), removal)
    nothing.note_prompt(key_column([1]), [2])
    assert nothing.removals([1]) == [None] and nothing.other_salts([3], [2]) == [[]]


def test_the_same_tokens_under_other_salts() -> None:
    removals = RemovalLog(6)
    removals.note_prompt(key_column([11, 12]), [1, 2])
    removals.note_prompt(key_column([21, 22]), [1, 2])
    removals.note_prompt(key_column([31]), [1, 2])  # of another length: not the same blocks
    assert removals.other_salts([11, 12], [1, 2]) == [[21], [22]]
    assert removals.other_salts([42, 9, 41], [2, 7, 1]) == [[12, 22], [], [11, 21]]
    assert removals.other_salts([11], []) == [[]]
    removals.note_prompt(key_column([41, 42, 43, 44]), [1, 2, 3, 4])
    assert removals.other_salts([51], [1]) == [[21, 41]]
    removals.note_prompt(key_column([1, 2]))
    assert removals.other_salts([51], [1]) == [[41, 1]]
