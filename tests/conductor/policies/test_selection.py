# SPDX-License-Identifier: Apache-2.0
"""Each policy chooses by its formula, and gives that as its reason."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from mooncake.conductor.policies import selection
from tests.conductor.clusters import cluster, every, job


def test_cache_outweighs_a_shorter_queue_until_it_does_not() -> None:
    choice = selection.prefill_by_cache(cluster(0, 0.5), job(0, 900), every("ab"))
    assert choice.slot == 1
    assert "900 of 1000 tokens cached, 0.500 s queued, 0.100 s to compute" in choice.reason
    assert choice.done_s == pytest.approx(0.6)
    assert selection.prefill_by_cache(cluster(0, 0.901), job(0, 900), every("ab")).slot == 0


def test_load_ignores_the_cache() -> None:
    choice = selection.prefill_by_load(cluster(0.1, 0, 0.2), job(0, 0, 1000), every("abc"))
    assert choice.slot == 1


def test_among_equals_the_one_that_served_least_is_chosen() -> None:
    pair = cluster(0, 0)
    pair.loads.num_placed[0] = 5
    assert selection.prefill_by_cache(pair, job(0, 0), every("ab")).slot == 1


def test_affinity_is_followed_until_it_would_cost_more_than_the_prompt() -> None:
    choices = [
        selection.prefill_by_cache(cluster(0, 0, 0), job(0, 0, 0, affinity=f"s{n}"), every("abc"))
        for n in range(30)
    ]
    assert len({choice.slot for choice in choices}) == 3
    hinted = job(0, 0, 0, affinity="s0")
    again = selection.prefill_by_cache(cluster(0.1, 0.1, 0.1), hinted, every("abc"))
    assert again.slot == choices[0].slot
    assert again.reason.startswith("affinity")
    queues = [5.0 if slot == again.slot else 0.0 for slot in range(3)]
    assert selection.prefill_by_cache(cluster(*queues), hinted, every("abc")).slot != again.slot


def test_decode_goes_where_fewest_run() -> None:
    assert selection.decode_by_load(cluster(5, 0, 5), job(0, 0, 0), every("abc")).slot == 1
    assert selection.decode_by_load(cluster(0, 0), job(0, 60), every("ab")).slot == 1


def test_decode_goes_where_the_next_step_is_shortest_and_fits() -> None:
    trio = cluster(0, 0, 0)
    trio.loads.add_decode(0, "long", 50_000)
    trio.loads.add_decode(1, "a", 100)
    trio.loads.add_decode(1, "b", 100)
    assert selection.decode_by_tbt(trio, job(0, 0, 0), np.array([0, 1])).slot == 1
    trio.loads.capacity_tokens[:] = 60_000, 1_100, 900
    assert selection.decode_by_tbt(trio, job(0, 0, 0), every("abc")).slot == 0
    trio.loads.capacity_tokens[:] = 50_500, 1_100, 900
    choice = selection.decode_by_tbt(trio, job(0, 0, 0), every("abc"))
    assert choice.slot == 0 and choice.reason.startswith("no memory anywhere")


def test_round_robin_takes_turns_and_new_instances_come_less_often() -> None:
    trio = cluster(0, 0, 0)
    chosen = [selection.round_robin(trio, job(0, 0, 0), every("abc")).slot for _ in range(6)]
    assert Counter(chosen) == {0: 2, 1: 2, 2: 2}
    trio.loads.became_ready(2, 1000.0)  # a tenth of a share
    chosen = [selection.round_robin(trio, job(0, 0, 0), every("abc")).slot for _ in range(21)]
    assert Counter(chosen) == {0: 10, 1: 10, 2: 1}


def test_random_is_seeded() -> None:
    def chosen(seed: int) -> list[int]:
        trio = cluster(0, 0, 0)
        trio.random = Random(seed)
        return [selection.at_random(trio, job(0, 0, 0), every("abc")).slot for _ in range(50)]

    assert chosen(1) == chosen(1)
    assert len(set(chosen(1))) == 3


def test_a_new_instance_gets_less() -> None:
    pair = cluster(0.5, 0)
    pair.loads.became_ready(1, 1000.0)
    assert selection.prefill_by_load(pair, job(0, 0), every("ab")).slot == 0


def test_the_closest_candidates_are_listed_best_first() -> None:
    queues = [float(9 - n) for n in range(20)]
    choice = selection.prefill_by_cache(cluster(*np.abs(queues)), job(*[0] * 20), every(queues))
    considered = choice.considered
    assert considered is not None and len(considered.slots) == selection.NUM_CONSIDERED
    assert considered.slots[0] == choice.slot == 9
    assert (np.diff(considered.score_s) >= 0).all()


@pytest.mark.parametrize("policy", [selection.decode_by_load, selection.decode_by_tbt])
def test_among_equal_decodes_more_cached_blocks_win_then_fewer_served(policy: selection.Policy) -> None:
    trio = cluster(0, 0, 0)
    trio.loads.num_placed[:] = 7, 2, 5
    assert policy(trio, job(0, 0, 0), every("abc")).slot == 1
    assert policy(trio, job(100, 0, 100), every("abc")).slot == 2, "of those that hold it"


def test_the_expected_answer_must_fit_into_a_decode_s_memory_too() -> None:
    pair = cluster(0, 0)
    pair.loads.add_decode(1, "other", 100)  # its steps are longer
    pair.loads.capacity_tokens[:] = 1_200, 2_000
    assert selection.decode_by_tbt(pair, job(0, 0), every("ab")).slot == 0
    assert selection.decode_by_tbt(pair, job(0, 0, output_tokens=200), every("ab")).slot == 0, (
        "to the last one"
    )
    assert selection.decode_by_tbt(pair, job(0, 0, output_tokens=201), every("ab")).slot == 1
