"""What was forgotten is remembered for a while, and no longer."""

from __future__ import annotations

from mooncake.conductor.index.key_table import key_column
from mooncake.conductor.index.removals import Removal, RemovalLog
from mooncake.types import Tier


def test_the_last_removal_counts() -> None:
    past = RemovalLog(10)
    first = Removal(1.0, "a", Tier.DEVICE, "evicted")
    then = Removal(2.0, "b", None, "lost")
    past.note_removed("", key_column([1, 2, 3]), first)
    past.note_removed("", key_column([3, 4]), then)
    past.note_removed("another", key_column([1]), then)
    assert past.removals([1, 3, 4, 5]) == [first, then, then, None]


def test_it_is_bounded() -> None:
    past = RemovalLog(4)
    removal = Removal(1.0, "a", None, "cleared")
    past.note_removed("", key_column([1, 2, 3]), removal)
    past.note_removed("", key_column([4, 5]), removal)
    assert past.removals([3, 5]) == [None, removal]
    past.note_removed("", key_column(range(10, 20)), removal)
    assert past.removals([5, 15, 16, 19]) == [None, None, removal, removal]
    nothing = RemovalLog(0)
    nothing.note_removed("", key_column([1]), removal)
    nothing.note_prompt(key_column([1]), [2])
    assert nothing.removals([1]) == [None] and nothing.other_salts([3], [2]) == [[]]


def test_the_same_tokens_under_other_salts() -> None:
    past = RemovalLog(6)
    past.note_prompt(key_column([11, 12]), [1, 2])
    past.note_prompt(key_column([21, 22]), [1, 2])
    past.note_prompt(key_column([31]), [1, 2])  # of another length: not the same blocks
    assert past.other_salts([11, 12], [1, 2]) == [[21], [22]]
    assert past.other_salts([42, 9, 41], [2, 7, 1]) == [[12, 22], [], [11, 21]]
    assert past.other_salts([11], []) == [[]]
    past.note_prompt(key_column([41, 42, 43, 44]), [1, 2, 3, 4])
    assert past.other_salts([51], [1]) == [[21, 41]]
    past.note_prompt(key_column([1, 2]))
    assert past.other_salts([51], [1]) == [[41, 1]]
