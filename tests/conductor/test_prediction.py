# SPDX-License-Identifier: Apache-2.0
"""The formulas convert tokens to seconds and give the published values.

Coefficients are found from few samples, follow change, and never go below zero. A path is estimated from its
own samples, else from its source's, else from all; booked cards are busy. Answers are expected to be as long
as those of their scope were.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.conductor.prediction import (
    TRUSTED_SAMPLES,
    BandwidthEstimates,
    CostModels,
    DecodeModel,
    FittedColumns,
    LeastSquares,
    LengthHistogram,
    LinkModel,
    OutputLengths,
    Predictor,
    PrefillModel,
)

# --- cost models


MODEL = PrefillModel(0.01, 1e-4, 1e-9)


def test_a_prompt_costs_its_length_and_the_square_of_it() -> None:
    assert MODEL.seconds(0, 10_000) == pytest.approx(0.01 + 1.0 + 0.1)
    assert MODEL.seconds(10_000, 10_000) == pytest.approx(0.01), "an empty prefill costs a step's constant"


@given(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 200_000))
def test_computing_in_parts_costs_what_the_whole_costs(first: int, more: int, rest: int) -> None:
    """Except for each part's constant cost: attention to earlier tokens is paid once per token."""
    middle, end = first + more, first + more + rest
    parts = MODEL.seconds(first, middle) + MODEL.seconds(middle, end)
    assert parts == pytest.approx(MODEL.seconds(first, end) + MODEL.c0)


def test_the_same_tokens_cost_more_behind_a_long_prefix() -> None:
    assert MODEL.seconds(50_000, 51_000) > MODEL.seconds(0, 1_000)


def test_a_step_reads_the_weights_once_and_every_context_once() -> None:
    step = DecodeModel(0.02, 0.001, 1e-6)
    assert step.seconds(0, 0) == pytest.approx(0.02)
    assert step.seconds(8, 10_000) == pytest.approx(0.02 + 0.008 + 0.01)


def test_a_transfer_is_its_latency_and_its_bytes() -> None:
    assert LinkModel(0.001, 1e9).seconds(5e8) == pytest.approx(0.501)
    assert CostModels().ssd.seconds(0) == CostModels().ssd.latency_s


def test_prefill_by_halves_is_a_prefill() -> None:
    model = PrefillModel(0.0, 1.129e-4, 7.404e-10)
    assert model.seconds(0, 131072) == pytest.approx(27.5, rel=0.025)
    assert model.seconds(0, 1000) + model.seconds(1000, 5000) == pytest.approx(model.seconds(0, 5000))


def test_a_step_of_decode() -> None:
    assert DecodeModel(0.0261, 0.14e-3, 3.5e-8).seconds(10, 80_000) == pytest.approx(0.0303)


def test_a_transfer() -> None:
    assert LinkModel(0.001, 1e9).seconds(5e8) == pytest.approx(0.501)


# --- coefficients that follow measurements


PRIOR = (0.01, 1e-4, 1e-9)
SCALE = (1e-2, 1e-6, 1e-11)


def terms(first: int, end: int) -> tuple[float, float, float]:
    return 1.0, end - first, end * end - first * first


def seconds(of: tuple[float, float, float], *truth: float) -> float:
    return sum(term * one for term, one in zip(of, truth, strict=True))


def test_the_truth_is_found_through_noise() -> None:
    fit, random = LeastSquares(PRIOR, SCALE), Random(1)
    truth = (0.07, 1.1e-4, 7e-10)
    for _ in range(300):
        sample = terms(0, random.randrange(100, 100_000))
        fit.add(sample, seconds(sample, *truth) * random.uniform(0.9, 1.1))
    for length in (500, 5_000, 50_000):
        sample = terms(0, length)
        assert fit.expected(sample) == pytest.approx(seconds(sample, *truth), rel=0.05)


def test_a_prior_of_zero_may_be_corrected() -> None:
    fit, random = LeastSquares((0.0, 1e-4, 1e-9), SCALE), Random(4)
    for _ in range(300):
        sample = terms(0, random.randrange(100, 20_000))
        fit.add(sample, seconds(sample, 0.07, 1e-4, 1e-9))
    assert fit.expected(terms(0, 200)) == pytest.approx(0.09, rel=0.05)


def test_prompts_of_one_length_change_the_speed_and_keep_the_shape() -> None:
    fit = LeastSquares(PRIOR, SCALE)
    for _ in range(20):
        fit.add(terms(0, 1000), 50 * seconds(terms(0, 1000), *PRIOR))
    assert fit.coefficients == pytest.approx([50 * one for one in PRIOR], rel=0.01)


def test_a_slowdown_is_followed() -> None:
    fit, random = LeastSquares(PRIOR, SCALE), Random(2)
    for slower in (1.0, 3.0):
        for _ in range(1000):
            sample = terms(0, random.randrange(100, 50_000))
            fit.add(sample, slower * seconds(sample, *PRIOR))
    assert fit.expected(terms(0, 10_000)) == pytest.approx(3 * seconds(terms(0, 10_000), *PRIOR), rel=0.15)


