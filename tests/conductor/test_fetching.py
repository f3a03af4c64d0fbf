"""Blocks are fetched when that is sooner, in both policies' own reckoning."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake.conductor import fetching, select
from mooncake.conductor.predict import CostModels, LinkModel
from mooncake.conductor.select import Job
from tests.conductor.clusters import COSTS, cluster, every, job


def test_a_longer_prefix_elsewhere_is_transferred() -> None:
    # Own prefix nowhere on h:1; all of h:0's 900 tokens take 0.09 s, then 100 are computed.
    choice = fetching.kvcache_centric(cluster(0.5, 0), job(900, 0), every("ab"))
    assert (choice.slot, choice.source, choice.fetch_tokens) == (1, 0, (0, 900))
    assert choice.fetch_s == pytest.approx(0.09) and choice.prefill_s == pytest.approx(0.1)
    assert choice.done_s == pytest.approx(0.19)
    assert "900 tokens from h:0 in 0.090 s" in choice.reason


def test_its_time_counts_beside_queue_and_prefill() -> None:
    assert fetching.kvcache_centric(cluster(0.08, 0), job(900, 0), every("ab")).slot == 0
    assert fetching.kvcache_centric(cluster(0.10, 0), job(900, 0), every("ab")).slot == 1


def test_what_is_not_longer_by_the_factor_is_computed() -> None:
    there = job(900, 300)
    local = fetching.kvcache_centric(cluster(5, 0, kvcache_balancing_threshold=3.0), there, every("ab"))
    assert (local.slot, local.source) == (1, -1)
    assert local.prefill_s == pytest.approx(0.7)
    moved = fetching.kvcache_centric(cluster(5, 0, kvcache_balancing_threshold=2.9), there, every("ab"))
    assert (moved.slot, moved.fetch_tokens) == (1, (300, 900))


def test_nobody_holds_anything() -> None:
    choice = fetching.kvcache_centric(cluster(0.1, 0), job(0, 0), every("ab"))
    assert (choice.slot, choice.source) == (1, -1)


def test_a_load_that_ends_while_the_prompt_waits_costs_nothing() -> None:
    # Both queues are longer than the load: the transfer's 0.09 s are not added.
    choice = fetching.overlap(cluster(5.0, 4.95), job(900, 0), every("ab"))
    assert (choice.slot, choice.source) == (1, 0)
    assert choice.done_s == pytest.approx(5.05)


def test_who_holds_it_is_preferred_to_moving_it_for_nothing() -> None:
    assert fetching.overlap(cluster(0, 0), job(900, 0), every("ab")).source == -1


def test_loading_and_computing_share_what_a_slow_card_leaves() -> None:
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


def test_what_lies_on_its_own_ssd_is_read_while_the_prompt_waits() -> None:
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


def test_the_ssd_of_another_lends_when_nobody_has_it_in_memory() -> None:
    costs = CostModels(COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, LinkModel(1e-9, 2e5))
    there = Job(1000.0, 1000, np.array([900.0, 0.0]), np.array([0.0, 0.0]))
    choice = fetching.overlap(cluster(5.0, 0, costs=costs), there, every("ab"))
    assert (choice.slot, choice.source) == (1, 0)
    assert choice.card_s == pytest.approx(choice.fetch_tokens[1] * 5e-4)


def test_a_busy_card_is_not_waited_for() -> None:
    pair = cluster(50, 0)
    pair.predict.links.book(0, 1, 10.0, 1000.0)
    choice = fetching.overlap(pair, job(900, 0), every("ab"))
    assert (choice.slot, choice.source) == (1, -1)


def test_another_source_lends_when_the_best_is_busy() -> None:
    trio = cluster(50, 50, 0)
    trio.predict.links.egress_free_at[0] = 1005.0
    choice = fetching.overlap(trio, job(900, 800, 0), every("abc"))
    assert (choice.slot, choice.source, choice.fetch_tokens) == (2, 1, (0, 800))


def test_a_short_prompt_overtakes_and_is_told_so() -> None:
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
