"""Each policy picks what its formula says, and says so."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from mooncake.conductor import fetching, select
from mooncake.conductor.load import Loads
from mooncake.conductor.predict import CostModels, DecodeModel, LinkModel, Predictor, PrefillModel
from mooncake.conductor.select import Cluster, Job
from mooncake.conductor.settings import SchedulingSettings

COSTS = CostModels(
    PrefillModel(1e-15, 1e-3, 1e-15), DecodeModel(0.02, 1e-3, 1e-6), LinkModel(1e-9, 1e6), 100, 10
)
"""A second for a thousand tokens, a tenth of it to load them."""


def cluster(*queued_s: float, costs: CostModels = COSTS, **settings: Any) -> Cluster:
    """Instances h:0, h:1, ... that have prompts to compute for so long."""
    loads, predict = Loads(), Predictor(costs)
    loads.grow(len(queued_s))
    predict.grow(len(queued_s))
    for slot, seconds in enumerate(queued_s):
        if seconds:
            loads.add_prompt(slot, f"r{slot}", seconds, 1, 0.0, 1000.0)
    given = SchedulingSettings(block_tokens=10, **settings)
    names = [f"h:{slot}" for slot in range(len(queued_s))]
    return Cluster(given, Random(0), loads, predict, names, every(queued_s), np.zeros(len(names)))


def every(queued_s: Any) -> Any:
    return np.arange(len(queued_s))


def job(*cached: float, num_tokens: int = 1000, **fields: Any) -> Job:
    held = np.array(cached, dtype=float)
    return Job(1000.0, num_tokens, held, held, **fields)


def test_cache_outweighs_a_shorter_queue_until_it_does_not() -> None:
    choice = select.prefill_by_cache(cluster(0, 0.5), job(0, 900), every("ab"))
    assert choice.slot == 1
    assert "900 of 1000 tokens cached, 0.500 s queued, 0.100 s to compute" in choice.reason
    assert choice.done_s == pytest.approx(0.6)
    assert select.prefill_by_cache(cluster(0, 0.901), job(0, 900), every("ab")).slot == 0


def test_load_ignores_the_cache() -> None:
    choice = select.prefill_by_load(cluster(0.1, 0, 0.2), job(0, 0, 1000), every("abc"))
    assert choice.slot == 1


def test_equals_are_served_by_who_served_least() -> None:
    pair = cluster(0, 0)
    pair.loads.num_placed[0] = 5
    assert select.prefill_by_cache(pair, job(0, 0), every("ab")).slot == 1


def test_affinity_is_followed_until_it_would_cost_more_than_the_prompt() -> None:
    choices = [
        select.prefill_by_cache(cluster(0, 0, 0), job(0, 0, 0, affinity=f"s{n}"), every("abc"))
        for n in range(30)
    ]
    assert len({choice.slot for choice in choices}) == 3
    hinted = job(0, 0, 0, affinity="s0")
    again = select.prefill_by_cache(cluster(0.1, 0.1, 0.1), hinted, every("abc"))
    assert again.slot == choices[0].slot
    assert again.reason.startswith("affinity")
    queues = [5.0 if slot == again.slot else 0.0 for slot in range(3)]
    assert select.prefill_by_cache(cluster(*queues), hinted, every("abc")).slot != again.slot


def test_decode_goes_where_fewest_run() -> None:
    assert select.decode_by_load(cluster(5, 0, 5), job(0, 0, 0), every("abc")).slot == 1
    assert select.decode_by_load(cluster(0, 0), job(0, 60), every("ab")).slot == 1


def test_decode_goes_where_the_next_step_is_shortest_and_fits() -> None:
    trio = cluster(0, 0, 0)
    trio.loads.add_decode(0, "long", 50_000)
    trio.loads.add_decode(1, "a", 100)
    trio.loads.add_decode(1, "b", 100)
    assert select.decode_by_tbt(trio, job(0, 0, 0), np.array([0, 1])).slot == 1
    trio.loads.capacity_tokens[:] = 60_000, 1_100, 900
    assert select.decode_by_tbt(trio, job(0, 0, 0), every("abc")).slot == 0
    trio.loads.capacity_tokens[:] = 50_500, 1_100, 900
    choice = select.decode_by_tbt(trio, job(0, 0, 0), every("abc"))
    assert choice.slot == 0 and choice.reason.startswith("no memory anywhere")


def test_round_robin_takes_turns_and_newcomers_come_less_often() -> None:
    trio = cluster(0, 0, 0)
    chosen = [select.round_robin(trio, job(0, 0, 0), every("abc")).slot for _ in range(6)]
    assert Counter(chosen) == {0: 2, 1: 2, 2: 2}
    trio.loads.became_ready(2, 1000.0)  # a tenth of a share
    chosen = [select.round_robin(trio, job(0, 0, 0), every("abc")).slot for _ in range(21)]
    assert Counter(chosen) == {0: 10, 1: 10, 2: 1}


def test_random_is_seeded() -> None:
    def chosen(seed: int) -> list[int]:
        trio = cluster(0, 0, 0)
        trio.random = Random(seed)
        return [select.at_random(trio, job(0, 0, 0), every("abc")).slot for _ in range(50)]

    assert chosen(1) == chosen(1)
    assert len(set(chosen(1))) == 3


def test_a_newcomer_gets_less() -> None:
    pair = cluster(0.5, 0)
    pair.loads.became_ready(1, 1000.0)
    assert select.prefill_by_load(pair, job(0, 0), every("ab")).slot == 0


def test_the_closest_candidates_are_told_best_first() -> None:
    queues = [float(9 - n) for n in range(20)]
    choice = select.prefill_by_cache(cluster(*np.abs(queues)), job(*[0] * 20), every(queues))
    told = choice.considered
    assert told is not None and len(told.slots) == select.NUM_CONSIDERED
    assert told.slots[0] == choice.slot == 9
    assert (np.diff(told.score_s) >= 0).all()


class TestAlgorithm1:
    """The paper's: transfer + queue + prefill; it transfers whenever prefixes differ by the threshold."""

    def test_a_longer_prefix_elsewhere_is_transferred(self) -> None:
        # Own prefix nowhere on h:1; all of h:0's 900 tokens take 0.09 s, then 100 are computed.
        choice = fetching.kvcache_centric(cluster(0.5, 0), job(900, 0), every("ab"))
        assert (choice.slot, choice.source, choice.fetch_tokens) == (1, 0, (0, 900))
        assert choice.fetch_s == pytest.approx(0.09) and choice.prefill_s == pytest.approx(0.1)
        assert choice.done_s == pytest.approx(0.19)
        assert "900 tokens from h:0 in 0.090 s" in choice.reason

    def test_its_time_counts_beside_queue_and_prefill(self) -> None:
        assert fetching.kvcache_centric(cluster(0.08, 0), job(900, 0), every("ab")).slot == 0
        assert fetching.kvcache_centric(cluster(0.10, 0), job(900, 0), every("ab")).slot == 1

    def test_what_is_not_longer_by_the_factor_is_computed(self) -> None:
        there = job(900, 300)
        local = fetching.kvcache_centric(cluster(5, 0, kvcache_balancing_threshold=3.0), there, every("ab"))
        assert (local.slot, local.source) == (1, -1)
        assert local.prefill_s == pytest.approx(0.7)
        moved = fetching.kvcache_centric(cluster(5, 0, kvcache_balancing_threshold=2.9), there, every("ab"))
        assert (moved.slot, moved.fetch_tokens) == (1, (300, 900))

    def test_nobody_holds_anything(self) -> None:
        choice = fetching.kvcache_centric(cluster(0.1, 0), job(0, 0), every("ab"))
        assert (choice.slot, choice.source) == (1, -1)


