# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hit_rate import (
    Cache,
    CountingCache,
    EndlessCache,
    Placement,
    Policy,
    PoolCache,
    best_of_two,
    longest_match,
    make_cache,
    measure,
    measure_placed,
    random_placement,
)
from mooncake.conductor.prediction import PrefillModel
from mooncake.sim.traces.generators import Agentic, Generator, Poisson
from mooncake.sim.traces.trace import TraceOptions, TraceRow, read_trace
from mooncake.store.master.eviction import Eviction
from mooncake.store.master.objects import Extent, Objects
from mooncake.store.master.segments import Segment
from mooncake.store.messages import Mount


def row(*keys: int, num_input: int = 0) -> TraceRow:
    return TraceRow(0.0, num_input or 512 * len(keys), 1, keys)


class PlainCache:
    """The convention, literally and slowly: the least used by ``order`` is evicted."""

    def __init__(self, num_blocks: int, policy: Policy) -> None:
        self._num_blocks, self._policy = num_blocks, policy
        self._uses: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._now = 0

    def _order(self, key: int) -> tuple[int, ...]:
        uses, place, last = self._uses[key], self._place[key], self._last[key]
        return {"lru": (last,), "lfu": (uses, last), "length_aware": (uses, -place, last)}[self._policy]

    def match(self, keys: Sequence[int]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self._uses), len(keys))

    def use(self, keys: Sequence[int]) -> None:
        for place, key in enumerate(keys):
            self._now += 1
            if key not in self._uses:
                if len(self._uses) >= self._num_blocks:
                    del self._uses[min(self._uses, key=self._order)]
                self._uses[key] = 0
            self._uses[key] += 1
            self._last[key], self._place[key] = self._now, place