def test_an_instance_that_becomes_slower_is_followed_at_once_and_keeps_its_proportions() -> None:
    fit, random = LeastSquares(PRIOR, SCALE, has_drift=True), Random(2)
    truth = (0.07, 1.1e-4, 7e-10)
    for _ in range(300):
        sample = terms(0, random.randrange(100, 50_000))
        fit.add(sample, seconds(sample, *truth) * random.uniform(0.8, 1.2))
    before = {length: fit.expected(terms(0, length)) for length in (300, 1_000, 30_000)}
    for slower in (2.0, 1.0, 0.6):
        for _ in range(8):
            fit.add(terms(0, 1000), slower * before[1_000])
        for length, expected in before.items():
            found, error = fit.expected(terms(0, length)), 0.1 if length == 1_000 else 0.25
            assert found == pytest.approx(slower * expected, rel=error), (slower, length)


def test_two_absurd_samples_are_no_drift() -> None:
    fit = LeastSquares(PRIOR, SCALE, has_drift=True)
    for _ in range(40):
        fit.add(terms(0, 1000), seconds(terms(0, 1000), *PRIOR))
    for _ in range(2):
        fit.add(terms(0, 1000), 3600.0)
    for _ in range(6):
        fit.add(terms(0, 1000), seconds(terms(0, 1000), *PRIOR))
    assert fit.expected(terms(0, 1000)) == pytest.approx(seconds(terms(0, 1000), *PRIOR), rel=0.35)


def test_one_absurd_sample_moves_little() -> None:
    fit = LeastSquares(PRIOR, SCALE)
    for length in range(1000, 31_000, 1000):
        fit.add(terms(0, length), seconds(terms(0, length), *PRIOR))
    fit.add(terms(0, 1000), 3600.0)
    assert fit.expected(terms(0, 5000)) == pytest.approx(seconds(terms(0, 5000), *PRIOR), rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(allow_nan=True)), max_size=60))
def test_no_sample_makes_work_negative(samples: list[tuple[int, float]]) -> None:
    fit = LeastSquares(PRIOR, SCALE)
    for length, measured in samples:
        fit.add(terms(0, length), measured)
        fit.check()


def test_an_instance_is_estimated_from_all_until_it_has_samples() -> None:
    columns = FittedColumns(PRIOR, SCALE)
    columns.grow(3)
    for number in range(TRUSTED_SAMPLES - 1):
        columns.add(0, terms(0, 1000), 10.0)
        assert columns.columns[:, 1] == pytest.approx(PRIOR), f"after {number + 1} samples"
    columns.add(0, terms(0, 1000), 10.0)
    assert columns.columns[:, 0] @ terms(0, 1000) == pytest.approx(10.0)
    assert columns.columns[:, 1] == pytest.approx(columns.common.coefficients)
    for _ in range(TRUSTED_SAMPLES):
        columns.add(2, terms(0, 1000), 1.0)
    assert columns.columns[:, 2] @ terms(0, 1000) == pytest.approx(1.0)
    columns.forget(2)
    assert columns.columns[:, 2] == pytest.approx(columns.common.coefficients)
    columns.check()


def test_what_a_cached_prefix_costs_by_itself_is_known_and_learned() -> None:
    """Prompts that are almost all cached take little else."""
    predict = Predictor(CostModels(prefill=PrefillModel(0.0, 1e-4, 0.0), reuse_s=0.07))
    predict.grow(2)
    slots, cached = np.arange(2), np.array([0.0, 1000.0])
    assert predict.prefill_s(slots, cached, 1100) == pytest.approx([0.11, 0.08])
    assert predict.prefill_everywhere_s(cached, 1100) == pytest.approx([0.11, 0.08])
    assert [predict.prefill_at(1)(first, 1100) for first in (0, 1000)] == pytest.approx([0.11, 0.08])
    random = Random(3)
    for _ in range(200):
        first, num_tokens = random.choice((0, 1024)), random.randrange(10, 2000)
        predict.chunk_measured(0, first, num_tokens, num_tokens * 1e-4 + (0.2 if first else 0.0))
    assert predict.prefill_s(slots, 1000.0, 1100) == pytest.approx([0.21, 0.21], rel=0.05), "learned for all"
    assert predict.prefill_s(slots, 0.0, 1100) == pytest.approx([0.11, 0.11], rel=0.05)
    predict.check()


# --- bandwidth between instances


GB = 10**9


@pytest.fixture
def links() -> Iterator[BandwidthEstimates]:
    links = BandwidthEstimates(LinkModel(0.001, 1e9))
    links.grow(4)
    yield links
    links.check()


def from_source(links: BandwidthEstimates, source: int) -> list[float]:
    return [float(one) for one in np.broadcast_to(links.s_per_byte_from(source), 4)]


def test_the_prior_holds_for_a_source_without_samples(links: BandwidthEstimates) -> None:
    assert from_source(links, 0) == [1e-9] * 4


