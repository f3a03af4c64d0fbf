# SPDX-License-Identifier: Apache-2.0
"""The columns of a run's results, its summary and its JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mooncake.sim.serving.results import (
    DONE,
    FAILED,
    REJECTED,
    REJECTED_AFTER_PREFILL,
    Recorder,
    RunResults,
    Timeline,
)


def outcome() -> RunResults:
    recorder = Recorder()
    rows = [
        (DONE, 1.0, 0.05),
        (DONE, 40.0, 0.05),
        (DONE, 2.0, 0.2),
        (REJECTED, 0, 0),
        (REJECTED_AFTER_PREFILL, 5.0, 0),
    ]
    for number, (status, ttft_s, tbt_s) in enumerate(rows):
        row = recorder.add(float(number), 1000, 100)
        assert row == number == len(recorder) - 1
        recorder.status[row] = status
        if status != REJECTED:
            recorder.ttft_s[row] = ttft_s
            recorder.prefill_gpu_s[row] = 0.5
            recorder.cached_tokens[row] = 250
        if status == DONE:
            recorder.tbt_s[row], recorder.tbt_mean_s[row], recorder.e2e_s[row] = tbt_s, tbt_s, ttft_s + 7
    empty = np.zeros(0)
    return recorder.outcome(Timeline(10.0, *[empty] * 10), 30.0, 0.1)


def test_good_is_what_was_completed_within_both_objectives() -> None:
    assert outcome().is_good().tolist() == [True, False, False, False, False]
    assert outcome().is_good(slo_tbt_s=0.3).tolist() == [True, False, True, False, False]
    assert outcome().is_good(slo_ttft_s=0, slo_tbt_s=0).tolist() == [True, True, True, False, False]


def test_the_summary_counts_each_request_once() -> None:
    summary = outcome().summary()
    assert (summary.num_done, summary.num_rejected, summary.num_rejected_after_prefill) == (3, 1, 1)
    assert summary.num_failed == 0 and summary.num_good == 1
    assert summary.span_s == pytest.approx(48.0)
    assert summary.goodput_per_s == pytest.approx(1 / 48)
    assert summary.good_tokens_per_s == pytest.approx(1100 / 48)
    assert summary.hit_rate == pytest.approx(0.25)
    assert summary.ttft_s.mean == pytest.approx(43 / 3)


def test_a_run_lasts_until_its_last_request_whatever_became_of_it() -> None:
    recorder = Recorder()
    for number in range(101):
        recorder.add(36.0 * number, 1000, 100)
        recorder.status[number] = REJECTED
    recorder.status[0], recorder.ttft_s[0], recorder.tbt_s[0], recorder.e2e_s[0] = DONE, 0.1, 0.01, 0.5
    empty = Timeline(10.0, *[np.zeros(0)] * 10)
    summary = recorder.outcome(empty, 30.0, 0.1).summary()
    assert (summary.num_good, summary.span_s) == (1, 3600.0), "up to the last arrival"
    assert summary.goodput_per_s == pytest.approx(1 / 3600)
    recorder.status[100], recorder.e2e_s[100] = FAILED, 400.0
    summary = recorder.outcome(empty, 30.0, 0.1).summary()
    assert summary.span_s == pytest.approx(4000.0), "up to the end of one that failed"
    assert summary.e2e_s.mean == pytest.approx(0.5), "times are of completed requests"


def test_json_has_null_for_what_never_came() -> None:
    document = json.loads(outcome().to_json())
    assert document["requests"]["ttft_s"][3] is None
    assert document["requests"]["status"] == [0, 0, 0, 1, 2]
    assert document["summary"]["num_good"] == 1
    assert "requests" not in json.loads(outcome().to_json(rows=False))


def test_an_empty_run_has_a_summary() -> None:
    empty = Recorder().outcome(Timeline(10.0, *[np.zeros(0)] * 10), 30.0, 0.1)
    assert empty.summary().num_requests == 0 and empty.summary().hit_rate == 0
