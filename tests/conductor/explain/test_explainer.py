# SPDX-License-Identifier: Apache-2.0
"""The record of requests: bounded, complete, and empty when it is off."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest

from mooncake.conductor.admission.result import AdmissionResult
from mooncake.conductor.explain.explainer import (
    AdmissionOutcome,
    CandidateInstance,
    CandidateSet,
    Explainer,
    Explanation,
    PredictedTimes,
)
from mooncake.conductor.explain.miss_reasons import PromptBlocks
from mooncake.conductor.index.prefix_index import PrefixIndex
from mooncake.conductor.messages import Decision, Finished, Place, Prediction, Prefilled, Refuse
from mooncake.errors import Refusal

PREDICTION = Prediction(queue_s=0.1, prefill_s=0.4, ttft_s=0.5, tbt_s=0.02, output_tokens=100)
PREDICTED = PredictedTimes(0.1, 0.0, 0.4, 0.5, 0.02, 100)
WEIGHED = CandidateSet(["p1"], np.array([[0.5], [0.1], [0.0], [0.4], [0.0]]), [("p2", "draining")])
CANDIDATES = [CandidateInstance("p1", 0.5, 0.1, 0.0, 0.4, 0), CandidateInstance("p2", why_not="draining")]


def decision(name: str = "r") -> Decision:
    return Decision(name, "p1", "d1", "least to compute", 0, "", PREDICTION, policy="overlap")


def prompt_of(keys: tuple[int, ...], now: float) -> PromptBlocks:
    return PromptBlocks(array("Q", keys), array("Q"), bytes(len(keys)), "", "p1", now)


def note(explainer: Explainer, name: str = "r", keys: tuple[int, ...] = (1, 2), now: float = 10.0) -> None:
    place = Place(name, 16 * len(keys), list(keys))
    verdict = AdmissionResult(True, prefill_load=0.2)
    explainer.placed(place, decision(name), WEIGHED, prompt_of(keys, now), "goodput", verdict, now)


def explained(explainer: Explainer, name: str = "r", now: float = 20.0) -> Explanation:
    found = explainer.explain(name, PrefixIndex(), lambda instance: "", now)
    assert found is not None
    return found


def test_candidates_prediction_and_measurements() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    note(explainer)
    found = explained(explainer)
    assert (found.state, found.prefill, found.decode, found.policy) == ("prefill", "p1", "d1", "overlap")
    assert found.candidates == CANDIDATES and found.prediction == PREDICTED
    assert found.admission == AdmissionOutcome("goodput", True, "admitted", prefill_load=0.2)
    assert found.seconds_ago == 10.0
    explainer.prefilled(Prefilled("r", 0.2, 0.3, 16, 16, 0.0, 0), 11.0)
    found = explained(explainer)
    assert found.state == "decode"
    assert [(one.verdict, one.num) for one in found.blocks] == [("hit", 1), ("never_stored", 1)]
    explainer.finished(Finished("r", 7, 0.6, 0.03, True), 12.0)
    found = explained(explainer)
    assert found.state == "finished"
    assert (found.actual.queue_s, found.actual.ttft_s, found.actual.tbt_s) == (0.2, 0.6, 0.03)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


def test_a_refusal_is_remembered_with_its_reason() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    refuse = Refuse("r", Refusal("slo_ttft", "too late"), 3.0, PREDICTION)
    verdict = AdmissionResult(False, "slo_ttft", "too late", 3.0)
    explainer.placed(Place("r", 32, [1, 2]), refuse, WEIGHED, prompt_of((1, 2), 10.0), "early", verdict, 10.0)
    found = explained(explainer)
    assert (found.state, found.reason) == ("refused", "slo_ttft: too late")
    assert found.admission is not None and found.admission.retry_after_s == 3.0
    assert found.prediction == PREDICTED and not found.blocks


def test_a_retry_keeps_the_verdict_of_the_first_try() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    note(explainer)
    explainer.placed(
        Place("r", 32, [1, 2]), decision(), WEIGHED, prompt_of((1, 2), 11.0), "goodput", None, 11.0
    )
    found = explained(explainer)
    assert found.num_placements == 2
    assert found.admission is not None and found.admission.rule == "goodput"
    explainer.check()


def test_two_simultaneous_requests_for_one_prompt() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    note(explainer, "first", (1, 2), now=10.0)
    note(explainer, "second", (1, 2, 3), now=10.1)
    assert [(one.verdict, one.where) for one in explained(explainer, "second").blocks] == [
        ("being_written", "p1"),
        ("never_stored", ""),
    ]
    assert explained(explainer, "first").blocks[0].verdict == "never_stored", "it came before"
    explainer.prefilled(Prefilled("first"), 10.5)
    assert explained(explainer, "second").blocks[0].verdict == "being_written", "the first was in progress"
    note(explainer, "third", (1, 2), now=11.0)
    explainer.prefilled(Prefilled("second"), 10.9)
    assert explained(explainer, "third").blocks[0].verdict == "never_stored"


@pytest.mark.parametrize(("max_requests", "max_bytes"), [(3, 1 << 20), (100, 3 * 3_050)])
def test_only_the_latest_are_kept(max_requests: int, max_bytes: int) -> None:
    explainer = Explainer(max_requests, max_bytes, 16)
    for number in range(10):
        note(explainer, str(number))
    explainer.check()
    assert len(explainer) == 3
    assert explainer.explain("0", PrefixIndex(), lambda instance: "", 20.0) is None
    assert explained(explainer, "9").request_id == "9"


def test_off_it_remembers_nothing() -> None:
    explainer = Explainer(0, 1 << 20, 16)
    note(explainer)
    explainer.prefilled(Prefilled("r"), 11.0)
    explainer.finished(Finished("r"), 12.0)
    assert len(explainer) == 0 and not explainer.is_on
