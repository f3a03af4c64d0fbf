# SPDX-License-Identifier: Apache-2.0
"""Bars of a request from its explanation and from a trace."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mooncake.console.waterfall import MAX_SPANS, phase_of, waterfall


def explanation(**actual: Any) -> dict[str, Any]:
    times = {"queue_s": 0.1, "load_s": 0.2, "prefill_s": 0.4, "ttft_s": 0.8, "tbt_s": 0.05}
    counts = {"cached_tokens": 64, "loaded_tokens": 32, "output_tokens": 5, "is_complete": True, "stages": []}
    return {
        "num_tokens": 200,
        "prefill": "p:1",
        "decode": "d:1",
        "prediction": {"queue_s": 0.0, "fetch_s": 0.1, "prefill_s": 0.3},
        "actual": {**times, **counts, **actual},
    }


def test_phases_of_an_explanation_follow_each_other() -> None:
    found = waterfall(explanation(), None)
    assert found["source"] == "explanation"
    spans = found["spans"]
    assert [one["name"] for one in spans] == ["queue", "load", "prefill", "transfer", "decode"]
    assert [one["where"] for one in spans] == ["p:1", "p:1", "p:1", "d:1", "d:1"]
    for before, after in itertools.pairwise(spans):
        assert after["start_s"] == pytest.approx(before["end_s"])
    assert spans[3]["end_s"] == pytest.approx(0.8), "the first token"
    assert spans[4]["end_s"] == pytest.approx(0.8 + 4 * 0.05)
    assert spans[2]["attributes"]["tokens"] == 200 - 64 - 32
    assert spans[2]["predicted_s"] == 0.3


def test_what_was_not_measured_has_no_bar() -> None:
    found = waterfall(explanation(queue_s=0.0, load_s=0.0, ttft_s=0.0, tbt_s=0.0), None)
    assert [one["name"] for one in found["spans"]] == ["prefill"]


def test_stages_of_a_prefill_group_lie_under_the_prefill() -> None:
    stage = {
        "first_layer": 0,
        "end_layer": 16,
        "began_s": 0.1,
        "ended_s": 0.3,
        "computed_s": 0.2,
        "waited_s": 0.0,
    }
    spans = waterfall(explanation(stages=[stage]), None)["spans"]
    [found] = [one for one in spans if one["depth"] == 1]
    assert found["name"] == "stage 0, layers 0-15"
    assert (found["start_s"], found["end_s"]) == (pytest.approx(0.4), pytest.approx(0.6))


def span(name: str, number: str, parent: str | None, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "span_id": number,
        "parent_id": parent,
        "name": name,
        "service": "worker",
        "instance": "p:1",
        "start_s": start_s,
        "end_s": end_s,
        "attributes": {"tokens": 3},
    }


TRACE = {
    "trace_id": "t",
    "request_id": "r",
    "spans": [
        span("decode", "4", "1", 100.6, 101.0),
        span("prefill layer 0", "3", "2", 100.2, 100.3),
        span("request", "1", "outside", 100.0, 101.0),
        span("prefill", "2", "1", 100.2, 100.5),
    ],
}


def test_trace_comes_first_and_is_drawn_as_a_tree() -> None:
    found = waterfall(explanation(), TRACE)
    assert found["source"] == "trace" and found["trace_id"] == "t"
    rows = [(one["name"], one["depth"], one["phase"]) for one in found["spans"]]
    assert rows == [
        ("request", 0, ""),
        ("prefill", 1, "prefill"),
        ("prefill layer 0", 2, "prefill"),
        ("decode", 1, "decode"),
    ]
    assert found["spans"][0]["start_s"] == 0.0 and found["spans"][3]["end_s"] == pytest.approx(1.0)


def test_trace_is_bounded_and_may_be_broken() -> None:
    many = [span("step", str(number), None, 0.0, 1.0) for number in range(2 * MAX_SPANS)]
    assert len(waterfall(None, {"spans": many})["spans"]) == MAX_SPANS
    own_parent = [span("a", "1", "1", 0.0, 1.0), span("b", "2", None, 0.0, -1.0)]
    [only] = waterfall(None, {"spans": own_parent})["spans"]
    assert only["end_s"] >= only["start_s"]


def test_a_client_may_name_a_span_of_the_trace_as_the_root_s_parent() -> None:
    spans = [
        span("request", "1", "3", 0.0, 4.0),
        span("a", "2", "1", -0.003, 3.0),  # by a clock that is slow
        span("b", "3", "2", 1.5, 2.5),
    ]
    found = waterfall(None, {"spans": spans})["spans"]
    assert [(one["name"], one["depth"]) for one in found] == [("request", 0), ("a", 1), ("b", 2)]


def test_nothing_known_is_said_so() -> None:
    assert waterfall(None, None) == {"source": "none", "spans": []}
    assert waterfall(None, {"spans": []})["source"] == "none"


def test_phase_of_unknown_names_is_empty() -> None:
    assert phase_of("kv_transfer") == "transfer" and phase_of("gateway") == ""


def test_phases_are_found_by_whole_words() -> None:
    assert phase_of("compute chunk") == phase_of("compute prompt") == "prefill"
    assert [phase_of(name) for name in ("receive push", "fetch", "save", "choose instances")] == [
        "transfer",
        "load",
        "transfer",
        "queue",
    ]
    assert phase_of("POST /v1/completions") == phase_of("receive") == ""
