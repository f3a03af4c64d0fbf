# SPDX-License-Identifier: Apache-2.0
"""The source of a prompt's blocks: most of it, from a free card, from memory before an SSD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake.conductor.policies.kv_sources import best_source, longest_holder, own_ssd, path, wait_s
from mooncake.conductor.policies.selection import ClusterView, PromptJob
from mooncake.conductor.prediction.cost_models import CostModels, LinkModel
from tests.conductor.clusters import COSTS, cluster, every, job

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
    assert list(wait_s(pair, job(0, 0), 0, every("ab"))) == pytest.approx([1.0, 3.0])
    links.egress_free_at[0] = links.ingress_free_at[1] = NOW - 5
    assert list(wait_s(pair, job(0, 0), 0, every("ab"))) == [0.0, 0.0], "finished transfers don't count"


def test_a_link_that_was_measured_is_believed() -> None:
    pair = cluster(0, 0)
    latency_s, before = path(pair, 0, every("ab"))
    assert latency_s == COSTS.link.latency_s
    for _ in range(200):
        pair.predict.links.add(0, 1, 1_000_000, 10.0)  # a tenth of the prior bandwidth
    _, after = path(pair, 0, every("ab"))
    assert np.asarray(after)[1] > np.asarray(before).max() * 5
