# SPDX-License-Identifier: Apache-2.0
"""The workloads and searches of the papers' experiments: their results are in ``bench/results``."""

import dataclasses
import statistics

import numpy as np
import pytest

from bench import paper_experiments
from bench.hit_rate import EndlessCache, measure
from bench.paper_experiments import (
    FOUR,
    ONE_BY_ONE,
    THREE_AND_ONE,
    SyntheticWorkload,
    arrivals,
    box_of,
    highest_rate,
    long_prompts,
    simulated,
)


def test_the_stand_in_has_the_printed_statistics() -> None:
    rows = list(SyntheticWorkload())
    assert len(rows) == 3993 and rows == list(SyntheticWorkload()), "the same rows each time"
    assert rows[-1].timestamp_s == pytest.approx(1022, rel=0.05)
    assert statistics.fmean(row.num_input for row in rows) == pytest.approx(15_325, rel=0.05)
    assert statistics.fmean(row.num_output for row in rows) == pytest.approx(149, rel=0.05)
    assert len({row.keys[0] for row in rows}) == pytest.approx(2_211, rel=0.05)
    assert measure(rows, EndlessCache(), 512).block_ratio == pytest.approx(0.6396, abs=0.02)


def test_documents_are_shared_from_their_beginning_and_never_behind_it() -> None:
    parents: dict[int, int] = {}
    for row in arrivals([(4_000, 10)] * 200, 2_048, 5)(1.0):
        assert len(row.keys) == 8 and len(set(row.keys)) == 8
        for parent, key in zip((-1, *row.keys), row.keys, strict=False):
            assert parents.setdefault(key, parent) == parent, "an id names a whole prefix"
    roots = {key for key, parent in parents.items() if parent == -1}
    assert len(roots) == 5 and len(parents) == 5 * 4 + 200 * 4


def test_a_box_is_what_a_box_plot_draws() -> None:
    lengths = [(1_000 + 37 * number, 10) for number in range(400)]
    outcome = simulated(arrivals(lengths)(0.5), THREE_AND_ONE, "kvcache_centric")
    mean, low, median, high, whisker = box_of(outcome)
    ttft_s = np.asarray(outcome.ttft_s, np.float64)[outcome.is_done]
    assert low <= median <= high <= whisker <= ttft_s.max()
    assert mean == pytest.approx(ttft_s.mean()) and whisker <= high + 1.5 * (high - low)
    assert ((ttft_s >= low) & (ttft_s <= high)).mean() == pytest.approx(0.5, abs=0.02)


def test_the_highest_rate_is_within_the_objectives_and_the_next_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In larger steps and with fewer requests than the experiment: the clusters are far apart."""
    monkeypatch.setattr(paper_experiments, "RATE_STEP", 1.25)
    monkeypatch.setattr(paper_experiments, "NUM_ARRIVALS", 100)
    rows_at = long_prompts(32 << 10)
    rate = highest_rate(rows_at, ONE_BY_ONE, "load")
    # A request lasts about 17 s (4.5 s of prefill, 512 steps): four nodes can't do more than 0.24 a second.
    assert 0.1 < rate < 0.24
    assert (
        rate < highest_rate(rows_at, FOUR, "load") < highest_rate(rows_at, THREE_AND_ONE, "kvcache_centric")
    )


def test_more_nodes_in_a_group_shorten_a_long_prompt() -> None:
    rows = list(long_prompts(64 << 10)(0.02))[:1]
    cluster = dataclasses.replace(THREE_AND_ONE, num_prefill=4)
    alone, group = (
        float(simulated(rows, dataclasses.replace(cluster, pipeline_nodes=n), "overlap").ttft_s[0])
        for n in (1, 4)
    )
    assert 3.0 < alone / group < 4.0