class StoreCache:
    """The store's own order of eviction, on its own objects."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._objects, self._eviction = Objects(0), Eviction("lru")
        self._segment = Segment(Mount("s", 1, "h", 0, 1 << 40, b"", 0.0), None, 0.0)
        self._now = 0.0

    def match(self, keys: Sequence[int]) -> int:
        readable = self._objects.readable
        return next((place for place, key in enumerate(keys) if str(key) not in readable), len(keys))

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._now += 1
            stored = self._objects.readable.get(str(key))
            if stored is not None:
                stored.lease_until = self._now
                continue
            if len(self._objects.readable) >= self._num_blocks:
                victim, extent = next(self._eviction.victims([self._segment], self._now))
                self._eviction.left(victim, extent)
                self._objects.unlink(victim)
            extent = Extent(self._segment, 0)
            stored = self._objects.begin(str(key), 1, 1, 1, [extent], self._now + 1)
            self._objects.finish(stored, b"crc!", self._now)
            self._eviction.add(stored, self._now)


def hits(cache: Cache, rows: Sequence[TraceRow]) -> list[int]:
    found = []
    for one in rows:
        found.append(cache.match(one.keys))
        cache.use(one.keys)
    return found


prompts = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
        lambda choices: row(
            *(int("".join(map(str, choices[:end])), 3) + 3**end for end in range(1, len(choices) + 1))
        )
    ),
    max_size=60,
)
"""Prompts that share beginnings: a key is the path to its block."""


@settings(deadline=None)
@given(prompts, st.integers(1, 30), st.sampled_from(["lfu", "length_aware"]))
def test_counting_policies_are_what_they_say(rows: list[TraceRow], num_blocks: int, policy: Policy) -> None:
    assert hits(CountingCache(num_blocks, policy), rows) == hits(PlainCache(num_blocks, policy), rows)


@settings(deadline=None)
@given(prompts, st.integers(1, 30))
def test_the_stores_order_of_eviction_is_the_convention(rows: list[TraceRow], num_blocks: int) -> None:
    assert hits(StoreCache(num_blocks), rows) == hits(PlainCache(num_blocks, "lru"), rows)


@pytest.mark.parametrize(
    "generator",
    [Poisson(requests=3_000, prefixes=20, prefix_tokens=2_048), Agentic(sessions=12, turns=12)],
    ids=["poisson", "agentic"],
)
def test_an_engines_pool_hits_as_often_as_the_convention(generator: Generator) -> None:
    """Not block by block: it makes room for a whole prompt at once."""
    rows = list(generator)
    for num_blocks in (200, 1_000, 4_000):
        pool = measure(rows, PoolCache(num_blocks), 512).num_hit_blocks
        store = measure(rows, StoreCache(num_blocks), 512)
        assert pool == pytest.approx(store.num_hit_blocks, abs=0.005 * store.num_blocks)


@settings(deadline=None)
@given(prompts, st.sampled_from(["lru", "lfu", "length_aware"]))
def test_a_cache_that_is_large_enough_is_an_endless_one(rows: list[TraceRow], policy: Policy) -> None:
    num_blocks = len({key for one in rows for key in one.keys}) + 1
    assert hits(make_cache(policy, num_blocks), rows) == hits(EndlessCache(), rows)


@settings(deadline=None)
@given(prompts, st.sampled_from(["lru", "lfu", "length_aware"]), st.integers(1, 8))
def test_no_cache_finds_more_than_an_endless_one(
    rows: list[TraceRow], policy: Policy, num_blocks: int
) -> None:
    found = hits(make_cache(policy, num_blocks), rows)
    assert all(own <= most for own, most in zip(found, hits(EndlessCache(), rows), strict=True))
    assert max(found, default=0) <= num_blocks


def test_what_leaves_first() -> None:
    used = [row(1, 2), row(3), row(1, 2), row(4)]
    left: dict[Policy, set[int]] = {"lru": {3}, "lfu": {3}, "length_aware": {3}}
    for policy, gone in left.items():
        cache = make_cache(policy, 3)
        hits(cache, used)
        assert {key for key in (1, 2, 3, 4) if not cache.match([key])} == gone
    cache = CountingCache(3, "length_aware")
    hits(cache, [row(1, 2, 3), row(4)])
    assert [cache.match([key]) for key in (1, 2, 3, 4)] == [1, 1, 0, 1], "the farthest back of the equals"


def test_ratios_count_blocks_tokens_and_full_blocks() -> None:
    rows = [row(1, 2, 3, num_input=1_100), row(1, 2, 3, num_input=1_100), row(1, num_input=200)]
    counts = measure(rows, EndlessCache(), 512, PrefillModel(0.0, 1.0, 0.0))
    assert (counts.num_hit_blocks, counts.num_blocks) == (4, 7)
    assert (counts.num_hit_tokens, counts.num_tokens) == (1_300, 2_400)
    assert (counts.num_hit_full_blocks, counts.num_full_blocks) == (2, 4)
    assert counts.mean_prefill_s == pytest.approx((1_100 + 0 + 0) / 3)


def test_longest_match_sends_a_family_where_it_began_and_a_pool_serves_all() -> None:
    rows = [row(0, 10 * number + 1, 10 * number + 2) for number in (1, 2, 3, 1, 2, 3)]
    caches = [PoolCache(4) for _ in range(3)]
    local = measure_placed(rows, caches, longest_match, 512)
    shared = measure(rows, PoolCache(12), 512)
    assert [cache.match([0]) for cache in caches] == [1, 0, 0], "all went to the first"
    assert local.num_hit_blocks < shared.num_hit_blocks == 2 * 1 + 3 * 3


@pytest.mark.parametrize("place", [random_placement, best_of_two])
def test_a_seed_places_the_same_way_each_time(place: Callable[[int], Placement]) -> None:
    rows = list(Poisson(requests=200, prefixes=5))

    def found(seed: int) -> int:
        return measure_placed(rows, [PoolCache(50) for _ in range(4)], place(seed), 512).num_hit_blocks

    assert found(1) == found(1)
    assert 0 < found(2) <= measure(rows, EndlessCache(), 512).num_hit_blocks


def traces() -> Path | None:
    """``data/traces`` beside this project or above it."""
    for parent in Path(__file__).resolve().parents:
        for folder in (parent / "data" / "traces", parent / "shared" / "data" / "traces"):
            if (folder / "conversation_trace.jsonl").exists():
                return folder
    return None


@pytest.mark.skipif(traces() is None, reason="no data/traces beside or above the project")
def test_the_ratios_of_the_conversation_trace_are_those_of_an_independent_simulation() -> None:
    """No paper prints them; the last one is read off a figure."""
    folder = traces()
    assert folder is not None
    path = str(folder / "conversation_trace.jsonl")
    counts = measure(read_trace(path), EndlessCache(), 512)
    ratios = (counts.block_ratio, counts.token_ratio, counts.full_block_ratio)
    assert [round(ratio, 4) for ratio in ratios] == [0.3664, 0.3736, 0.3819]
    halved = measure(read_trace(path, TraceOptions(is_halved=True)), PoolCache(3_000_000 // 256), 256)
    assert halved.block_ratio == pytest.approx(0.164, abs=0.01), "FAST'25 Fig 9 at 3M tokens"
