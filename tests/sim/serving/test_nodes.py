# SPDX-License-Identifier: Apache-2.0
"""The closed form against counting step by step; a node's cache: memory in front of an SSD, and the events of
both.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.conductor.prediction import DecodeModel
from mooncake.inference.blocks import BlockPool
from mooncake.sim.serving.nodes import DecodeBatch, NodeCache, SimRequest, longest_mean

MODEL = DecodeModel(0.02, 0.001, 1e-6)


def sim_request(number: int, num_input: int, num_output: int, first_token_at: float = 0.0) -> SimRequest:
    one = SimRequest(number, 0.0, num_input, num_output, ())
    one.first_token_at = first_token_at
    return one


def one_by_one(batch: DecodeBatch, num_steps: int) -> float:
    size, context, seconds = len(batch), batch.context, 0.0
    for _ in range(num_steps):
        seconds += MODEL.base_s + MODEL.per_request_s * size + MODEL.per_token_s * context
        context += size
    return seconds


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(2, 300)), min_size=1, max_size=8),
    st.integers(0, 200),
)
def test_many_steps_are_as_long_as_one_by_one(prompts: list[tuple[int, int]], num_steps: int) -> None:
    batch = DecodeBatch(MODEL)
    for number, (num_input, num_output) in enumerate(prompts):
        batch.join(sim_request(number, num_input, num_output))
    assert batch.seconds(num_steps) == pytest.approx(one_by_one(batch, num_steps))


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(2, 300)), min_size=1, max_size=8),
    st.floats(0, 20, allow_nan=False),
)
def test_a_change_takes_effect_at_the_end_of_the_step_it_falls_into(
    prompts: list[tuple[int, int]], now: float
) -> None:
    batch = DecodeBatch(MODEL)
    for number, (num_input, num_output) in enumerate(prompts):
        batch.join(sim_request(number, num_input, num_output))
    num_steps = batch.steps_until(now)
    assert batch.seconds(num_steps) >= now - 1e-6
    assert num_steps == 0 or batch.seconds(num_steps - 1) < now + 1e-6


def test_requests_come_and_go_as_in_a_step_by_step_count() -> None:
    batch = DecodeBatch(MODEL)
    first, second = sim_request(1, 100, 11), sim_request(2, 50, 4)
    batch.join(first)
    batch.advance(5)
    second.first_token_at = batch.at - 0.01
    batch.join(second)
    intervals = [MODEL.seconds(1, 101 + n) for n in range(5)]
    assert batch.next_leave == 3
    for _ in range(3):
        intervals.append(batch.seconds(1))
        assert batch.seconds(1) == pytest.approx(MODEL.seconds(2, batch.context))
        batch.advance(1)
    assert batch.leave() == [second]
    assert second.tbt_s == pytest.approx(intervals[5] + 0.01)  # its longest: with the wait before it
    assert batch.context == 100 + 1 + 8
    batch.advance(batch.next_leave)
    assert batch.leave() == [first] and not batch and batch.context == 0
    assert first.tbt_s == pytest.approx(max(intervals))
    assert batch.runs == []


def test_a_step_of_decode_makes_the_first_token_where_prefill_does_not() -> None:
    batch = DecodeBatch(MODEL)
    batch.join(sim_request(1, 100, 11))
    batch.advance(5)
    second = sim_request(2, 50, 2)
    batch.join_without_token(second)
    joined_at, step_s = batch.at, MODEL.seconds(2, 106 + 50)
    batch.make_first_tokens([second])
    assert second.first_token_at == batch.at == pytest.approx(joined_at + step_s)
    assert batch.next_leave == 1, "one of its two tokens is made"
    next_s = batch.seconds(1)
    batch.advance(1)
    assert batch.leave() == [second]
    assert second.tbt_s == pytest.approx(next_s), "the first step is no interval between tokens"
    assert batch.context == 108


def test_a_pause_lengthens_the_next_interval_of_running_requests() -> None:
    batch = DecodeBatch(MODEL)
    old = sim_request(1, 100, 3)
    batch.join(old)
    batch.pause(2.0)
    new = sim_request(2, 10, 3, first_token_at=1.5)
    batch.join(new)
    step_s = batch.seconds(1)
    batch.advance(1)
    batch.advance(1)
    batch.leave()
    assert old.tbt_s == pytest.approx(2.0 + step_s)
    assert new.tbt_s == pytest.approx(0.5 + step_s)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0.001, 1, allow_nan=False)), max_size=20),
    st.floats(0, 1, allow_nan=False),
)
def test_the_longest_tenth_is_that_of_all_intervals(runs: list[tuple[int, float]], wait_s: float) -> None:
    intervals: list[float] = []
    longer_s = wait_s
    for count, seconds in runs:
        if not count:
            longer_s += seconds
        for _ in range(count):
            intervals.append(seconds + longer_s)
            longer_s = 0.0
    if not intervals:
        return
    wanted = math.ceil(Fraction(len(intervals), 10))
    expected = sum(sorted(intervals, reverse=True)[:wanted]) / wanted
    assert longest_mean(runs, wait_s, len(intervals)) == pytest.approx(expected)


def test_runs_that_no_request_needs_are_dropped() -> None:
    batch = DecodeBatch(MODEL)
    for number in range(5000):
        batch.join(sim_request(number, 1, 2 + number % 3))
        batch.advance(1)
        batch.leave()
    assert len(batch.runs) < 2100


def node(num_blocks: int, num_ssd_blocks: int = 0) -> NodeCache[int]:
    ssd: BlockPool[int] | None = BlockPool(num_ssd_blocks + 1, 512) if num_ssd_blocks else None
    return NodeCache(BlockPool(num_blocks + 1, 512), ssd)


def keep(cache: NodeCache[int], keys: list[int]) -> None:
    """As a prefill does: cached blocks are used, the rest is stored."""
    found = cache.match(keys)
    cache.pin(found)
    cache.unpin(found + cache.keep(keys[len(found) :]))


def test_the_longest_unused_leaves_last_blocks_of_a_prompt_first() -> None:
    cache = node(4)
    keep(cache, [1, 2])
    keep(cache, [3, 4])
    keep(cache, [1, 5])
    assert cache.removed == [2]
    assert cache.stored == [1, 2, 3, 4, 5]
    assert len(cache.match([3, 4])) == 2
    cache.check()


def test_what_is_pinned_stays() -> None:
    cache = node(3)
    ids = cache.keep([1, 2])
    keep(cache, [7, 8, 9])  # room for one
    assert cache.match([1, 2]) == ids and len(cache.match([7, 8])) == 1
    cache.unpin(ids)
    cache.check()


def test_what_leaves_memory_lies_on_ssd() -> None:
    cache = node(2, num_ssd_blocks=3)
    keep(cache, [1, 2])
    keep(cache, [3, 4])
    assert cache.match([1]) == [] and cache.num_on_ssd([1, 2]) == 2
    assert sorted(cache.ssd_stored) == [1, 2] and cache.ssd_removed == []
    keep(cache, [5, 6])
    assert len(cache.ssd_removed) == 1
    cache.check()


def test_an_ssd_evicts_last_blocks_of_a_prompt_first() -> None:
    cache = node(4, num_ssd_blocks=6)
    for first in (10, 20, 30):
        keep(cache, list(range(first, first + 4)))
    assert cache.num_on_ssd([10, 11, 12, 13]) == 2 and cache.num_on_ssd([20, 21, 22, 23]) == 4
    small = node(4, num_ssd_blocks=2)
    for first in (10, 20):
        keep(small, list(range(first, first + 4)))
    assert small.num_on_ssd([10, 11, 12, 13]) == 2, "where there is not room for all, the first ones stay"
    cache.check()


@given(st.lists(st.lists(st.integers(1, 12), unique=True, max_size=6), max_size=30))
def test_the_events_add_up_to_the_content(prompts: list[list[int]]) -> None:
    cache = node(5, num_ssd_blocks=4)
    memory: set[int] = set()
    ssd: set[int] = set()
    for keys in prompts:
        keep(cache, keys)
        memory = memory - set(cache.removed) | set(cache.stored)
        for key in cache.ssd_stored:
            ssd.add(key)
        ssd -= {key for key in cache.ssd_removed if not cache.num_on_ssd([key])}
        cache.stored, cache.removed, cache.ssd_stored, cache.ssd_removed = [], [], [], []
        assert {key for key in range(1, 13) if cache.match([key])} >= memory - set(keys)
        assert {key for key in range(1, 13) if cache.num_on_ssd([key])} == ssd
    cache.check()
