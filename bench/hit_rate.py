# SPDX-License-Identifier: Apache-2.0
"""Hit rates of a prefix cache on a trace, by policy, capacity and placement, without time.

The convention is that of the published tables: a request counts the blocks that are cached without a gap
from its first one on, then uses all of its blocks, and they are evicted one by one.

``lru`` is an engine's own ``BlockPool``, as in the simulated nodes. The store's ``Eviction`` orders blocks
alike (a test compares them), but carries leases, pins, tiers and replicas with each block, 100 to 300
thousand blocks a second, where whole traces at many capacities need more; its ``lfu`` ages, which the
published LFU does not, and ``length_aware`` exists only in the paper. So these two are here.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Literal, Protocol, TypeAlias

from mooncake.conductor.prediction import PrefillModel
from mooncake.inference.blocks import BlockPool
from mooncake.sim.traces.trace import TraceRow

Policy: TypeAlias = Literal["lru", "lfu", "length_aware"]


Rank: TypeAlias = tuple[int, int, int]
"""(uses, nearness to the prompt's beginning, last use)."""


class Cache(Protocol):
    """A cache of blocks by key."""

    def match(self, keys: Sequence[int]) -> int:
        """How many of ``keys`` are cached, up to the first that is not."""

    def use(self, keys: Sequence[int]) -> None:
        """A request uses all of these; the cache keeps them, as far as they fit."""


class EndlessCache:
    """A cache without eviction."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def match(self, keys: Sequence[int]) -> int:
        known = self._keys
        if known.issuperset(keys):
            return len(keys)
        return next(place for place, key in enumerate(keys) if key not in known)

    def use(self, keys: Sequence[int]) -> None:
        self._keys.update(keys)


class PoolCache:
    """Evicts the least recently used block; of one prompt's the first one first, as in the convention.

    (An engine frees a prompt's blocks the other way round, which keeps beginnings. It matters only where a
    cache is hardly larger than a prompt.)
    """

    def __init__(self, num_blocks: int) -> None:
        self._pool: BlockPool[int] = BlockPool(num_blocks + 1, 1)

    def match(self, keys: Sequence[int]) -> int:
        return len(self._pool.match(keys))

    def use(self, keys: Sequence[int]) -> None:
        if len(keys) <= self._pool.num_usable:
            self._use_together(keys)
            return
        # An engine could not run such a prompt. Here its blocks evict each other.
        for key in keys:
            self._use_together((key,))

    def _use_together(self, keys: Sequence[int]) -> None:
        pool = self._pool
        found = pool.match(keys)
        pool.touch(found)
        fresh = keys[len(found) :]
        blocks = pool.allocate(len(fresh))
        assert blocks is not None
        if fresh:
            pool.publish(blocks, fresh, 0)
        pool.free([*found, *blocks][::-1])
        pool.drain_events()


class CountingCache:
    """Evicts the block used least often since it was stored. Among several, ``length_aware`` takes the one
    farthest back in its prompt; ``lfu``, and ``length_aware`` among equals, the least recently used one."""

    def __init__(self, num_blocks: int, policy: Policy) -> None:
        self._num_blocks = num_blocks
        self._is_length_aware = policy == "length_aware"
        self._ranks: dict[int, Rank] = {}
        """Ranks only grow while a block is cached, so an entry of the heap is never too late, and one that
        turns out to be old goes back with the true rank."""
        self._heap: list[tuple[Rank, int]] = []
        self._now = 0

    def match(self, keys: Sequence[int]) -> int:
        ranks = self._ranks
        return next((place for place, key in enumerate(keys) if key not in ranks), len(keys))

    def use(self, keys: Sequence[int]) -> None:
        ranks = self._ranks
        for place, key in enumerate(keys):
            self._now += 1
            nearness = -place if self._is_length_aware else 0
            rank = ranks.get(key)
            if rank is not None:
                ranks[key] = (rank[0] + 1, nearness, self._now)
                continue
            if len(ranks) >= self._num_blocks:
                self._evict()
            ranks[key] = rank = (1, nearness, self._now)
            heapq.heappush(self._heap, (rank, key))

    def _evict(self) -> None:
        heap, ranks = self._heap, self._ranks
        while True:
            rank, key = heap[0]
            true = ranks[key]
            if rank == true:
                heapq.heappop(heap)
                del ranks[key]
                return
            heapq.heapreplace(heap, (true, key))


def make_cache(policy: Policy, num_blocks: int) -> Cache:
    return PoolCache(num_blocks) if policy == "lru" else CountingCache(num_blocks, policy)


@dataclasses.dataclass(slots=True)
class HitCounts:
    """Hits of requests, counted in blocks, in tokens and in full blocks."""

    num_rows: int = 0
    num_blocks: int = 0
    num_hit_blocks: int = 0
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_full_blocks: int = 0
    num_hit_full_blocks: int = 0
    prefill_s: float = 0.0

    def add(self, row: TraceRow, num_hits: int, block_tokens: int, prefill: PrefillModel | None) -> None:
        num_hit_tokens = min(num_hits * block_tokens, row.num_input)
        num_full = row.num_input // block_tokens
        self.num_rows += 1
        self.num_blocks += len(row.keys)
        self.num_hit_blocks += num_hits
        self.num_tokens += row.num_input
        self.num_hit_tokens += num_hit_tokens
        self.num_full_blocks += num_full
        self.num_hit_full_blocks += min(num_hits, num_full)
        if prefill is not None:
            self.prefill_s += prefill.seconds(num_hit_tokens, row.num_input)

    @property
    def block_ratio(self) -> float:
        return self.num_hit_blocks / max(1, self.num_blocks)

    @property
    def token_ratio(self) -> float:
        return self.num_hit_tokens / max(1, self.num_tokens)

    @property
    def full_block_ratio(self) -> float:
        return self.num_hit_full_blocks / max(1, self.num_full_blocks)

    @property
    def mean_prefill_s(self) -> float:
        return self.prefill_s / max(1, self.num_rows)


def measure(
    rows: Iterable[TraceRow], cache: Cache, block_tokens: int, prefill: PrefillModel | None = None
) -> HitCounts:
    """Run all requests on one cache."""
    counts = HitCounts()
    for row in rows:
        counts.add(row, cache.match(row.keys), block_tokens, prefill)
        cache.use(row.keys)
    return counts


Placement: TypeAlias = Callable[[Sequence[int], Sequence[Cache]], int]


def longest_match(keys: Sequence[int], caches: Sequence[Cache]) -> int:
    """The first of the caches that have most of the prompt."""
    return max(range(len(caches)), key=lambda number: caches[number].match(keys))


def random_placement(seed: int) -> Placement:
    random = Random(seed)
    return lambda keys, caches: random.randrange(len(caches))


def best_of_two(seed: int) -> Placement:
    """Draw two caches; choose the one that has more of the prompt."""
    random = Random(seed)

    def place(keys: Sequence[int], caches: Sequence[Cache]) -> int:
        return max(random.sample(range(len(caches)), 2), key=lambda number: caches[number].match(keys))

    return place


def measure_placed(
    rows: Iterable[TraceRow],
    caches: Sequence[Cache],
    place: Placement,
    block_tokens: int,
    prefill: PrefillModel | None = None,
) -> HitCounts:
    """Run each request on one of several nodes that don't share their caches."""
    counts = HitCounts()
    for row in rows:
        cache = caches[place(row.keys, caches)]
        counts.add(row, cache.match(row.keys), block_tokens, prefill)
        cache.use(row.keys)
    return counts