@pytest.mark.parametrize(("is_general", "most_s"), [(False, 0.05), (True, 0.5)])
def test_loads_from_the_pool_weigh_by_their_sizes(
    links: BandwidthEstimates, is_general: bool, most_s: float
) -> None:
    """Nine short loads that take 3 ms, which is not the latency of other paths, for each of a gigabyte."""
    for _ in range(30):
        for _ in range(9):
            links.add(0, 1, GB // 128, 0.003 + 0.02 / 128, is_general)
        links.add(0, 1, GB, 0.023, is_general)
    predicted_s = links.latency_s + GB * from_source(links, 0)[1]
    assert 0.022 < predicted_s < most_s and (predicted_s > 0.1) == is_general
    assert (links.s_per_byte == 1e-9) == (not is_general)


def test_a_path_differs_from_its_source_and_that_from_others(links: BandwidthEstimates) -> None:
    for _ in range(40):
        links.add(0, 1, GB, 10.0)
        links.add(0, 2, GB, 0.1)
    slow, fast = from_source(links, 0)[1:3]
    assert slow == pytest.approx(1e-8, rel=0.02) and fast == pytest.approx(1e-10, rel=0.02)
    assert fast < from_source(links, 0)[3] < slow
    assert from_source(links, 3)[0] == pytest.approx(links.s_per_byte)


def test_an_estimate_that_was_asked_for_follows_later_samples_and_forgotten_targets(
    links: BandwidthEstimates,
) -> None:
    for _ in range(10):
        links.add(0, 1, GB, 10.0)
        links.add(0, 2, GB, 0.1)
    before = from_source(links, 0)
    links.add(0, 1, GB, 0.1)
    after = from_source(links, 0)
    assert after[1] < before[1] and after[2] == before[2] and after[3] != before[3]
    links.forget(1)
    assert from_source(links, 0)[1] == after[3]  # the source's, as of targets without samples


def test_small_transfers_yield_the_latency(links: BandwidthEstimates) -> None:
    for _ in range(100):
        links.add(0, 1, 64, 0.02)
    assert links.latency_s == pytest.approx(0.02, rel=0.01)
    assert from_source(links, 0) == [1e-9] * 4


def test_an_impossible_duration_is_ignored(links: BandwidthEstimates) -> None:
    for seconds in (0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf")):
        links.add(0, 1, GB, seconds)
    links.add(0, 1, 0, 1.0)
    assert from_source(links, 0) == [1e-9] * 4


def test_a_card_is_busy_with_booked_transfers(links: BandwidthEstimates) -> None:
    links.book(0, 1, 2.0, 10.0)
    links.book(0, 2, 3.0, 10.0)
    assert links.egress_free_at[0] == 15.0
    assert links.ingress_free_at[1:3].tolist() == [12.0, 15.0]


def test_another_instance_begins_anew(links: BandwidthEstimates) -> None:
    for _ in range(10):
        links.add(0, 1, GB, 10.0)
    links.book(1, 0, 5.0, 0.0)
    links.forget(0)
    assert from_source(links, 0) == [links.s_per_byte] * 4
    assert links.ingress_free_at[0] < 0


def test_an_ssd_is_busy_with_its_own_instances_reads(links: BandwidthEstimates) -> None:
    links.book(2, 2, 3.0, 10.0)
    assert links.ssd_free_at[2] == 13.0
    assert links.egress_free_at[2] < 0


# --- lengths of answers


def test_quantiles_are_near() -> None:
    answers, random = LengthHistogram(), Random(0)
    seen = [round(random.lognormvariate(5.0, 1.0)) for _ in range(3000)]
    for one in seen:
        answers.add(one)
    for part in (0.1, 0.5, 0.9, 0.99):
        exact = sorted(seen)[int(part * len(seen))]
        assert 0.85 * exact <= answers.quantile(part) <= 1.25 * exact


def test_a_change_of_lengths_is_followed() -> None:
    answers = LengthHistogram()
    for length in (1000, 10):
        for _ in range(20_000):
            answers.add(length)
    assert answers.quantile(0.9) < 20
    assert answers.mean < 200


def test_a_new_scope_is_estimated_from_all() -> None:
    lengths = OutputLengths()
    assert lengths.expected("new", 0) == 0
    assert lengths.expected("new", 128) == 128
    for _ in range(20):
        lengths.add("chat", 400)
    assert lengths.expected("new", 0) == 400
    assert lengths.expected("chat", 100) == 100
    for _ in range(20):
        lengths.add("tools", 20)
    assert (lengths.expected("chat", 0), lengths.expected("tools", 0)) == (400, 20)


def test_a_limit_is_no_expected_length() -> None:
    lengths = OutputLengths()
    assert lengths.expected("new", 512) == 512
    assert lengths.expected("new", 131_072) == lengths.expected("new", 2**63 - 1) == 512
    lengths.add("new", 2000)
    assert lengths.expected("new", 131_072) == 2000


def test_scopes_that_are_not_seen_again_are_forgotten() -> None:
    lengths = OutputLengths()
    for _ in range(20):
        lengths.add("first", 7)
    for number in range(2000):
        lengths.add(f"s{number}", 100)
    assert lengths.of("first") is lengths.of("never seen")
