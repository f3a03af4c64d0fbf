# SPDX-License-Identifier: Apache-2.0
"""Requests summed by session."""

from __future__ import annotations

from mooncake.console.session_rows import MAX_SESSION_ROWS, session_rows


def test_tokens_are_those_of_finished_requests() -> None:
    rows = [
        {
            "session": "s",
            "state": "finished",
            "start": 5.0,
            "prompt_tokens": 100,
            "cached_tokens": 80,
            "ttft_s": 1.0,
        },
        {
            "session": "s",
            "state": "finished",
            "start": 7.0,
            "prompt_tokens": 100,
            "cached_tokens": 40,
            "ttft_s": 3.0,
        },
        {"session": "s", "state": "refused", "start": 8.0, "prompt_tokens": 500, "cached_tokens": 0},
        {"session": "s", "state": "decode", "start": 9.0, "prompt_tokens": 100, "cached_tokens": 0},
    ]
    found = session_rows(rows)
    [row] = found["sessions"]
    assert row["requests"] == 4 and row["in_progress"] == 1
    assert row["hit_rate"] == 0.6 and row["mean_ttft_s"] == 2.0 and row["last_start"] == 9.0


def test_equal_sessions_of_two_clients_are_apart_and_rows_without_facts_count() -> None:
    found = session_rows([{"session": "s", "client": "a"}, {"session": "s", "client": "b"}, {"id": "x"}])
    assert found["num_sessions"] == 3 and found["num_requests"] == 3
    assert {row["hit_rate"] for row in found["sessions"]} == {None}


def test_latest_sessions_come_first_and_are_bounded() -> None:
    found = session_rows({"session": str(number), "start": float(number)} for number in range(700))
    assert found["num_sessions"] == 700 and len(found["sessions"]) == MAX_SESSION_ROWS
    assert found["sessions"][0]["session"] == "699"
