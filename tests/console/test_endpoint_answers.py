# SPDX-License-Identifier: Apache-2.0
"""Recorded answers of the gateway's endpoints, as the pages show them."""

from __future__ import annotations

import json

from mooncake.console.endpoint_answers import (
    MAX_CAUSES,
    listed_requests,
    miss_facts,
    missed_tokens,
    what_if_rows,
)


def test_requests_have_a_state_and_a_start() -> None:
    rows = [
        {"id": "a", "start_s": 5.0, "latency_s": 1.0, "status": 200},
        {"id": "b", "start_s": 6.0, "latency_s": 0.1, "status": 429},
        {"id": "c", "start_s": 7.0, "latency_s": 0.1, "status": 500},
        {"id": "d", "start_s": 8.0, "latency_s": None, "status": 0},
        {"no": "id"},
    ]
    found = listed_requests({"kept": 100, "requests": rows})
    assert found is not None
    assert [(row["id"], row["state"], row["start"]) for row in found] == [
        ("a", "finished", 5.0),
        ("b", "refused", 6.0),
        ("c", "failed", 7.0),
        ("d", None, 8.0),
    ]
    assert listed_requests([{"id": "a"}]) == [{"id": "a", "state": None, "start": None}]


def test_no_list_is_none_and_an_empty_one_is_empty() -> None:
    assert listed_requests({"kept": 0, "requests": []}) is None
    assert listed_requests(None) is None and listed_requests({"error": {}}) is None
    assert listed_requests({"kept": 10, "requests": []}) == []


def test_missed_tokens_are_added_up_without_hits_and_rates() -> None:
    tokens = {"hit": 900, "prompt_changed": 40, "evicted": 5, "new": 55}
    answer = {
        "tenants": [
            {"tenant": "a", "model": "m", "tokens": tokens, "hit_rate": 0.9, "attainable_hit_rate": 0.95},
            {"tenant": "b", "model": "m", "tokens": {"evicted": 7}, "hit_rate": 0.0},
        ],
        "differences": [{"kind": "clock", "prompts": 3, "lost_tokens": 40}],
        "prompts_remembered": 4,
    }
    assert missed_tokens(answer) == {"prompt_changed": 40, "evicted": 12, "new": 55}
    assert missed_tokens(None) is None and missed_tokens({"tenants": []}) == {}
    many = {"tenants": [{"tokens": {str(number): 1 for number in range(500)}}]}
    assert len(missed_tokens(many) or {}) == MAX_CAUSES


def test_no_text_of_a_prompt_passes() -> None:
    report = {
        "tokens": {"hit": 3},
        "attainable_tokens": 10,
        "hygiene": "removed: a confidential line",
        "left_sibling": {
            "offset": 7,
            "unit": "tokens",
            "kind": "clock",
            "token": "confidential",
            "detail": "confidential",
            "ours": "confidential",
            "theirs": "confidential",
            "lost_tokens": 64,
            "rule": r"drop-line:^\s*confidential",
        },
    }
    found = miss_facts(report)
    assert found is not None and found["left_sibling"]["lost_tokens"] == 64
    assert found["left_sibling"]["rule"] == "drop-line"
    assert "confidential" not in json.dumps(found)
    assert miss_facts(None) is None


def test_what_if_shows_the_expectation_and_its_interval() -> None:
    effect = {"value": -0.2, "low": -0.3, "high": -0.1}
    answer = {"expected": {"ttft_s": 0.8, "hit_rate": 0.7}, "effect": {"ttft_s": effect}, "notes": []}
    assert what_if_rows(answer) == [
        {"name": "ttft_s", "after": 0.8, "effect": effect},
        {"name": "hit_rate", "after": 0.7, "effect": None},
    ]
    plain = {"before": {"ttft_s": 1.0}, "after": {"ttft_s": 0.5}}
    assert what_if_rows(plain) == [{"name": "ttft_s", "before": 1.0, "after": 0.5}]
    assert what_if_rows("no") == [] and what_if_rows({"before": 5, "after": {}}) == []
