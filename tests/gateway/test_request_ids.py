# SPDX-License-Identifier: Apache-2.0
"""A request is found by either of its ids, and the memory of ids is bounded."""

from __future__ import annotations

import pytest

from mooncake.gateway import request_ids
from mooncake.gateway.request_ids import RequestIds, RequestIdTable


def names(number: int, request_id: str = "") -> RequestIds:
    return RequestIds(f"cmpl-{number}", request_id or f"r{number}", not request_id, [f"place-{number}"])


def test_both_names_find_it_and_a_name_used_again_finds_the_latest() -> None:
    named = RequestIdTable()
    named.note(names(1, "same"))
    assert named.find("cmpl-1") is named.find("same")
    named.note(names(2, "same"))
    found = named.find("same")
    assert found is not None and found.id == "cmpl-2"
    assert named.find("cmpl-1") is not None and named.find("unknown") is None


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_ids, "_MAX_NAMES", 3)
    named = RequestIdTable()
    for number in range(10):
        named.note(names(number))
    assert [number for number in range(10) if named.find(f"cmpl-{number}")] == [7, 8, 9]
    assert named.find("r6") is None and named.find("r7") is not None


def test_latest_requests_are_listed_once_the_newest_first() -> None:
    table = RequestIdTable()
    for number in range(5):
        table.note(RequestIds(f"answer-{number}", f"request-{number}", True, [], session=f"s-{number}"))
    table.note(RequestIds("answer-1", "request-1", True, []))
    assert [one.id for one in table.latest(3)] == ["answer-1", "answer-4", "answer-3"]
    assert [one.id for one in table.latest(100)] == [f"answer-{number}" for number in (1, 4, 3, 2, 0)]
