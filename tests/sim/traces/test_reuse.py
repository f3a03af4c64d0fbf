# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest

from mooncake.recorded_requests import RecordedRequest
from mooncake.sim.traces.reuse import NUM_GROUPS, RecencyRanks, ReuseReport, reuse_of
from mooncake.sim.traces.trace import TraceRow

BLOCK = 16


def lru_hit_rate(rows: list[TraceRow], num_blocks: int) -> float:
    """The hit rate of a cache that is run, block by block."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for row in rows:
        num_hits = 0
        for key in row.keys:
            if key not in cache:
                break
            num_hits += 1
        hit += min(num_hits * BLOCK, row.num_input - 1)
        total += row.num_input
        for key in reversed(row.keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return hit / total


def sessions(seed: int, num_sessions: int, num_turns: int) -> list[TraceRow]:
    """Sessions whose prompts grow, side by side; all begin with the same block."""
    random, rows, fresh = Random(seed), list[TraceRow](), iter(range(1, 1 << 30))
    keys: dict[int, tuple[int, ...]] = {}
    for number in range(num_sessions * num_turns):
        session = random.randrange(num_sessions)
        grown = keys.get(session, (0,)) + tuple(next(fresh) for _ in range(random.randrange(1, 6)))
        keys[session] = grown
        rows.append(
            TraceRow(number * 2.0, len(grown) * BLOCK + random.randrange(BLOCK), 5, grown, f"{session}")
        )
    return rows


@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_that_of_caches_that_are_run(seed: int) -> None:
    rows = sessions(seed, 20, 12)
    found = reuse_of(rows, BLOCK)
    for point in found.curve:
        assert point.hit_rate == pytest.approx(lru_hit_rate(rows, point.size_tokens // BLOCK)), point
    assert found.best.hit_rate == pytest.approx(lru_hit_rate(rows, 1 << 30))
    assert found.unique_tokens == BLOCK * len({key for row in rows for key in row.keys})
    rates = [point.hit_rate for point in found.curve]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1]


def test_ranks_survive_renumbering() -> None:
    ranks, recent, random = RecencyRanks(), list[int](), Random(7)
    for _ in range(3000):
        keys = tuple(random.sample(range(600), 40))
        expected = []
        for key in keys:
            if key not in recent:
                break
            expected.append(len(recent) - recent.index(key))
        assert ranks.ranks(keys).tolist() == expected
        ranks.use(keys)
        recent = [one for one in recent if one not in set(keys)] + list(reversed(keys))
    assert len(ranks) == len(recent)


def test_error_bars_contain_the_rate_and_shrink_with_the_trace() -> None:
    def width(report: ReuseReport) -> float:
        return report.best.high - report.best.low

    small, large = reuse_of(sessions(1, 10, 10), BLOCK), reuse_of(sessions(1, NUM_GROUPS, 10), BLOCK)
    for one in (small, large):
        assert one.best.low <= one.best.hit_rate <= one.best.high
    assert 0 < width(large) < width(small)


def test_a_time_to_live_keeps_its_part_of_the_hits() -> None:
    # Nine blocks are used again after 10 s, the tenth after 1,000 s.
    rows = []
    for number in range(10):
        gap_s = 1000.0 if number == 9 else 10.0
        first_s = 5000.0 * number
        rows += [TraceRow(at, BLOCK + 1, 1, (number,), f"{number}") for at in (first_s, first_s + gap_s)]
    by_share = {one.share: one for one in reuse_of(rows, BLOCK).ttl}
    assert by_share[0.9].ttl_s == pytest.approx(10.0, rel=0.05)
    assert by_share[0.95].ttl_s == pytest.approx(1000.0, rel=0.05)
    assert by_share[0.9].low_s <= by_share[0.9].ttl_s <= by_share[0.9].high_s
    # 20 uses of one block for 10 s each but one, in 46,000 s.
    assert by_share[0.9].resident_tokens == pytest.approx(19 * 10 * BLOCK / 46_000, abs=1)
    assert by_share[0.99].resident_tokens > by_share[0.9].resident_tokens


def test_answers_are_hits_only_where_they_are_kept() -> None:
    first = RecordedRequest(0, 2 * BLOCK, 2 * BLOCK, [1, 2], [3, 4], cached_tokens=0)
    second = RecordedRequest(1, 4 * BLOCK + 1, 1, [1, 2, 3, 4], cached_tokens=2 * BLOCK)
    rows = [
        TraceRow(0.0, first.input_length, first.output_length, (1, 2), "s", first),
        TraceRow(1.0, second.input_length, 1, (1, 2, 3, 4), "s", second),
    ]
    total = first.input_length + second.input_length
    kept, dropped = reuse_of(rows, BLOCK, keeps_answers=True), reuse_of(rows, BLOCK)
    assert kept.best.hit_rate == pytest.approx(4 * BLOCK / total)
    assert dropped.best.hit_rate == pytest.approx(2 * BLOCK / total)
    assert dropped.recorded is not None
    assert dropped.recorded.hit_rate == pytest.approx(dropped.best.hit_rate)


def test_a_trace_without_prefixes_has_no_hits() -> None:
    found = reuse_of([TraceRow(float(n), 100, 1, ()) for n in range(3)], BLOCK)
    assert (found.best.hit_rate, found.ttl, found.unique_tokens) == (0.0, [], 0)
    assert found.at(1e9) == found.best


def test_a_block_that_comes_back_after_months_has_a_time_to_live() -> None:
    gap_s = 40 * 86_400.0
    keys = tuple(range(2))
    rows = [TraceRow(0.0, 2 * BLOCK, 1, keys), TraceRow(gap_s, 2 * BLOCK, 1, keys)]
    found = reuse_of(rows, BLOCK)
    assert {(one.ttl_s, one.high_s) for one in found.ttl} == {(gap_s, gap_s)}
    assert {one.resident_tokens for one in found.ttl} == {2 * BLOCK}
