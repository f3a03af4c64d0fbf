# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mooncake.store.master.change_log import MAX_WAITING, ChangeLog
from mooncake.store.messages import SegmentEntry


def test_changes_wait_until_they_are_noted() -> None:
    changes = ChangeLog(1)
    assert changes.noted(0) and changes.take(9) == []
    for object_id in (7, 8, 9):
        changes.add(object_id)
    assert (changes.first, changes.last) == (1, 3)
    assert changes.take(2) == [7, 8] and changes.take(9) == [7, 8, 9]
    assert changes.noted(2) and changes.take(9) == [9]
    assert changes.noted(2) and changes.take(9) == [9], "the same request again"
    assert changes.noted(3) and len(changes) == 0


def test_removals_differ_from_additions() -> None:
    changes = ChangeLog(1)
    changes.add(SegmentEntry("k", 5, 10, 10, b"crc!", 0))
    found = [changes.has_gone]
    changes.add(5)
    changes.add(SegmentEntry("k", 6, 10, 10, b"crc!", 0))
    found.append(changes.has_gone)
    for seen in (1, 2):
        changes.noted(seen)
        found.append(changes.has_gone)
    assert found == [False, True, True, False] and len(changes) == 1


def test_a_node_that_lags_too_far_finds_numbers_missing() -> None:
    changes = ChangeLog(1)
    for object_id in range(MAX_WAITING + 2):
        changes.add(object_id)
    assert not changes.noted(0) and changes.first == 3
    assert changes.noted(2)


def test_changes_without_a_polling_node_are_missed() -> None:
    changes = ChangeLog(1)
    changes.skip()
    assert not changes.noted(0)
    changes.add(5)
    changes.skip()
    changes.add(6)
    assert not changes.noted(2) and changes.take(9) == [6]
    assert changes.noted(changes.last)


def test_a_number_of_another_master_never_appears_up_to_date() -> None:
    for first, seen in ((1000, 0), (1000, 17), (1, 17), (1, 1)):
        changes = ChangeLog(first)
        assert not changes.noted(seen), (first, seen)
        assert changes.first > seen + 1, "that is how the node knows"
        assert changes.noted(changes.last)
