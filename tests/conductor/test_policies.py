# SPDX-License-Identifier: Apache-2.0
"""Each policy chooses by its formula and gives that as its reason; loads are split where that is best."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.conductor import policies
from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.conductor.policies import (
    POLICIES,
    ClusterView,
    PromptJob,
    best_source,
    cards_wait_s,
    longest_holder,
    own_ssd,
    path_costs,
)
from mooncake.conductor.prediction import CostModels, LinkModel
from mooncake.conductor.settings import SchedulingSettings
from tests.conductor.clusters import COSTS, cluster, every, job


def test_cache_outweighs_a_shorter_queue_until_it_does_not() -> None:
    choice = policies.prefill_by_cache(cluster(0, 0.5), job(0, 900), every("ab"))
    assert choice.slot == 1
    assert "900 of 1000 tokens cached, 0.500 s queued, 0.100 s to compute" in choice.reason
    assert choice.done_s == pytest.approx(0.6)
    assert policies.prefill_by_cache(cluster(0, 0.901), job(0, 900), every("ab")).slot == 0


def test_load_ignores_the_cache() -> None:
    choice = policies.prefill_by_load(cluster(0.1, 0, 0.2), job(0, 0, 1000), every("abc"))
    assert choice.slot == 1


def test_among_equals_the_one_that_served_least_is_chosen() -> None:
    pair = cluster(0, 0)
    pair.loads.tie_order[0] = 5
    assert policies.prefill_by_cache(pair, job(0, 0), every("ab")).slot == 1


def test_affinity_is_followed_until_it_would_cost_more_than_the_prompt() -> None:
    choices = [
        policies.prefill_by_cache(cluster(0, 0, 0), job(0, 0, 0, affinity=f"s{n}"), every("abc"))
        for n in range(30)
    ]
    assert len({choice.slot for choice in choices}) == 3
    hinted = job(0, 0, 0, affinity="s0")
    again = policies.prefill_by_cache(cluster(0.1, 0.1, 0.1), hinted, every("abc"))
    assert again.slot == choices[0].slot
    assert again.reason.startswith("affinity")
    queues = [5.0 if slot == again.slot else 0.0 for slot in range(3)]
    assert policies.prefill_by_cache(cluster(*queues), hinted, every("abc")).slot != again.slot


def test_a_hint_moves_only_when_its_own_instance_leaves() -> None:
    whole = cluster(*[0.0] * 200)
    slots, hints = every(whole.names), [f"session {number}" for number in range(2000)]

    def goes_to(view: policies.ClusterView, hint: str, slots: Any) -> str:
        empty = job(*[0.0] * 200, affinity=hint)
        return view.names[policies.prefill_by_cache(view, empty, slots).slot]

    before = [goes_to(whole, hint, slots) for hint in hints]
    counts = [before.count(name) for name in whole.names]
    assert min(counts) >= 1 and max(counts) < 30, "10 each, give or take"
    gone = before[0]
    after = [goes_to(whole, hint, slots[slots != int(gone[2:])]) for hint in hints]
    assert {one for one, other in zip(before, after, strict=True) if one != other} == {gone}
    assert int(whole.name_hashes[0]) == 0x70C1C5EB00147F42, "the same in every process and release"
    whole.set_name(7, "h:0")
    whole.grow(201)
    assert whole.name_hashes[7] == whole.name_hashes[0] != whole.name_hashes[8]
    assert len(whole.name_hashes) == len(whole.names) == len(whole.turns) == 201


def test_decode_goes_where_fewest_run() -> None:
    assert policies.decode_by_load(cluster(5, 0, 5), job(0, 0, 0), every("abc")).slot == 1
    assert policies.decode_by_load(cluster(0, 0), job(0, 60), every("ab")).slot == 1


def test_decode_goes_where_the_next_step_is_shortest_and_fits() -> None:
    trio = cluster(0, 0, 0)
    trio.loads.add_decode(0, "long", 50_000)
    trio.loads.add_decode(1, "a", 100)
    trio.loads.add_decode(1, "b", 100)
    assert policies.decode_by_tbt(trio, job(0, 0, 0), np.array([0, 1])).slot == 1
    trio.loads.capacity_tokens[:] = 60_000, 1_100, 900
    assert policies.decode_by_tbt(trio, job(0, 0, 0), every("abc")).slot == 0
    trio.loads.capacity_tokens[:] = 50_500, 1_100, 900
    choice = policies.decode_by_tbt(trio, job(0, 0, 0), every("abc"))
    assert choice.slot == 0 and choice.reason.startswith("no memory anywhere")


def test_round_robin_takes_turns_and_new_instances_come_less_often() -> None:
    trio = cluster(0, 0, 0)
    chosen = [policies.round_robin(trio, job(0, 0, 0), every("abc")).slot for _ in range(6)]
    assert Counter(chosen) == {0: 2, 1: 2, 2: 2}
    trio.loads.became_ready(2, 1000.0, np.array([0, 1]))  # a tenth of a share
    chosen = [policies.round_robin(trio, job(0, 0, 0), every("abc")).slot for _ in range(21)]
    assert Counter(chosen) == {0: 10, 1: 10, 2: 1}


def test_random_is_seeded() -> None:
    def chosen(seed: int) -> list[int]:
        trio = cluster(0, 0, 0)
        trio.random = Random(seed)
        return [policies.at_random(trio, job(0, 0, 0), every("abc")).slot for _ in range(50)]

    assert chosen(1) == chosen(1)
    assert len(set(chosen(1))) == 3


def test_a_new_instance_gets_less() -> None:
    pair = cluster(0.5, 0)
    pair.loads.became_ready(1, 1000.0, np.empty(0, np.int64))
    assert policies.prefill_by_load(pair, job(0, 0), every("ab")).slot == 0


def test_the_closest_candidates_are_listed_best_first() -> None:
    queues = [float(9 - n) for n in range(20)]
    choice = policies.prefill_by_cache(cluster(*np.abs(queues)), job(*[0] * 20), every(queues))
    considered = choice.considered
    assert considered is not None and len(considered.slots) == policies.NUM_CONSIDERED
    assert considered.slots[0] == choice.slot == 9
    assert (np.diff(considered.score_s) >= 0).all()


def test_the_chosen_candidate_is_listed_however_many_came_closer() -> None:
    many = cluster(*[0.0] * 20)
    for number in range(20):
        choice = policies.prefill_by_cache(many, job(*[0.0] * 20, affinity=f"s{number}"), every(many.names))
        assert choice.considered is not None and choice.slot in choice.considered.slots
        assert len(set(choice.considered.slots.tolist())) == policies.NUM_CONSIDERED


def test_a_candidate_that_loads_nothing_shows_no_time_for_it() -> None:
    trio = cluster(0.0, 0.0, 0.0)
    trio.sources = every("abc")
    trio.predict.links.egress_free_at[0] = 1030.0
    choice = policies.overlap(trio, job(900, 0, 0), every("abc")[1:])
    assert choice.source < 0 and choice.considered is not None
    assert choice.considered.fetch_s.tolist() == [0.0, 0.0]


def test_candidates_show_the_times_with_which_they_were_compared() -> None:
    """The first has 800 of 1000 tokens and a queue; the others load these, and compute what is left."""
    choice = policies.overlap(cluster(0.9, 0.3, 0.0), job(800, 0, 0), every("abc"))
    seen = choice.considered
    assert seen is not None and seen.slots.tolist() == [2, 1, 0]
    assert seen.prefill_s == pytest.approx([0.2, 0.2, 0.2])
    price = policies.LOAD_PRICE * np.array([0.08, 0.08, 0.0])
    assert seen.score_s == pytest.approx(seen.queue_s + seen.prefill_s + price)


@pytest.mark.parametrize("cached", [300, 310, 990])
def test_the_chosen_candidate_shows_its_exact_split(cached: int) -> None:
    choice = policies.overlap(cluster(9.0, 0.05), job(cached, 0), every("ab"))
    seen = choice.considered
    assert choice.source == 0 and seen is not None
    assert (seen.slots[0], seen.prefill_s[0], seen.fetch_s[0]) == (1, choice.prefill_s, choice.fetch_s)


@pytest.mark.parametrize("policy", [policies.decode_by_load, policies.decode_by_tbt])
def test_among_equal_decodes_more_cached_blocks_win_then_fewer_served(policy: policies.Policy) -> None:
    trio = cluster(0, 0, 0)
    trio.loads.tie_order[:] = 7, 2, 5
    assert policy(trio, job(0, 0, 0), every("abc")).slot == 1
    assert policy(trio, job(100, 0, 100), every("abc")).slot == 2, "of those that hold it"


def test_the_expected_answer_must_fit_into_a_decode_s_memory_too() -> None:
    pair = cluster(0, 0)
    pair.loads.add_decode(1, "other", 100)  # its steps are longer
    pair.loads.capacity_tokens[:] = 1_200, 2_000
    assert policies.decode_by_tbt(pair, job(0, 0), every("ab")).slot == 0
    assert policies.decode_by_tbt(pair, job(0, 0, output_tokens=200), every("ab")).slot == 0, (
        "to the last one"
    )
    assert policies.decode_by_tbt(pair, job(0, 0, output_tokens=201), every("ab")).slot == 1


def test_an_answer_decodes_where_no_other_kv_arrives_with_its_own() -> None:
    pair = cluster(0, 0)
    pair.handovers.add(0, NOW + 0.5, NOW + 1.5, NOW)
    moving = job(0, 0, moving_s=0.4, output_tokens=10)
    moving.computed_at(policies.InstanceChoice(0, "", queue_s=0.2, done_s=1.2))
    assert moving.moves == pytest.approx((NOW + 0.6, NOW + 1.4)), "before the first token, and half as long"
    assert policies.decode_by_end(pair, moving, every("ab")).slot == 1
    pair.loads.add_decode(1, "other", 60_000)  # its steps are longer by 61 ms
    moved = policies.decode_by_end(pair, moving, every("ab"))
    assert moved.slot == 1 and moved.reason.startswith("shortest step: 83.0 ms with 1 others")
    moving.output_tokens = 100  # 0.8 s once, or 6.1 s in total
    chosen = policies.decode_by_end(pair, moving, every("ab"))
    assert chosen.slot == 0
    assert chosen.reason.endswith(", 800.0 ms of other KV on its way there at the same time")
    moving.moves = (0.0, 0.0)
    moving.output_tokens = 10
    assert policies.decode_by_end(pair, moving, every("ab")).slot == 0, "what does not move disturbs none"


# --- turns


def test_a_prompt_with_an_objective_goes_no_later_than_it_must() -> None:
    assert job(0).turn(20.0) == NOW + 80
    due = job(0, slo_ttft_s=40.0)
    assert due.turn(2.0) == NOW + 8, "short ones go before"
    assert due.turn(12.0) == NOW + 8
    assert due.turn(35.0) == NOW, "less than its part of the objective is left"
    assert due.turn(4.0, 10.0) == NOW + 6, "what overtakes it is added to the queue"
    assert due.turn(4.0, 30.0) == NOW
    assert due.turn(41.0) == NOW + 164, "it can't be met"
    assert due.turn(20.0, 20.0) == NOW + 80, "too many wait"


# --- loading before a handover


@pytest.mark.parametrize(("late_s", "expected"), [(0.4, 900), (0.1, 640), (0.0, 550)])
def test_less_is_loaded_where_the_kv_would_reach_decode_late(late_s: float, expected: int) -> None:
    """All is computed in 1 s or loaded in 0.1 s. The KV takes 0.4 s from the last loaded byte on: so much is
    computed that the first token is not earlier than that by more than what is allowed."""
    pair = cluster(0, 0)
    moving = job(0, 1000, moving_s=0.4, late_s=late_s)
    choice = policies.overlap(pair, moving, every("a"))
    first, end = choice.fetch_tokens
    assert (choice.source, first) == (1, 0)
    loaded_s, computed_s = end / 10_000, (1000 - end) / 1000
    assert end == expected
    assert choice.done_s == pytest.approx(max(computed_s, loaded_s + computed_s / 10))


# --- sources of a prompt's blocks


NOW = 1000.0  # of ``job``
SSD = CostModels(COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, LinkModel(0.001, 2e5))  # 0.5 ms a token


def prefill(held: Any) -> Any:
    """Seconds to compute what is not held, a second for a thousand tokens."""
    return (1000.0 - np.array(held, dtype=float)) / 1000


def best_of(trio: ClusterView, held: list[float], on_ssd: list[float] | None = None) -> Any:
    whole = np.array(on_ssd if on_ssd is not None else held, dtype=float)
    given = PromptJob(NOW, 1000, whole, np.array(held, dtype=float))
    with_ssd = None if on_ssd is None else prefill(np.maximum(whole, held))
    return best_source(trio, given, every(held), prefill(held), with_ssd)


def test_the_source_holds_most_and_of_several_has_a_free_card() -> None:
    trio = cluster(0, 0, 0)
    assert longest_holder(trio, job(100, 900, 900)) == (1, 900)
    trio.predict.links.egress_free_at[1] = NOW + 1
    assert longest_holder(trio, job(100, 900, 900)) == (2, 900)
    assert longest_holder(trio, job(0, 0, 0)) == (-1, 0.0)


def test_less_from_an_idle_card_may_be_better_than_all_from_a_busy_one() -> None:
    trio = cluster(0, 0, 0)
    assert best_of(trio, [0, 900, 600]).slot == 1
    trio.predict.links.egress_free_at[1] = NOW + 0.2
    assert best_of(trio, [0, 900, 600]).slot == 1, "the queue is shorter than what would have to be computed"
    trio.predict.links.egress_free_at[1] = NOW + 0.4
    found = best_of(trio, [0, 900, 600])
    assert (found.slot, found.reach, found.is_on_ssd) == (2, 600, False)


def test_blocks_that_no_instance_holds_have_no_source() -> None:
    assert best_of(cluster(0, 0), [0, 0]) is None
    assert best_of(cluster(0, 0), [0, 0], [0, 0]) is None


def test_an_ssd_is_a_source_when_its_reading_pays() -> None:
    trio = cluster(0, 0, 0, costs=SSD)
    found = best_of(trio, [0, 100, 0], [0, 100, 900])
    assert (found.slot, found.reach, found.is_on_ssd) == (2, 900, True)
    assert np.all(np.asarray(found.per_token) >= 0.0005), "no faster than the disk reads"
    found = best_of(trio, [0, 800, 0], [0, 800, 900])
    assert (found.slot, found.is_on_ssd) == (1, False), "0.45 s of reading for 0.1 s of computing"


def test_reads_from_an_own_ssd_wait_for_those_in_progress() -> None:
    pair = cluster(0, 0, costs=SSD)
    pair.predict.links.ssd_free_at[0] = NOW + 0.5
    given = PromptJob(NOW, 1000, np.array([900.0, 0.0]), np.array([100.0, 0.0]))
    own = own_ssd(pair, given, every("ab"), given.in_memory, prefill([900, 0]))
    assert own is not None and own.slot == -1
    assert list(own.begun) == pytest.approx([0.501, 0.001]) and own.per_token == pytest.approx(0.0005)
    assert own_ssd(pair, given, every("ab"), given.cached, prefill([900, 0])) is None, "nothing more there"
    assert own_ssd(pair, given, every("ab"), given.in_memory, None) is None


def test_a_transfer_waits_for_both_cards() -> None:
    pair = cluster(0, 0)
    links = pair.predict.links
    links.egress_free_at[0], links.ingress_free_at[1] = NOW + 1, NOW + 3
    assert list(cards_wait_s(pair, job(0, 0), 0, every("ab"))) == pytest.approx([1.0, 3.0])
    links.egress_free_at[0] = links.ingress_free_at[1] = NOW - 5
    assert list(cards_wait_s(pair, job(0, 0), 0, every("ab"))) == [0.0, 0.0], "finished transfers don't count"


def test_a_link_that_was_measured_is_believed() -> None:
    pair = cluster(0, 0)
    latency_s, before = path_costs(pair, 0, every("ab"))
    assert latency_s == COSTS.link.latency_s
    for _ in range(200):
        pair.predict.links.add(0, 1, 1_000_000, 10.0)  # a tenth of the prior bandwidth
    _, after = path_costs(pair, 0, every("ab"))
    assert np.asarray(after)[1] > np.asarray(before).max() * 5


# --- policies that load blocks from other instances


def test_a_longer_prefix_elsewhere_is_transferred() -> None:
    # Own prefix nowhere on h:1; all of h:0's 900 tokens take 0.09 s, then 100 are computed.
    choice = policies.kvcache_centric(cluster(0.5, 0), job(900, 0), every("ab"))
    assert (choice.slot, choice.source, choice.fetch_tokens) == (1, 0, (0, 900))
    assert choice.fetch_s == pytest.approx(0.09) and choice.prefill_s == pytest.approx(0.1)
    assert choice.done_s == pytest.approx(0.19)
    assert "900 tokens from h:0 in 0.090 s" in choice.reason


def test_its_time_counts_beside_queue_and_prefill() -> None:
    assert policies.kvcache_centric(cluster(0.08, 0), job(900, 0), every("ab")).slot == 0
    assert policies.kvcache_centric(cluster(0.10, 0), job(900, 0), every("ab")).slot == 1


def test_a_prefix_not_longer_by_the_factor_is_computed() -> None:
    there = job(900, 300)
    local = policies.kvcache_centric(cluster(5, 0, kvcache_balancing_threshold=3.0), there, every("ab"))
    assert (local.slot, local.source) == (1, -1)
    assert local.prefill_s == pytest.approx(0.7)
    moved = policies.kvcache_centric(cluster(5, 0, kvcache_balancing_threshold=2.9), there, every("ab"))
    assert (moved.slot, moved.fetch_tokens) == (1, (300, 900))


def test_without_holders_nothing_is_fetched() -> None:
    choice = policies.kvcache_centric(cluster(0.1, 0), job(0, 0), every("ab"))
    assert (choice.slot, choice.source) == (1, -1)


def test_a_load_that_ends_while_the_prompt_waits_costs_nothing() -> None:
    # Both queues are longer than the load: the transfer's 0.09 s are not added.
    choice = policies.overlap(cluster(5.0, 4.95), job(900, 0), every("ab"))
    assert (choice.slot, choice.source) == (1, 0)
    assert choice.done_s == pytest.approx(5.05)


def test_the_holder_is_preferred_to_a_useless_transfer() -> None:
    assert policies.overlap(cluster(0, 0), job(900, 0), every("ab")).source == -1


def test_loading_and_computing_share_the_prompt_with_a_slow_card() -> None:
    slow = CostModels(COSTS.prefill, COSTS.decode, LinkModel(1e-9, 5e4), 100, 10)
    # Loading takes twice as long as computing: some blocks are loaded while the others are computed.
    choice = policies.overlap(cluster(50, 0, costs=slow), job(900, 0), every("ab"))
    first, end = choice.fetch_tokens
    assert choice.slot == 1 and first == 0 and 0 < end < 900 and end % 10 == 0
    computed_s, loaded_s = (1000 - end) * 1e-3, end * 2e-3
    assert choice.done_s == pytest.approx(max(computed_s, loaded_s + computed_s / 10))
    for other in (end - 10, end + 10):
        computed_s, loaded_s = (1000 - other) * 1e-3, other * 2e-3
        assert choice.done_s <= max(computed_s, loaded_s + computed_s / 10)


def test_blocks_on_its_own_ssd_are_read_while_the_prompt_waits() -> None:
    costs = CostModels(COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, LinkModel(1e-9, 1e6))
    pair = cluster(0.05, 0, costs=costs)
    there = PromptJob(1000.0, 1000, np.array([900.0, 0.0]), np.array([100.0, 0.0]))
    pair.sources = np.array([], dtype=np.int64)
    choice = policies.overlap(pair, there, every("ab"))
    assert (choice.slot, choice.source, choice.fetch_tokens) == (0, 0, (100, 900))
    # 0.08 s to read from now on, 0.1 s to compute from 0.05 s on.
    assert choice.done_s == pytest.approx(0.15)
    pair.predict.links.book(0, 0, 5.0, 1000.0)
    choice = policies.overlap(pair, there, every("ab"))
    assert choice.source == -1


def test_another_s_ssd_is_the_source_when_none_has_it_in_memory() -> None:
    costs = CostModels(COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, LinkModel(1e-9, 2e5))
    there = PromptJob(1000.0, 1000, np.array([900.0, 0.0]), np.array([0.0, 0.0]))
    choice = policies.overlap(cluster(5.0, 0, costs=costs), there, every("ab"))
    assert (choice.slot, choice.source) == (1, 0)
    assert choice.card_s == pytest.approx(choice.fetch_tokens[1] * 5e-4)


def test_a_busy_card_is_not_waited_for() -> None:
    pair = cluster(50, 0)
    pair.predict.links.book(0, 1, 10.0, 1000.0)
    choice = policies.overlap(pair, job(900, 0), every("ab"))
    assert (choice.slot, choice.source) == (1, -1)


def test_another_source_is_used_when_the_best_is_busy() -> None:
    trio = cluster(50, 50, 0)
    trio.predict.links.egress_free_at[0] = 1005.0
    choice = policies.overlap(trio, job(900, 800, 0), every("abc"))
    assert (choice.slot, choice.source, choice.fetch_tokens) == (2, 1, (0, 800))


def test_a_short_prompt_overtakes_and_its_turn_says_so() -> None:
    pair = cluster(1.0, 1.0)
    pair.loads.add_prompt(0, "long", 20.0, 1, 1000.0 + policies.OVERTAKING_FACTOR * 20.0, 1000.0)
    pair.loads.add_prompt(1, "short", 0.01, 1, 1000.0, 1000.0)
    # On h:0 only the long prompt would wait for it; on h:1 there are 20 s of queue and none that waits.
    choice = policies.overlap(pair, job(0, 0, num_tokens=100), every("ab"))
    assert choice.turn == pytest.approx(1000.0 + policies.OVERTAKING_FACTOR * 0.1)
    assert choice.slot == 1 and choice.queue_s == pytest.approx(1.01)
    pair.loads.add_prompt(1, "another", 0.2, 1, 1000.0, 1000.0)
    choice = policies.overlap(pair, job(0, 0, num_tokens=100), every("ab"))
    assert choice.slot == 0 and choice.queue_s == pytest.approx(1.0)


def test_what_waits_on_an_instance_will_be_in_its_cache() -> None:
    """Else each of many prompts with a new prefix has it computed on another instance."""
    pair, keys = cluster(1.0, 1.0), range(96)
    pair.loads.add_prompt(0, "first", 0.8, 960, 1000.5, 1000.0, KeyedPrompt(keys))
    for name in ("overlap", "cache_aware", "kvcache_centric"):
        choose, _ = policies.POLICIES[name]
        choice = choose(pair, job(0, 0, keys=[*keys, *range(1000, 1004)]), every("ab"))
        assert choice.slot == 0 and choice.queue_s == pytest.approx(1.8), name
        assert "0 of 1000 tokens cached, 960 more by those before it" in choice.reason, name
        assert choice.prefill_s == pytest.approx(0.04), "four blocks of its own"
    assert policies.overlap(pair, job(0, 0, keys=range(1, 100)), every("ab")).slot == 1, "it begins otherwise"
    choice = policies.overlap(pair, job(0, 0, keys=keys, num_tokens=960), every("ab"))
    assert choice.turn >= 1000.5, "not before the prompt that computes the prefix"
    higher = policies.overlap(pair, job(0, 0, keys=keys, num_tokens=960, priority=-1), every("ab"))
    assert higher.turn < 1000.0, "but one of higher priority does not wait for it"
    pair.loads.end_prompt(0, "r0", 1000.0)
    choice = policies.overlap(pair, job(0, 0, keys=keys, num_tokens=960), every("ab"))
    assert choice.slot == 0 and choice.turn < 1000.5, "it is being computed, and nothing overtakes it"
    pair.loads.end_prompt(0, "first", 1000.0)
    assert policies.overlap(pair, job(0, 0, keys=keys), every("ab")).prefill_s == pytest.approx(1.0)


def test_no_prompt_overtakes_one_that_is_no_longer() -> None:
    """The longer the queue the less a prompt can wait, but those before it can wait no longer for that."""
    one = cluster(0.0)
    early = policies.overlap(one, job(0, slo_ttft_s=10.0), every("a"))
    one.loads.add_prompt(0, "computed", 6.0, 1, 0.0, 1000.0)
    one.loads.add_prompt(0, "early", 1.0, 1000, early.turn, 1000.0)
    late = policies.overlap(one, job(0, slo_ttft_s=10.0), every("a"))
    assert late.turn >= early.turn > 1000.0 and late.queue_s == pytest.approx(7.0)
    assert policies.overlap(one, job(0, num_tokens=500), every("a")).queue_s == pytest.approx(6.0)


@pytest.mark.parametrize("priority", [-1, 1])
def test_a_turn_is_that_of_its_own_priority(priority: int) -> None:
    """Neither does it wait for prompts of a lower one, nor take the turn of one that happens to be short."""
    one = cluster(1.0)
    for number in range(5):
        one.loads.add_prompt(0, f"{number}", 1.0, 1000, 1000.0 + number, 1000.0)
    there = policies.overlap(one, job(0, priority=priority), every("a"))
    assert there.turn == pytest.approx(1004.0 + priority * policies.PRIORITY_S)
    assert there.queue_s == pytest.approx(6.0 if priority > 0 else 1.0)
    one.loads.add_prompt(0, "of that priority", 0.1, 100, there.turn, 1000.0)
    assert policies.overlap(one, job(0), every("a")).turn == pytest.approx(1004.0)


def test_turns_are_compared_by_what_prompts_take_where_they_take_least() -> None:
    pair = cluster(5.0, 0.0)
    there = job(900, 0, num_tokens=1000)
    first = policies.overlap(pair, there, np.array([1]))
    pair.loads.add_prompt(1, "computed", 3.0, 1, 0.0, 1000.0)
    pair.loads.add_prompt(1, "first", first.busy_s, 1000, first.turn + 2.0, 1000.0, least_s=first.least_s)
    assert policies.overlap(pair, there, np.array([1])).turn == first.turn + 2.0, "they are equally long"


def test_what_is_not_shorter_for_it_is_not_loaded() -> None:
    costs = CostModels(COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, reuse_s=0.07)
    choice = policies.overlap(cluster(5.0, 0.0, costs=costs), job(20, 0, num_tokens=200), every("ab"))
    assert (choice.slot, choice.source) == (1, -1) and choice.done_s == pytest.approx(0.2)


def plainly(pair: ClusterView, there: PromptJob, slots: list[int]) -> list[tuple[float, int]]:
    """By candidate: its score and the source it would load from (-1: none), computed with scalars."""
    predict, layers = pair.predict, pair.predict.costs.num_layers
    costs, block = predict.costs, pair.settings.block_tokens
    assert block == 10
    ssd_s = costs.kv_bytes_per_token / costs.ssd.bytes_per_s

    def compute_s(slot: int, first: float) -> float:
        return predict.prefill_at(slot)(first, there.num_tokens)

    sources: list[tuple[float, int, int, float, bool]] = []
    for is_ssd, tokens in enumerate((there.in_memory, there.cached)):
        for slot in pair.sources.tolist():
            if tokens[slot] > 0:
                wait_s = max(predict.links.egress_free_at[slot] - there.now, 0.0)
                slow_s = tokens[slot] * ssd_s * is_ssd
                cost = wait_s + slow_s + compute_s(slot, tokens[slot])
                sources.append((cost, len(sources), slot, float(tokens[slot]), bool(is_ssd)))
    best = min(sources, default=None)
    least_s = min(compute_s(slot, max(there.cached[slot], best[3] if best else 0.0)) for slot in slots)
    awaited: dict[int, tuple[int, float]] = {}
    for group in pair.loads.queued_prefixes.reach(KeyedPrompt(there.keys)):
        for slot, after in zip(group.slots, group.turns, strict=True):
            awaited.setdefault(slot, (group.num_blocks, after))
    for slot, (num_blocks, after) in awaited.items():
        if after == -np.inf and slot in slots and num_blocks * block > there.in_memory[slot]:
            least_s = min(least_s, compute_s(slot, num_blocks * block))
    results = []
    for slot in slots:
        waiting = [pair.loads.prompt(slot, name) for name in pair.loads.prompts_of(slot)[1:]]
        turn = max([there.turn(least_s), *(one[2] for one in waiting if one and one[0] <= least_s)])
        [queue_s], behind = pair.loads.queue_s(np.array([slot]), there.now, turn)
        own = float(there.in_memory[slot])
        num_blocks, after = awaited.get(slot, (0, 0.0))
        if num_blocks * block > own:
            [later_s], later = pair.loads.queue_s(np.array([slot]), there.now, max(turn, after))
            if later_s + compute_s(slot, num_blocks * block) < queue_s + compute_s(slot, own):
                queue_s, behind, own = later_s, later, float(num_blocks * block)
        ways = [(queue_s + compute_s(slot, own), 0.0, -1)]
        options = [(slot, float(there.cached[slot]), True)] if there.cached[slot] > own else []
        if best is not None and best[2] != slot and best[3] > own:
            options.insert(0, best[2:])
        for source, reach, is_ssd in options:
            per_token, free_at = ssd_s, predict.links.ssd_free_at[slot]
            latency_s = costs.ssd.latency_s
            if source != slot:
                card_s = predict.links.s_per_byte * costs.kv_bytes_per_token
                per_token, latency_s = max(card_s, ssd_s) if is_ssd else card_s, predict.links.latency_s
                free_at = max(predict.links.egress_free_at[source], predict.links.ingress_free_at[slot])
            begun = max(free_at - there.now, 0.0) + latency_s
            all_s, rest = (reach - own) * per_token, compute_s(slot, reach)
            lead = ways[0][0] - begun - compute_s(slot, own) / layers
            late = begun + all_s + rest / layers - queue_s - rest
            part = 1.0 if late <= 0 else min(max(lead / max(lead + late, 1e-12), 0.0), 1.0)
            part *= rest < compute_s(slot, own)
            done = ways[0][0] - part * (compute_s(slot, own) - rest)
            ways.append((done, policies.LOAD_PRICE * part * all_s, source if part else -1))
        done, price, source = min(ways[1:] or ways, key=lambda way: way[0])
        num_behind = 0.0 if behind is None else float(behind[0])
        results.append((done + num_behind * (done - queue_s) + price, source))
    return results


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1 << 30))
def test_the_choice_is_the_best_of_all_computed_one_by_one(seed: int) -> None:
    random = Random(seed)
    num = random.choice([2, 5, 12])
    costs = CostModels(
        COSTS.prefill, COSTS.decode, COSTS.link, 100, 10, LinkModel(1e-9, random.choice([2e5, 5e6]))
    )
    many = cluster(*(random.choice([0.0, random.random()]) for _ in range(num)), costs=costs)
    for number in range(random.choice([0, 10])):
        turn, num_own = 1000.0 + random.random(), random.choice([0, 30, 90])
        prompt = KeyedPrompt([*range(num_own), *range(1000, 1010)])
        many.loads.add_prompt(random.randrange(num), f"w{number}", random.random(), 1, turn, 1000.0, prompt)
    for _ in range(random.choice([0, 4])):
        many.predict.links.book(random.randrange(num), random.randrange(num), random.random(), 1000.0)
    if random.random() < 0.5:
        many.sources = many.sources[random.random() < 0.5 :: 2]
    cached = np.array([random.choice([0, 0, 10, 300, 310, 900]) for _ in range(num)], float)
    in_memory = np.minimum(cached, [random.choice([0, 200, 900]) for _ in range(num)])
    there = PromptJob(1000.0, 1000, cached, cached if random.random() < 0.5 else in_memory, keys=range(100))
    slots = every(range(num))[random.random() < 0.3 :]
    results = plainly(many, there, slots.tolist())
    choice = policies.overlap(many, there, slots)
    score_s, source = results[slots.tolist().index(choice.slot)]
    assert score_s == pytest.approx(min(results)[0], rel=1e-9, abs=1e-12)
    if choice.source >= 0:
        assert choice.source == source
    considered = choice.considered
    assert considered is not None
    for slot, its_score in zip(considered.slots.tolist(), considered.score_s.tolist(), strict=True):
        assert its_score == pytest.approx(results[slots.tolist().index(slot)][0], rel=1e-9, abs=1e-12)


# --- policies by name


def test_names_are_those_of_the_setting() -> None:
    allowed = get_args(get_type_hints(SchedulingSettings, include_extras=False)["scheduling"])
    assert {*allowed} == POLICIES.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_both_policies_choose_among_the_given_instances(name: str) -> None:
    for policy in POLICIES[name]:
        four = cluster(0.1, 0.2, 0.0, 0.3)
        for offered in ([0, 1, 2, 3], [1, 3], [3]):
            choice = policy(four, job(900, 0, 300, 0), every("abcd")[offered])
            assert choice.slot in offered and choice.reason
