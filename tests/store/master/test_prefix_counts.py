# SPDX-License-Identifier: Apache-2.0
"""Counts by prefix: right sums for any keys, in a bounded number of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.store import messages as m
from mooncake.store.master.prefix_counts import MAX_DEPTH, MAX_ROWS, PrefixCounts
from tests.store.conftest import Voice


def counted(
    keys: list[str], prefix: str = "", depth: int = 9, limit: int = 99, separator: str = "/"
) -> PrefixCounts:
    counts = PrefixCounts(prefix, separator, depth, limit)
    for key in keys:
        counts.add(key, len(key))
    counts.check()
    return counts


def test_each_prefix_has_its_own_objects() -> None:
    counts = counted(["kv/a/1", "kv/a/2", "kv/b", "x"])
    assert counts.rows == {"": (1, 1), "kv/a/": (2, 12), "kv/": (1, 4)}
    assert counts.num_folded == 0


def test_depth_is_bounded() -> None:
    assert counted(["a/b/c/d"], depth=1).rows == {"": (0, 0), "a/": (1, 7)}
    assert counted(["a/b/c/d"], depth=0).rows == {"": (1, 7)}
    assert counted(["a/b/c/d"], depth=-1).rows == {"": (1, 7)}
    (_, deep) = counted(["a/" * 100], depth=1 << 30).rows
    assert deep.count("/") == MAX_DEPTH


def test_counting_begins_below_the_prefix() -> None:
    assert counted(["kv/a/1", "kv/a/2"], prefix="kv/a/").rows == {"kv/a/": (2, 12)}
    assert counted(["kv/a/1"], prefix="kv", depth=1).rows == {"kv": (0, 0), "kv/": (1, 6)}
    assert counted(["m::a", "m::b"], separator="::").rows == {"": (0, 0), "m::": (2, 8)}


def test_what_finds_no_row_counts_above() -> None:
    counts = counted(["a/1", "b/1", "c/x/1", "a/2"], limit=2)
    assert counts.rows == {"": (2, 8), "a/": (2, 6)}
    assert counts.num_folded == 2
    assert len(counted([f"{number}/x" for number in range(MAX_ROWS + 9)], limit=1 << 40).rows) == MAX_ROWS


@given(st.lists(st.text("ab/", max_size=8)), st.integers(0, 5), st.integers(1, 6))
def test_sums_are_right_whatever_the_bounds(keys: list[str], depth: int, limit: int) -> None:
    counts = counted(keys, depth=depth, limit=limit)
    assert sum(number for number, _ in counts.rows.values()) == len(keys)
    assert sum(size for _, size in counts.rows.values()) == sum(map(len, keys))


def test_the_master_counts_readable_objects_of_a_tenant(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("kv/1", "kv/2", "x")
    voice.put("kv/9", tenant="red")
    voice.start("kv/unfinished")
    assert voice.say(m.ListPrefixes("", 1, 10)) == m.Prefixes([("", 1, 1000), ("kv/", 2, 2000)], 0)
    assert voice.say(m.ListPrefixes("kv/", 1, 10)).rows == [("kv/", 2, 2000)]
    assert voice.say(m.ListPrefixes("", 1, 10, tenant="red")).rows == [("", 0, 0), ("kv/", 1, 1000)]
    for hostile in (m.ListPrefixes("red\0", 1, 10), m.ListPrefixes("", 1, 10, tenant="red\0k")):
        assert voice.say(hostile).rows == []
    assert voice.remove("kv/1") is True, "it is not leased"


@pytest.mark.parametrize("separator", ["", "\0", "123456789"])
def test_a_separator_is_short_text(voice: Voice, separator: str) -> None:
    assert voice.say(m.ListPrefixes("", 1, 10, separator)).code == "invalid_argument"
