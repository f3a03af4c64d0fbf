# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from bisect import insort
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.files.frames import PLAIN
from mooncake.store.messages import SegmentEntry
from mooncake.store.node import ssd_index
from mooncake.store.node.ssd_index import SortedOffsets, SsdIndex, compacted

PAGE = 4096


def entry(object_id: int, offset: int, size_bytes: int = PAGE, key: str = "") -> SegmentEntry:
    return SegmentEntry(key or f"k{object_id}", object_id, size_bytes, size_bytes, b"crc!", offset)


def folded(content: bytes) -> SsdIndex:
    index = SsdIndex(content)
    index.check()
    return index


def test_held_entries_exist_after_a_restart() -> None:
    index = SsdIndex()
    content = index.hold(entry(1, 0)) + index.hold(entry(2, PAGE))
    again = folded(content)
    assert list(again.entries.values()) == [entry(1, 0), entry(2, PAGE)]
    assert again.num_bytes == index.num_bytes == len(content)


def test_dropped_entries_are_gone_after_a_restart() -> None:
    index = SsdIndex()
    content = index.hold(entry(1, 0)) + index.hold(entry(2, PAGE)) + index.drop([1, 7])
    assert list(folded(content).entries) == [2]
    assert index.drop([1, 7]) == b"", "no record to write"


def test_the_same_entry_again_writes_no_record() -> None:
    index = SsdIndex()
    index.hold(entry(1, 0))
    assert index.hold(entry(1, 0)) == b""


def test_an_object_that_moved_is_at_its_last_place() -> None:
    index = SsdIndex()
    content = index.hold(entry(1, 0)) + index.hold(entry(1, 5 * PAGE))
    assert folded(content).entries[1].offset == 5 * PAGE
    assert index.overlapping(0, PAGE) == []


def test_of_overlapping_entries_the_later_one_counts() -> None:
    """Its bytes overwrote those of the earlier ones, including one that has been dropped since."""
    index = SsdIndex()
    content = index.hold(entry(1, 0, 4 * PAGE)) + index.hold(entry(2, 6 * PAGE))
    content += index.hold(entry(3, 3 * PAGE, 4 * PAGE)) + index.drop([3])
    assert index.entries == {} == folded(content).entries
    assert SsdIndex(content[:-1]).entries.keys() == {3}


def test_an_entry_is_unflushed_until_its_bytes_are_known_to_be_durable() -> None:
    index = SsdIndex()
    content = index.hold(entry(1, 0), is_flushed=False) + index.hold(entry(2, PAGE), is_flushed=False)
    assert index.hold(entry(2, PAGE), is_flushed=False) == b""
    content += index.hold(entry(3, 2 * PAGE))
    assert list(folded(content).unflushed) == [1, 2] and len(folded(content)) == 3
    content += index.mark_flushed([1, 3, 9])
    assert list(folded(content).unflushed) == [2] == list(index.unflushed)
    assert index.mark_flushed([1]) == b"", "no record to write"
    kept = compacted(index.in_order(), unflushed=index.unflushed)
    assert list(folded(kept).unflushed) == [2] and folded(kept).entries == index.entries
    assert list(folded(content + index.drop([2])).unflushed) == [] == list(index.unflushed)


def test_an_entry_that_is_held_again_as_flushed_is_no_longer_unflushed() -> None:
    index = SsdIndex()
    content = index.hold(entry(1, 0), is_flushed=False)
    content += index.hold(entry(1, 0))
    assert not folded(content).unflushed and not index.unflushed
    content += index.hold(entry(1, 5 * PAGE), is_flushed=False)
    content += index.hold(entry(2, 5 * PAGE))
    assert not folded(content).unflushed, "its bytes are overwritten"
    assert list(folded(content).entries) == [2] == list(index.entries)


def test_an_index_of_an_earlier_release_has_no_unflushed_entries() -> None:
    """It flushed bytes before it wrote the entry, with the record that still says so."""
    record = msgspec.msgpack.encode(["held", entry(1, 0)])
    index = folded(PLAIN.frame([record], 0))
    assert list(index.entries) == [1] and not index.unflushed


def test_adjacent_ranges_do_not_overlap() -> None:
    index = SsdIndex()
    for number in range(3):
        index.hold(entry(number, number * PAGE))
    assert index.overlapping(PAGE, PAGE) == [1]
    assert index.overlapping(PAGE - 1, PAGE + 2) == [0, 1, 2]
    assert index.overlapping(3 * PAGE, 10 * PAGE) == []


def test_compaction_keeps_all_entries() -> None:
    index = SsdIndex()
    for number in range(50_000):
        index.hold(entry(number % 10, number % 10 * PAGE, key=f"{number:0100}"))
    wanted = index.wants_compaction
    content = compacted(index.in_order())
    index.compacted_to(len(content))
    assert (wanted, index.wants_compaction) == (True, False)
    assert index.num_bytes == len(content) < 3000
    assert folded(content).entries == index.entries


steps = st.lists(
    st.one_of(
        st.builds(entry, st.integers(0, 9), st.integers(0, 12), st.integers(1, 5)),
        st.lists(st.integers(0, 9), max_size=3),
    ),
    max_size=40,
)


@given(steps, st.integers(0, 40))
def test_replaying_a_log_gives_the_state_that_wrote_it(
    steps: list[SegmentEntry | list[int]], torn_at: int
) -> None:
    index, content = SsdIndex(), b""
    for step in steps:
        content += index.hold(step) if isinstance(step, SegmentEntry) else index.drop(step)
        index.check()
    again = folded(content)
    assert again.entries == index.entries
    assert folded(content + b"\x07\0\0\0torn").entries == index.entries
    assert folded(compacted(again.in_order())).entries == index.entries
    assert SsdIndex(content[:torn_at]).num_bytes <= torn_at


@pytest.mark.parametrize("seed", range(5))
def test_offsets_are_in_order_in_lists_of_bounded_length(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_index, "HALF_LIST", 4)
    random = Random(seed)
    known = sorted(random.sample(range(1000), 50 * seed))
    offsets = SortedOffsets(known)
    for _ in range(400):
        if known and random.random() < 0.45:
            offsets.remove(known.pop(random.randrange(len(known))))
        else:
            number = random.randrange(1000)
            if number in known:
                continue
            insort(known, number)
            offsets.add(number)
        offsets.check()
        assert list(offsets) == known
        start = random.randrange(1000)
        end = start + random.randrange(1, 300)
        first = max((one for one in known if one <= start), default=start)
        assert list(offsets.around(start, end)) == [one for one in known if first <= one < end]
    for number in known:
        offsets.remove(number)
    assert not list(offsets) and not list(offsets.around(0, 1000))
    offsets.add(7)
    assert list(offsets.around(7, 8)) == [7]
