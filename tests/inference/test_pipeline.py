# SPDX-License-Identifier: Apache-2.0
"""Chunks of equal time keep the stages of a group busy; every stage computes them in the same order."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from mooncake.errors import InvalidArgument, ProtocolError
from mooncake.http.worker_stats import StageStats
from mooncake.inference.pipeline import (
    ChunkPlan,
    Pipeline,
    PromptPassage,
    StageQueue,
    StageTime,
    balanced_counts,
    layer_ranges,
    pass_through,
)

PLAN = ChunkPlan(num_stages=2, per_pair=4e-4, overhead_tokens=16, max_tokens=512, granularity=32)


def seconds(plan: ChunkPlan, cuts: list[int], first: int = 0) -> float:
    """How long the chunks take in the stages, in tokens of work of the whole model."""
    free_at, start, ends_at = [0.0] * plan.num_stages, first, 0.0
    for end in cuts:
        stage_s = (plan.work(start, end) + plan.overhead_tokens) / plan.num_stages
        ends_at, start = pass_through(free_at, 0.0, [stage_s] * plan.num_stages), end
    return ends_at


def test_layers_are_divided_without_gaps() -> None:
    assert layer_ranges(30, 4) == [range(8), range(8, 16), range(16, 23), range(23, 30)]
    for num_layers in range(1, 12):
        for num_stages in range(1, num_layers + 1):
            ranges = layer_ranges(num_layers, num_stages)
            assert [layer for one in ranges for layer in one] == list(range(num_layers))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    with pytest.raises(InvalidArgument, match="num_stages is 4; allowed: 1 to 3"):
        layer_ranges(3, 4)


def test_layers_may_be_divided_otherwise() -> None:
    assert layer_ranges(30, 2, (16, 14)) == [range(16), range(16, 30)]
    for counts in ((30,), (15, 14), (30, 0), (31, -1), (10, 10, 10)):
        with pytest.raises(InvalidArgument, match=r"pipeline_layers is .* 2 counts of 1 or more, 30"):
            layer_ranges(30, 2, counts)


def test_layers_follow_the_times_of_the_stages() -> None:
    assert balanced_counts([15, 15], [9.30, 9.17]) == [15, 15], "a layer takes 0.6 s"
    assert balanced_counts([15, 15], [9.0, 12.0]) == [17, 13]
    assert balanced_counts([10, 10, 10], [3.0, 3.0, 6.0]) == [12, 12, 6], "a machine of half the speed"
    assert balanced_counts([1, 29], [0.0, 29.0]) == [29, 1]
    for seed in range(50):
        random = Random(seed)
        counts = [random.randint(1, 9) for _ in range(random.randint(2, 4))]
        per_layer = [random.uniform(0.5, 2.0) for _ in counts]
        found = balanced_counts(counts, [a * b for a, b in zip(counts, per_layer, strict=True)])
        ways = itertools.product(range(1, sum(counts)), repeat=len(counts))
        slowest = min(
            max(a * b for a, b in zip(way, per_layer, strict=True)) for way in ways if sum(way) == sum(counts)
        )
        assert sum(found) == sum(counts) and min(found) >= 1
        assert max(a * b for a, b in zip(found, per_layer, strict=True)) <= slowest * (1 + 1e-9)


def test_chunks_take_equal_time_and_so_get_shorter() -> None:
    cuts = PLAN.cuts(0, 4096)
    works = [PLAN.work(start, end) for start, end in zip([0, *cuts], cuts, strict=False)]
    share = PLAN.work(0, 4096) / len(cuts)
    assert all(abs(work - share) < 0.2 * share for work in works)
    assert cuts[0] > 2 * (cuts[-1] - cuts[-2])
    assert cuts[-1] == 4096


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1024, 4096, 16384])
def test_the_plan_is_near_the_best_of_equal_lengths_or_better(num_stages: int, num_tokens: int) -> None:
    plan = ChunkPlan(num_stages, 4e-4, 16, num_tokens, 1)
    lengths = [range(0, num_tokens + size, size) for size in range(32, num_tokens, 32)]
    best = min(seconds(plan, [min(end, num_tokens) for end in ends[1:]]) for ends in lengths)
    assert seconds(plan, plan.cuts(0, num_tokens)) <= 1.01 * best


def test_two_stages_are_nearly_twice_as_fast_as_one_worker() -> None:
    alone = PLAN.work(0, 4096) + 8 * PLAN.overhead_tokens  # chunks of 512 tokens
    assert alone / seconds(PLAN, PLAN.cuts(0, 4096)) > 1.8
    three = ChunkPlan(3, 4e-4, 16, 512, 32)
    assert alone / seconds(three, three.cuts(0, 4096)) > 2.6


def test_short_prompts_are_not_cut() -> None:
    assert PLAN.cuts(0, 40) == [40]
    assert PLAN.cuts(4096, 4097) == [4097]
    single = ChunkPlan(1, 4e-4, 16, 512, 32)
    assert single.cuts(0, 500) == [500] and single.cuts(0, 1200) == [512, 1024, 1200]


def test_every_cut_is_in_bounds_and_follows_from_its_beginning() -> None:
    random = Random(7)
    for _ in range(300):
        plan = ChunkPlan(
            random.randint(1, 5),
            random.choice([0.0, 1e-5, 4e-4, 1e-2]),
            random.choice([1.0, 16.0, 500.0]),
            random.randint(32, 2048),
            random.choice([1, 16, 32]),
        )
        first = random.randrange(5000)
        end = first + random.randint(1, 9000)
        cuts, start = plan.cuts(first, end), first
        for cut in cuts:
            assert start < cut <= min(end, start + plan.max_tokens)
            assert plan.chunk_end(first, start, end) == cut
            start = cut
        assert cuts[-1] == end


def test_bad_plans_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        ChunkPlan(2, -1.0, 16, 512)
    with pytest.raises(InvalidArgument):
        ChunkPlan(2, 1e-4, 16, 31, 32)


def times(num: int = 2) -> list[StageTime]:
    return [StageTime(0.5, 1.0)] * num


def test_a_chunk_waits_for_its_slot() -> None:
    pipeline = Pipeline(2, 3)
    assert [pipeline.begin(8, 0, now=float(number)) for number in range(3)] == [0, 1, 2]
    assert not pipeline.has_room and pipeline.latest == 2
    pipeline.check()
    ended = pipeline.done(0, times(), now=5.0)
    assert (ended.number, ended.ended) == (0, 5.0)
    assert (pipeline.begin(8, 1, 6.0), pipeline.slot(3)) == (3, 0)
    pipeline.check()
    assert pipeline.waited_s == [0.5, 0.5] and pipeline.computed_s == [1.0, 1.0]
    assert pipeline.story("0") == ["0.000 chunk 0 rows=8 waited+computed 0.500+1.000 0.500+1.000"]
    assert pipeline.story("3") == ["6.000 chunk 3 rows=8 waited+computed under way"]


def test_a_passage_has_the_bubbles_of_each_stage_and_no_others() -> None:
    """Two chunks of one prompt, after a long time without work; hops take half a second."""
    pipeline = Pipeline(2, 4)
    pipeline.begin(8, 0, now=100.0)
    pipeline.begin(4, 1, now=102.0)
    first = pipeline.done(0, [StageTime(90.0, 2.0), StageTime(92.0, 3.0, 0.5)], now=106.5)
    assert first.hop_s == 0.5 and first.began_in_stages() == [100.0, 103.0]
    second = pipeline.done(1, [StageTime(0.25, 1.0), StageTime(0.5, 2.0, 2.0)], now=108.0)
    passage = PromptPassage(2)
    passage.add(first, 0, 8, is_alone=True)
    passage.add(second, 8, 4, is_alone=True)
    assert passage.stats([range(2), range(2, 5)]) == [
        StageStats(0, 2, 2, began_s=0.0, ended_s=3.0, computed_s=3.0, waited_s=0.25),
        StageStats(2, 5, 2, began_s=3.0, ended_s=7.5, computed_s=5.0, waited_s=3.5),
    ]
    assert (passage.first_token, passage.end_token, passage.is_alone) == (0, 12, True)
    assert passage.alone_s == pytest.approx(8.0), "2 s, a hop, 3 s, 2 s, a hop"
    assert pipeline.bubble_s == [0.25, 3.5], "nothing of the time before the prompt"
    assert pipeline.waited_s == [90.25, 92.5]


def test_a_chunk_behind_another_prompt_has_no_bubble_from_before_it() -> None:
    pipeline = Pipeline(2, 4)
    pipeline.begin(8, 1, now=0.0)
    pipeline.begin(8, 1, now=2.0)
    pipeline.done(0, [StageTime(5.0, 2.0), StageTime(7.0, 3.0)], now=5.0)
    other = pipeline.done(1, [StageTime(0.0, 2.0), StageTime(0.0, 3.0, 1.0)], now=8.0)
    passage = PromptPassage(2)
    passage.add(other, 4, 8, is_alone=False)
    [_, later] = passage.stats([range(2), range(2, 4)])
    assert (later.began_s, later.ended_s, later.waited_s) == (3.0, 6.0, 0.0)
    assert passage.alone_s == 5.0 and not passage.is_alone
    assert pipeline.bubble_s == [0.0, 2.0]


def test_impossible_times_are_an_error_of_the_group() -> None:
    for seconds in (-1.0, math.nan, math.inf):
        pipeline = Pipeline(2, 2)
        pipeline.begin(1, 0, 0.0)
        with pytest.raises(ProtocolError, match="impossible times"):
            pipeline.done(0, [StageTime(0.0, 1.0), StageTime(0.0, seconds)], 0.0)


def test_ends_out_of_order_are_an_error_of_the_group() -> None:
    pipeline = Pipeline(2, 2)
    with pytest.raises(ProtocolError, match="restart"):
        pipeline.done(0, times(), 0.0)
    pipeline.begin(1, 0, 0.0)
    pipeline.begin(1, 0, 0.0)
    with pytest.raises(ProtocolError, match="chunk 1"):
        pipeline.done(1, times(), 0.0)
    with pytest.raises(ProtocolError, match="3 of 2 stages"):
        pipeline.done(0, times(3), 0.0)
    pipeline.check()


def test_a_stage_computes_in_order_and_duties_wait() -> None:
    queue: StageQueue[str, str] = StageQueue()
    queue.add_duty(-1, "now")
    queue.add_duty(0, "after the first")
    queue.add_chunk(1, "second")
    assert queue.take_duties() == ["now"] and queue.take_chunk() is None
    queue.add_chunk(0, "first")
    assert queue.take_chunk() == (0, "first") and queue.take_duties() == []
    queue.computed(0)
    assert queue.take_duties() == ["after the first"] and queue.take_chunk() == (1, "second")
    queue.computed(1)
    assert queue.latest == 1 and queue.take_chunk() is None
    for number in (0, 1):
        with pytest.raises(ProtocolError, match="came twice"):
            queue.add_chunk(number, "again")
    queue.check()


@pytest.mark.parametrize("seed", range(20))
def test_stages_with_rings_never_overwrite_what_is_not_read(seed: int) -> None:
    """A group in which anything that may happen next does, at random; the rings are as in a live one."""
    random = Random(seed)
    num_stages, num_slots = random.randint(2, 4), random.randint(4, 6)
    pipeline = Pipeline(num_stages, num_slots)
    queues: list[StageQueue[int, int]] = [StageQueue() for _ in range(num_stages)]
    rings: list[list[int | None]] = [[None] * num_slots for _ in range(num_stages)]
    arriving: list[tuple[int, int]] = []
    """(stage, chunk) of hops under way."""
    computed: list[list[int]] = [[] for _ in range(num_stages)]
    num_chunks = 40

    def leave(stage: int, number: int) -> None:
        if stage + 1 == num_stages:
            pipeline.done(number, times(num_stages), 0.0)
        else:
            slot = pipeline.slot(number)
            assert rings[stage + 1][slot] is None, "a slot was written that is not read"
            rings[stage + 1][slot] = number
            arriving.append((stage + 1, number))

    while len(computed[-1]) < num_chunks:
        moves = [("begin", 0, 0)] if pipeline.has_room and pipeline.latest + 1 < num_chunks else []
        moves += [("arrive", stage, number) for stage, number in arriving]
        moves += [("compute", stage, 0) for stage in range(1, num_stages)]
        what, stage, number = random.choice(moves)
        if what == "begin":
            begun = pipeline.begin(1, 0, 0.0)
            computed[0].append(begun)
            leave(0, begun)
        elif what == "arrive":
            arriving.remove((stage, number))
            queues[stage].add_chunk(number, number)
        elif (taken := queues[stage].take_chunk()) is not None:
            assert rings[stage][pipeline.slot(taken[0])] == taken[0]
            rings[stage][pipeline.slot(taken[0])] = None
            queues[stage].computed(taken[0])
            computed[stage].append(taken[0])
            leave(stage, taken[0])
        pipeline.check()
        for queue in queues:
            queue.check()
    assert computed == [list(range(num_chunks))] * num_stages