class TestOverlap:
    def test_a_load_that_ends_while_the_prompt_waits_costs_nothing(self) -> None:
        # Both queues are longer than the load: the transfer's 0.09 s are not added.
        choice = fetching.overlap(cluster(5.0, 4.95), job(900, 0), every("ab"))
        assert (choice.slot, choice.source) == (1, 0)
        assert choice.done_s == pytest.approx(5.05)

    def test_who_holds_it_is_preferred_to_moving_it_for_nothing(self) -> None:
        assert fetching.overlap(cluster(0, 0), job(900, 0), every("ab")).source == -1

    def test_loading_and_computing_share_what_a_slow_card_leaves(self) -> None:
        slow = CostModels(COSTS.prefill, COSTS.decode, LinkModel(1e-9, 5e4), 100, 10)
        # Loading takes twice as long as computing: some blocks are loaded while the others are computed.
        choice = fetching.overlap(cluster(50, 0, costs=slow), job(900, 0), every("ab"))
        first, end = choice.fetch_tokens
        assert choice.slot == 1 and first == 0 and 0 < end < 900 and end % 10 == 0
        computed_s, loaded_s = (1000 - end) * 1e-3, end * 2e-3
        assert choice.done_s == pytest.approx(max(computed_s, loaded_s + computed_s / 10))
        for other in (end - 10, end + 10):
            computed_s, loaded_s = (1000 - other) * 1e-3, other * 2e-3
            assert choice.done_s <= max(computed_s, loaded_s + computed_s / 10)

    def test_what_lies_on_its_own_ssd_is_read_while_the_prompt_waits(self) -> None:
        costs = CostModels(COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, LinkModel(1e-9, 1e6))
        pair = cluster(0.05, 0, costs=costs)
        there = Job(1000.0, 1000, np.array([900.0, 0.0]), np.array([100.0, 0.0]))
        pair.sources = np.array([], dtype=np.int64)
        choice = fetching.overlap(pair, there, every("ab"))
        assert (choice.slot, choice.source, choice.fetch_tokens) == (0, 0, (100, 900))
        # 0.08 s to read from now on, 0.1 s to compute from 0.05 s on.
        assert choice.done_s == pytest.approx(0.15)
        pair.predict.links.book(0, 0, 5.0, 1000.0)
        choice = fetching.overlap(pair, there, every("ab"))
        assert choice.source == -1

    def test_the_ssd_of_another_lends_when_nobody_has_it_in_memory(self) -> None:
        costs = CostModels(COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, LinkModel(1e-9, 2e5))
        there = Job(1000.0, 1000, np.array([900.0, 0.0]), np.array([0.0, 0.0]))
        choice = fetching.overlap(cluster(5.0, 0, costs=costs), there, every("ab"))
        assert (choice.slot, choice.source) == (1, 0)
        assert choice.card_s == pytest.approx(choice.fetch_tokens[1] * 5e-4)

    def test_a_busy_card_is_not_waited_for(self) -> None:
        pair = cluster(50, 0)
        pair.predict.links.book(0, 1, 10.0, 1000.0)
        choice = fetching.overlap(pair, job(900, 0), every("ab"))
        assert (choice.slot, choice.source) == (1, -1)

    def test_another_source_lends_when_the_best_is_busy(self) -> None:
        trio = cluster(50, 50, 0)
        trio.predict.links.egress_free_at[0] = 1005.0
        choice = fetching.overlap(trio, job(900, 800, 0), every("abc"))
        assert (choice.slot, choice.source, choice.fetch_tokens) == (2, 1, (0, 800))

    def test_a_short_prompt_overtakes_and_is_told_so(self) -> None:
        pair = cluster(1.0, 1.0)
        pair.loads.add_prompt(0, "long", 20.0, 1, 1000.0 + select.PATIENCE * 20.0, 1000.0)
        pair.loads.add_prompt(1, "short", 0.01, 1, 1000.0, 1000.0)
        # On h:0 only the long prompt would wait for it; but there are 20 s of nobody's waiting on h:1.
        choice = fetching.overlap(pair, job(0, 0, num_tokens=100), every("ab"))
        assert choice.turn == pytest.approx(1000.0 + select.PATIENCE * 0.1)
        assert choice.slot == 1 and choice.queue_s == pytest.approx(1.01)
        pair.loads.add_prompt(1, "another", 0.2, 1, 1000.0, 1000.0)
        choice = fetching.overlap(pair, job(0, 0, num_tokens=100), every("ab"))
        assert choice.slot == 0 and choice.queue_s == pytest.approx(1.0)
