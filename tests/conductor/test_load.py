# SPDX-License-Identifier: Apache-2.0
"""The accounts add up, and reports correct them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.conductor.load import LEAST_USED, MOST_SHARING, LoadAccounts
from mooncake.http.worker_stats import KvMemoryStats


@pytest.fixture
def loads() -> Iterator[LoadAccounts]:
    loads = LoadAccounts()
    loads.grow(4)
    yield loads
    loads.check()


def queue(loads: LoadAccounts, slot: int, now: float, turn: float = math.inf) -> tuple[float, float]:
    seconds, behind = loads.queue_s(np.array([slot]), now, turn)
    return float(seconds[0]), 0.0 if behind is None else float(behind[0])


def test_the_first_prompt_counts_down_and_the_others_wait(loads: LoadAccounts) -> None:
    loads.add_prompt(1, "a", 5.0, 500, 10.0, 10.0)
    loads.add_prompt(1, "b", 3.0, 300, 11.0, 11.0)
    assert queue(loads, 1, 12.0) == (6.0, 0.0)
    assert queue(loads, 0, 12.0) == (0.0, 0.0)
    assert loads.queued_tokens[1] == 800


def test_a_late_prompt_keeps_those_behind_it_waiting(loads: LoadAccounts) -> None:
    loads.add_prompt(1, "a", 5.0, 500, 10.0, 10.0)
    loads.add_prompt(1, "b", 3.0, 300, 11.0, 11.0)
    assert queue(loads, 1, 20.0) == (3.0, 0.0)
    loads.end_prompt(1, "a", 20.0)
    assert queue(loads, 1, 21.0) == (2.0, 0.0)
    loads.end_prompt(1, "b", 21.0)
    loads.end_prompt(1, "b", 21.0)  # reported twice
    assert queue(loads, 1, 21.0) == (0.0, 0.0)
    assert loads.num_requests[1] == 0


def test_prompts_that_leave_a_long_queue_leave_nothing_behind(loads: LoadAccounts) -> None:
    """The order is that of turns, and of arrival between equal ones, whatever has left before."""
    loads.add_prompt(2, "first", 1.0, 1, 0.0, 10.0)
    turns = {f"r{number}": float(number * 7919 % 50) for number in range(600)}
    for request_id, turn in turns.items():
        loads.add_prompt(2, request_id, 1.0, 1, turn, 10.0)
    for request_id in list(turns)[::3]:
        loads.end_prompt(2, request_id, 11.0)
        loads.add_prompt(2, request_id, 1.0, 1, turns[request_id], 11.0)  # comes again, behind the others
        turns[request_id] = turns.pop(request_id)
    for request_id in list(turns)[::2]:
        loads.end_prompt(2, request_id, 11.0)
        del turns[request_id]
        loads.check()
    begun = []
    loads.end_prompt(2, "first", 12.0)
    while prompts := loads.prompts_of(2):
        begun.append(prompts[0])
        loads.end_prompt(2, prompts[0], 13.0)
    assert begun == sorted(turns, key=lambda one: turns[one])
    loads.check()


def test_the_lowest_turn_is_next_in_any_order_of_arrival(loads: LoadAccounts) -> None:
    loads.add_prompt(2, "first", 1.0, 1, 10.0, 10.0)
    loads.add_prompt(2, "long", 20.0, 1, 90.0, 10.0)
    loads.add_prompt(2, "short", 0.5, 1, 12.0, 10.0)
    assert queue(loads, 2, 10.0, turn=13.0) == (1.5, 1.0)
    loads.end_prompt(2, "first", 11.0)
    assert loads.prompts_of(2)[0] == "short"
    assert queue(loads, 2, 11.0) == (20.5, 0.0)
    loads.end_prompt(2, "long", 11.2)  # cancelled while it waited
    assert queue(loads, 2, 11.2)[0] == pytest.approx(0.3)


def test_decode_counts_requests_and_context(loads: LoadAccounts) -> None:
    loads.add_decode(0, "a", 100)
    loads.add_decode(0, "b", 50)
    loads.end_decode(0, "a")
    loads.end_decode(0, "a")
    assert (loads.batch_size[0], loads.context_tokens[0], loads.num_requests[0]) == (1, 50, 1)
    assert loads.decodes_of(0) == ["b"]


def test_a_new_instance_s_share_rises(loads: LoadAccounts) -> None:
    slots = np.array([0, 1])
    assert loads.shares(slots, 5.0, 10.0) is None
    loads.became_ready(1, 5.0, np.empty(0, np.int64))
    for now, share in ((5.0, 0.1), (10.0, 0.5)):
        shares = loads.shares(slots, now, 10.0)
        assert shares is not None and shares.tolist() == [1.0, share]
    assert loads.shares(slots, 15.0, 10.0) is None


def test_an_instance_that_joins_does_not_get_all_ties(loads: LoadAccounts) -> None:
    for request in range(9):
        loads.add_decode(request % 3 % 2, f"r{request}", 7)
    loads.became_ready(2, 5.0, np.array([0, 1]))
    assert loads.tie_order[:3].tolist() == [6, 3, 3] and loads.num_placed[2] == 0
    loads.became_ready(0, 6.0, np.array([1, 2]))
    assert loads.tie_order[0] == 6, "one that was away for a moment"
    loads.forget(2)
    assert loads.tie_order[2] == 0


def test_a_reused_slot_is_empty(loads: LoadAccounts) -> None:
    for request in range(100):
        loads.add_prompt(request % 3, f"r{request}", 1.0, 1, float(request), 0.0)
        loads.add_decode(request % 3, f"r{request}", 7)
    loads.forget(1)
    assert queue(loads, 1, 0.0) == (0.0, 0.0)
    assert queue(loads, 0, 0.0) == (34.0, 0.0)
    assert loads.num_requests[1] == loads.context_tokens[1] == 0


def test_memory_that_contexts_share_counts_as_larger(loads: LoadAccounts) -> None:
    assert math.isinf(loads.capacity_tokens[1]), "not reported"
    loads.report_memory(1, None)
    assert math.isinf(loads.capacity_tokens[1])
    loads.report_memory(1, KvMemoryStats(1000, 0, 0, 0))
    assert loads.capacity_tokens[1] == 1000
    for _ in range(30):
        loads.report_memory(1, KvMemoryStats(1000, 400, 3, 1200))
    assert loads.capacity_tokens[1] == pytest.approx(3000)
    loads.report_memory(1, KvMemoryStats(1000, int(LEAST_USED * 1000) - 1, 1, 10))
    assert loads.capacity_tokens[1] == pytest.approx(3000), "so little use shows nothing"
    for _ in range(30):
        loads.report_memory(1, KvMemoryStats(1000, 400, 3, 300))
    assert loads.capacity_tokens[1] == pytest.approx(1000), "blocks that are not full are no less than none"
    loads.forget(1)
    assert math.isinf(loads.capacity_tokens[1]) and loads.sharing[1] == 1.0


def test_an_engine_that_only_counts_requests_has_contexts_like_those_placed_there(
    loads: LoadAccounts,
) -> None:
    loads.add_decode(2, "a", 500)
    loads.add_decode(2, "b", 700)
    loads.add_decode(2, "c", 600)
    for _ in range(30):
        loads.report_memory(2, KvMemoryStats(1000, 400, 2))
    assert loads.capacity_tokens[2] == pytest.approx(3000), "two of 600 take 400"
    for _ in range(60):
        loads.report_memory(2, KvMemoryStats(1_000_000, 50_000, 10_000))
    assert loads.capacity_tokens[2] == pytest.approx(1_000_000 * MOST_SHARING)
